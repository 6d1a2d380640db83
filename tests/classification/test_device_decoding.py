"""The device decodes to the same pixels as a worker, up to rounding. No broken or unusual image stops a run."""

from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from common.classification.batches import TrainingSamples
from common.classification.image_sizes import StepSizes
from common.classification.transforms import TrainingTransform, training_transform
from common.data import device_decoding
from common.data.batch_plan import BatchPlan
from common.data.decoding import Picture
from common.data.device_decoding import Jpeg, for_device
from common.data.images import BrokenImage
from common.data.loader import Prefetcher, training_loader
from common.data.stream import Stream
from common.errors import Refused
from tests.classification.test_batches import Numbers
from tests.classification.view_settings import ViewSettings
from tests.harness.photographs import CHINA, encoded, exif, jpeg

DATA = {"input_size": (3, 64, 48), "interpolation": "bilinear", "mean": (0.5,) * 3, "std": (0.2,) * 3}
VARIED = ViewSettings(crop_scale=0.3, hflip=0.5, vflip=0.5)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with nvJPEG")],
    ),
]
# Of 255. On the CPU it is one decoder, and resizing rounds once where the worker's rounds twice, and once limits what goes
# beyond black and white. nvJPEG enlarges colours that are stored at half the resolution in another way than libjpeg.
MOST, MEAN = {"cpu": 2, "cuda:0": 80}, {"cpu": 0.3, "cuda:0": 2.5}
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities of TorchVision")


USUAL = {
    "plain": jpeg(120, 90),
    "odd sides": jpeg(91, 123),
    "small": jpeg(20, 30),
    "grey": jpeg(100, 80, "L"),
    "progressive": jpeg(120, 90, progressive=True),
    "full colours": jpeg(120, 90, subsampling=0),
    "with notes": jpeg(120, 90, exif=exif(1)),
}
ODD = {
    "turned": jpeg(120, 90, exif=exif(6)),
    "print": jpeg(120, 90, "CMYK"),
    "PNG": encoded(CHINA.resize((120, 90)), "PNG"),
    "transparent": encoded(CHINA.resize((120, 90)).convert("RGBA"), "WEBP"),
}
BROKEN = {
    "cut off": jpeg(120, 90)[:1500],
    "no pixels": jpeg(120, 90)[:700],
}


class Files(Numbers):
    """A source of these files."""

    def __init__(self, files: dict[str, bytes]):
        super().__init__(len(files))
        self.files = files

    def name(self, index: int) -> str:
        return list(self.files)[index]

    def content(self, index: int) -> bytes:
        return list(self.files.values())[index]


def samples(files: dict[str, bytes], decode: str, config: ViewSettings = VARIED, **data) -> TrainingSamples:
    transform = training_transform(config, DATA | data)
    return TrainingSamples(Files(files), Stream(len(files), 12, 5), transform, 5, decode=decode)


def varied(transform: TrainingTransform, picture: Picture) -> torch.Tensor | Jpeg:
    view = transform.sample(picture.height, picture.width)
    return for_device(picture, view) or transform.show(picture, view)


def batches(
    files: dict[str, bytes], decode: str, device: str = "cpu", limit: int = 12, workers: int = 0, **data
) -> list:
    plan = BatchPlan(12, 1, limit)
    feed = Prefetcher(training_loader(samples(files, decode, **data), plan, 0, 4, workers), torch.device(device))
    seen = [next(feed) for _ in range(4 * plan.micro_steps)]
    return [*seen, feed.take()[1]]


def test_the_device_resizes_to_the_size_of_the_step() -> None:
    sizes, plan = StepSizes(((32, 32), (64, 64)), 5, 12), BatchPlan(12, 1, 12)
    several = replace(samples(USUAL, "device"), image_sizes=sizes)
    feed = Prefetcher(training_loader(several, plan, 0, 6, 0), torch.device("cpu"))
    assert [next(feed).images.shape[2] for _ in range(6)] == sizes.of(12 * np.arange(6))[:, 0].tolist()
    assert several.blank(2).to(torch.device("cpu")).complete().images.shape == (2, 3, 64, 64)


def off(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.cpu().int() - other.cpu().int()).abs()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pixels_crops_and_mirror_images_are_those_of_the_worker(device: str, interpolation: str) -> None:
    files = USUAL | ODD
    *by_worker, none = batches(files, "worker", interpolation=interpolation)
    *by_device, broken = batches(files, "device", device, interpolation=interpolation)
    assert none == broken == ()
    for theirs, mine in zip(by_worker, by_device, strict=True):
        assert mine.images.shape == (12, 3, 64, 48) and mine.images.dtype == torch.uint8
        assert mine.images.device == torch.device(device) and mine.encoded is None
        assert torch.equal(mine.positions.cpu(), theirs.positions) and torch.equal(mine.labels.cpu(), theirs.labels)
        assert off(mine.images, theirs.images).max() <= MOST[device]
        assert off(mine.images, theirs.images).float().mean((1, 2, 3)).max() <= MEAN[device]
        assert off(mine.images, theirs.images.flip(3)).float().mean() > 10  # another view would be seen


