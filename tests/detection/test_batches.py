"""Batches of detection are a function of their positions; all of a step share one canvas."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from common.data.stream import Stream
from common.detection import batches
from common.detection.batches import EvalDataset, TrainDataset
from common.detection.data.annotated import Annotated
from common.detection.data.masks import decode_masks
from common.detection.evaluation.evaluation import restore_sizes
from common.detection.transforms import BoxAugmentation
from common.errors import Refused
from tests.harness.detections import build_columns


class Painted(Annotated):
    """Grey images of many sizes; their objects are white."""

    def get_name(self, index):
        return f"painted[{index}]"

    def get_content(self, index):
        width, height = self.sizes[index].tolist()
        pixels = np.full((height, width, 3), 40 + index, np.uint8)
        for left, top, right, bottom in (
            self.boxes[self.offsets[index] : self.offsets[index + 1]].astype(int).tolist()
        ):
            pixels[top:bottom, left:right] = 255
        return Image.fromarray(pixels)


def build_source(count=23, seed=0) -> Painted:
    draws = np.random.default_rng(seed)
    sizes = draws.integers(20, 100, (count, 2)).astype(np.int32)
    counts = draws.integers(0, 4, count)
    limits = np.repeat(sizes, counts, axis=0)
    low = np.floor(draws.random(limits.shape) * (limits - 8))
    boxes = np.concatenate(
        [low, low + 4 + np.floor(draws.random(limits.shape) * (limits - low - 4))], 1
    )
    objects = zip(
        boxes, draws.integers(0, 3, len(boxes)), draws.random(len(boxes)) < 0.1, strict=True
    )
    return Painted(
        **build_columns([[next(objects) for _ in range(number)] for number in counts], sizes)
    )


def evaluate_batches(data, resize: BoxAugmentation) -> EvalDataset:
    return EvalDataset(
        data, SimpleNamespace(resize=resize, stride=16, fill=(7, 8, 9), normalize=None)
    )


def build_samples(data, size=6, ways=None) -> TrainDataset:
    augmentation = BoxAugmentation(0, (32, 48), 80, **ways or {})
    return TrainDataset(data, Stream(len(data), size, 0), augmentation, 16, (7, 8, 9), 0)


def test_padding_is_the_share_of_the_pixels_that_no_image_has():
    samples = build_samples(build_source())
    assert not any(side % 16 for side in samples.compute_canvas(1))
    batch = samples.__getitems__(np.arange(6, 12))
    covered = batch.sizes.prod(1).sum().item() / batch.images[:, 0].numel()
    assert 0.05 < samples.compute_padding(1) == pytest.approx(1 - covered)


def test_broken_images_and_partners_leave_the_canvas_as_it_is():
    data = build_source()
    samples = build_samples(data, ways={"mosaic": 0.5, "mixup": 0.5})
    whole = samples.__getitems__(np.arange(6))
    vars(data)["get_content"] = lambda index: b"no image"
    dark = samples.__getitems__(np.arange(6))
    assert dark.images.shape == whole.images.shape and not any(
        len(target["boxes"]) for target in dark.targets
    )
    indices = samples.stream.get_indices(np.arange(6)).tolist()  # partners count in their own turn
    assert [text.split(":")[0] for text in dark.broken] == [
        f"painted[{index}]" for index in indices
    ]


def test_a_trial_has_as_many_boxes_as_a_batch_can_have():
    """Of a mosaic with MixUp, those of five images; the images with the most."""
    data = build_source()
    box_counts = np.sort(np.diff(data.offsets))[::-1]
    for options, parts in (({}, 1), ({"mixup": 0.1}, 2), ({"mosaic": 0.1, "mixup": 0.1}, 5)):
        blank = build_samples(data, 3, options).make_noise(3)
        assert [len(target["boxes"]) for target in blank.targets] == box_counts[
            : 3 * parts
        ].reshape(3, parts).sum(1).tolist()
        assert all(
            (target["boxes"][:, 2:] >= target["boxes"][:, :2]).all() for target in blank.targets
        )


def test_objects_that_get_too_small_to_train_on_have_a_row():
    """At the largest of the short sides. Refused if they are most."""
    boxes = [(10, 10, 12, 30), (0, 0, 30, 30), (0, 0, 3, 50)]
    data = Painted(**build_columns([[(box, 0)] for box in boxes], ((90, 60),)))
    small = "left out: {} (below 1 pixel after resizing), first painted[0]"
    for sides, expected in (((15, 29), f"3 objects, {small.format(1)}"), ((15, 30), "")):
        assert (
            batches._describe_small("--data here", data, BoxAugmentation(0, sides, 800)) == expected
        )
    with pytest.raises(Refused) as refused:
        batches._describe_small("--data here", data, BoxAugmentation(0, (60,), 25))
    message = "--data here: most of its 3 objects would be "
    assert str(refused.value) == f"{message}{small.format(2)}; raise --short_sides and --long_side"


@pytest.mark.parametrize("square, short_side", [(False, 7), (True, 48)])
def test_plain_training_shows_the_pixels_of_the_evaluation(square, short_side):
    """Also of images that are made much smaller, of which no margin is cut off."""
    data = build_source()
    plain = BoxAugmentation(0, (short_side,), 80, square=square)
    evaluation = evaluate_batches(data, plain)
    for index in range(23):
        train_image = plain([data.load_sample(index, 0)], 1000 + index, (7, 8, 9)).image
        height, width = train_image.shape[1:]
        batch = evaluation.__getitems__(np.array([index]))
        assert batch.sizes[0].tolist() == [width, height] and (
            not square or width == height == short_side
        )
        assert torch.equal(batch.images[0, :, :height, :width], train_image)


def test_squares_of_a_step_have_one_side_and_no_padding():
    samples = build_samples(
        build_source(),
        ways={"square": True, "alike": 6, "mosaic": 0.3, "zoom_out": 0.5, "iou_crop": 0.5},
    )
    sides = set()
    for step in range(8):
        batch = samples.__getitems__(np.arange(6 * step, 6 * step + 6))
        assert (
            batch.images.shape[2] == batch.images.shape[3]
            and (batch.sizes == batch.images.shape[2]).all()
        )
        assert samples.compute_padding(step) == 0
        sides.add(batch.images.shape[2])
    assert sides == {32, 48}


def test_what_is_found_is_given_in_pixels_of_the_original():
    """Boxes, and masks on the grids of their boxes."""
    data = build_source()
    evaluation = evaluate_batches(data, BoxAugmentation(0, (48,), 80))
    indices = evaluation.batches(3)[0]
    batch = evaluation.__getitems__(indices)
    quarter = torch.tensor([[0.25, 0.5, 0.5, 1.0]])  # of each image
    detections = [
        {"boxes": quarter * size.repeat(2), "masks": torch.ones(1, 28, 28)} for size in batch.sizes
    ]
    for index, detection in zip(indices, restore_sizes(data, batch, detections), strict=True):
        width, height = data.sizes[index].tolist()
        torch.testing.assert_close(detection["boxes"], quarter * torch.tensor([width, height] * 2))
        (mask,) = decode_masks(detection["rles"], data.sizes[index])
        rows, columns = mask.nonzero()
        assert abs(rows.min() - height / 2) <= 1 and abs(columns.max() + 1 - width / 2) <= 1
