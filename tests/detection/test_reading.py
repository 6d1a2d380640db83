"""Images with boxes that are decoded in part show what decoding all of them shows."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from common.data.batch_plan import BatchPlan
from common.data.cache import open_cache
from common.data.decoding import Picture, pil_to_tensor
from common.data.images import BrokenImage, open_rgb
from common.data.loader import Prefetcher, create_train_loader
from common.data.stream import Stream
from common.detection.batches import EvalDataset, TrainDataset
from common.detection.data import scenes
from common.detection.data.annotated import Annotated, Sample
from common.detection.transforms import BoxAugmentation
from common.errors import Refused
from tests.harness.detections import build_columns, find_extents

CHINA = Image.fromarray(load_sample_image("china.jpg"))  # 640 x 427
FILL = (7, 8, 9)
GEOMETRY = {"hflip": 0.5, "iou_crop": 0.3, "zoom_out": 0.3}


def write_file(
    width: int, height: int, format: str = "JPEG", mode: str = "RGB", orientation: int = 1
) -> bytes:
    buffer = io.BytesIO()
    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
    options = {"quality": 90, "exif": exif} if format == "JPEG" else {}
    CHINA.resize((width, height)).convert(mode).save(buffer, format, **options)
    return buffer.getvalue()


FILES = {
    "plain": write_file(120, 90),
    "odd sides": write_file(91, 123),
    "small": write_file(20, 30),
    "grey": write_file(100, 80, mode="L"),
    "large": write_file(900, 700),
    "turned": write_file(120, 90, orientation=6),
    "print": write_file(120, 90, mode="CMYK"),
    "PNG": write_file(120, 90, "PNG"),
}
BROKEN = {"cut off": write_file(120, 90)[:1500], "another size": write_file(60, 45)}


class Files(Annotated):
    """Files with two boxes each, whose sizes are those of `FILES`."""

    def get_name(self, index: int) -> str:
        return list(self.files)[index]

    def get_content(self, index: int) -> bytes:
        return list(self.files.values())[index]


def build_source(files: dict[str, bytes]) -> Files:
    sizes = [(120, 90) if name in BROKEN else open_rgb(data).size for name, data in files.items()]
    shares = np.array([[0.1, 0.2, 0.6, 0.7], [0.5, 0.3, 0.95, 0.9]])
    source_files = Files(
        **build_columns(
            [list(zip(shares * np.tile(size, 2), (0, 1), strict=True)) for size in sizes],
            sizes,
            ("a", "b"),
        )
    )
    source_files.__dict__["files"] = files
    return source_files


def build_samples(data, cache=None) -> TrainDataset:
    augmentation = BoxAugmentation(3, (48, 64), 100, **GEOMETRY)
    return TrainDataset(data, Stream(len(data), 8, 5), augmentation, 16, FILL, 5, cache=cache)


def read_batches(samples) -> list:
    """The batches of four steps on the CPU, and what was broken in them."""
    feed = Prefetcher(
        create_train_loader(samples, BatchPlan(8, 1, 8), 0, 4, 0), torch.device("cpu")
    )
    return [*[next(feed) for _ in range(4)], feed.pop_stats()[1]]


def measure_offset(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.int() - right.int()).abs().float()


@pytest.mark.parametrize(
    "size, short_side, max_size, mean, edge",
    [  # of 255, of the worst image; in pixels of the canvas
        ((640, 480), 800, 0, 0, 0),  # nothing is reduced
        ((640, 480), 320, 20, 0.3, 0.25),  # only where it is zoomed out
        # always reduced: an edge moves by half a pixel of what is decoded
        ((640, 480), 120, 50, 3, 0.25),
        ((1920, 1080), 256, 70, 4, 0.25),
    ],
)
def test_samples_are_those_of_decoding_everything(size, short_side, max_size, mean, edge) -> None:
    data = write_file(*size)
    lazy = Picture(data)
    whole = Picture(pil_to_tensor(open_rgb(data)))
    draws = np.random.default_rng(0)
    low = draws.random((6, 2)) * 0.7
    boxes = (
        np.concatenate([low, low + 0.05 + 0.25 * draws.random((6, 2))], 1) * np.tile(size, 2)
    ).astype(np.float32)
    masks = np.zeros((6, size[1], size[0]), np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, np.rint(boxes).astype(int), strict=True):
        mask[top:bottom, left:right] = 1
    columns = boxes, np.arange(6), np.zeros(6, bool), masks, np.array(size)
    augmentation = BoxAugmentation(0, (short_side,), 2 * short_side, **GEOMETRY)
    means = []
    for position in range(24):
        actual, expected = (
            augmentation([Sample(picture, *columns)], position, FILL) for picture in (lazy, whole)
        )
        assert (
            actual.image.shape == expected.image.shape
            and actual.labels.tolist() == expected.labels.tolist()
        )
        off = measure_offset(actual.image, expected.image)
        means.append(off.mean().item())
        assert off.max() <= max_size and means[-1] <= mean
        assert not len(actual.boxes) or (actual.boxes - expected.boxes).abs().max() <= edge
        # A pixel, enlarged.
        assert not len(actual.boxes) or (find_extents(actual.masks) - actual.boxes).abs().max() <= 2
    assert np.mean(means) <= 1.5 and (max_size == 0 or max(means) > 0)


def test_every_file_is_upright_and_evaluated_in_full() -> None:
    """As the script beside an exported detector does, at whatever size."""
    data = build_source(FILES)
    augmentation = BoxAugmentation(0, (10_000,), 48)  # their long side becomes 48
    evaluation = EvalDataset(
        data, SimpleNamespace(resize=augmentation, stride=16, fill=FILL, normalize=None)
    )
    for index, content in enumerate(FILES.values()):
        image = open_rgb(content)
        result = augmentation([data.load_sample(index, 0)], index, FILL)
        assert image.size == tuple(data.sizes[index])
        width, height = result.image.shape[:0:-1]
        expected = pil_to_tensor(image.resize((width, height), Image.Resampling.BILINEAR))
        assert measure_offset(result.image, expected).mean() <= 3
        evaluated = evaluation.__getitems__(np.array([index])).images[0, :, :height, :width]
        assert measure_offset(evaluated, expected).max() <= 1
        boxes = torch.from_numpy(data.load_sample(index, 0).boxes) * 48 / max(image.size)
        assert torch.allclose(result.boxes, boxes, atol=0.6)


def test_a_broken_image_is_an_empty_scene_and_named() -> None:
    """Found in its header, or when its pixels are decoded. Other images stay as they are."""
    files = FILES | BROKEN
    *whole, none = read_batches(
        build_samples(build_source(FILES | dict.fromkeys(BROKEN, FILES["plain"])))
    )
    *seen, broken = read_batches(build_samples(build_source(files)))
    reasons = {}
    for index, name in enumerate(files):
        try:
            build_source(files).load_sample(index, 0).image.decode()
        except BrokenImage as error:
            reasons[index] = f"{name}: {error}"
    assert list(reasons) == [8, 9] and not none
    stream = Stream(len(files), 8, 5)
    expected = []
    for step, (actual, reference_batch) in enumerate(zip(seen, whole, strict=True)):
        for i, index in enumerate(stream.get_indices(stream.get_positions(step, (0, 8))).tolist()):
            if index in reasons:
                expected.append(reasons[index])
                target = actual.targets[i]
                assert (
                    not len(target["boxes"]) and not len(target["labels"]) and not target["regions"]
                )
                assert actual.images[i].unique().tolist() in ([0], [0, *FILL], list(FILL))
            else:
                assert torch.equal(actual.images[i], reference_batch.images[i])
                assert torch.equal(actual.targets[i]["boxes"], reference_batch.targets[i]["boxes"])
        assert torch.equal(actual.sizes, reference_batch.sizes)
    assert sorted(broken) == sorted(expected) and len(expected) > 3


def test_a_cache_shows_nearly_the_same() -> None:
    """Boxes are at most a pixel off; images are kept at most as large as a square of 64 pixels."""
    data = build_source({name: content for name, content in FILES.items() if name != "large"})
    *whole, _ = read_batches(build_samples(data))
    cache = open_cache(len(data), 64, "")
    for _ in range(2):  # filled, then read
        *cached, _ = read_batches(build_samples(data, cache))
        for expected, actual in zip(whole, cached, strict=True):
            assert 0 < measure_offset(actual.images, expected.images).mean() < 6
            for expected_target, actual_target in zip(
                expected.targets, actual.targets, strict=True
            ):
                assert expected_target["labels"].tolist() == actual_target["labels"].tolist()
                assert (
                    not len(expected_target["boxes"])
                    or (expected_target["boxes"] - actual_target["boxes"]).abs().max() <= 1
                )


def test_a_cache_of_scenes_made_afresh_is_refused() -> None:
    with pytest.raises(Refused, match="--cache: every position has an image of its own"):
        build_samples(scenes.load(0)[0], cache=open_cache(8, 32, ""))