def test_a_sample_is_the_same_in_whatever_batch_worker_and_portion_of_the_memory(monkeypatch) -> None:
    files = USUAL | ODD | BROKEN
    whole, elsewhere = batches(files, "device"), batches(files, "device", limit=4, workers=2)
    monkeypatch.setattr(device_decoding, "_AT_ONCE", 70_000)  # one or two
    seen = [torch.cat([batch.images for batch in each[:-1]]) for each in (whole, elsewhere, batches(files, "device"))]
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    assert sorted(whole[-1]) == sorted(elsewhere[-1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_broken_jpeg_is_black_and_named_with_the_reason_the_worker_gives(device: str) -> None:
    files = {"whole": USUAL["plain"]} | BROKEN
    *seen, broken = batches(files, "device", device)
    reasons = {}
    for name, data in BROKEN.items():
        with pytest.raises(BrokenImage) as error:
            Picture(data).region(0, 0, 90, 120, (8, 8), "bilinear")
        reasons[name] = f"{name}: {error.value}"
    drawn = [list(files)[index] for index in Stream(len(files), 12, 5).indices(np.arange(48))]
    shown = [bool(image.any()) for batch in seen for image in batch.images]
    assert shown == [name == "whole" for name in drawn]
    assert sorted(broken) == sorted(reasons[name] for name in drawn if name != "whole") and len(broken) == 32


def test_what_the_device_cannot_do_the_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    transform = training_transform(VARIED, DATA)
    for name, data in USUAL.items():
        assert isinstance(varied(transform, Picture(data)), Jpeg), name
    for name, data in ODD.items():
        assert isinstance(varied(transform, Picture(data)), torch.Tensor), name
    tiny = replace(transform, size=(4, 4), least_area=1.0)
    assert isinstance(varied(tiny, Picture(jpeg(4 * 33, 4 * 33))), torch.Tensor)
    monkeypatch.setattr(device_decoding, "_MAX_PIXELS", 120 * 90 - 1)
    assert isinstance(varied(transform, Picture(USUAL["plain"])), torch.Tensor)


def test_a_decoder_that_refuses_an_image_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    files, decode = {"a": USUAL["plain"], "grey": USUAL["grey"]}, device_decoding.decode_jpeg
    expected = batches(files, "worker")

    def picky(jpegs, mode, device):
        if any(len(jpeg) == len(USUAL["grey"]) for jpeg in jpegs):
            raise RuntimeError("Unknown chroma subsampling")
        return decode(jpegs, mode, device)

    monkeypatch.setattr(device_decoding, "decode_jpeg", picky)
    *seen, broken = batches(files, "device")
    assert broken == () and all(off(a.images, b.images).max() <= 1 for a, b in zip(seen, expected, strict=False))


NO_DECODER = r"--decode device: cpu can't .*\(.*nvJPEG support\); take --decode worker"


@pytest.mark.parametrize(
    "message, error, told",
    [
        ("decode_jpegs_cuda: torchvision not compiled with nvJPEG support\nand a trace", Refused, NO_DECODER),
        ("Error while decoding JPEG images: CUDA out of memory. Tried", RuntimeError, "out of memory"),
    ],
)
def test_a_device_that_decodes_nothing_is_refused_and_one_without_memory_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, message: str, error: type[Exception], told: str
) -> None:
    monkeypatch.setattr(device_decoding, "decode_jpeg", MagicMock(side_effect=RuntimeError(message)))
    device_decoding.decoder.cache_clear()
    with pytest.raises(error, match=told):
        batches(USUAL, "device")


def test_what_needs_pixels_in_the_worker_is_refused() -> None:
    with pytest.raises(Refused, match=r"--decode device: a policy .*leave out --augment, or take --decode worker"):
        samples(USUAL, "device", replace(VARIED, augment="rand-m5-n1"))


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_a_device_that_torchvision_has_no_decoder_for_is_refused(kind: str) -> None:
    """Else the main process would decode every image, one after the other."""
    with pytest.raises(Refused, match=f"^--decode device: .*not on {kind}; take --decode worker$"):
        device_decoding.decoder(torch.device(kind))
