"""Decoding of JPEGs on the device (`--decode device`), if data workers are too slow for their GPUs.

A worker reads the header, draws the view as always, and hands over the file's bytes. The device decodes the whole image (a GPU
with nvJPEG, the CPU with libjpeg), crops, flips and resizes it with anti-aliasing. Workers decode the images that it can't.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from simplejpeg import encode_jpeg
from torchvision.io import ImageReadMode, decode_jpeg

from common.data.decoding import Picture, View
from common.data.images import BrokenImage
from common.distributed import devices
from common.errors import Refused

# torchvision 0.29 and later warn in each run that TorchCodec will replace their decoders.
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities of TorchVision", DeprecationWarning)

_MAX_PIXELS = 2**25  # of an image: 100 MB decoded, and four times as much while it is resized
_MAX_REDUCTION = 32  # of a side: CUDA's anti-aliasing refuses more than 47
_AT_ONCE = 2**27  # bytes of decoded pixels in the device's memory at a time, unless one image is larger


@dataclass(frozen=True)
class Jpeg:
    """An image that the device is to decode."""

    data: bytes
    size: tuple[int, int]  # height and width, in pixels
    view: View


class Encoded:
    """The JPEGs of a micro-batch, in one tensor on the host, so that a worker hands over one file."""

    def __init__(self, jpegs: list[Jpeg], names: list[str], places: list, interpolation: str):
        self.places = places  # of these images in the micro-batch; the worker has decoded the others
        self.interpolation = interpolation
        self._data = torch.frombuffer(bytearray().join(jpeg.data for jpeg in jpegs), dtype=torch.uint8)
        self._lengths = [len(jpeg.data) for jpeg in jpegs]
        self._facts = [(jpeg.size, jpeg.view, name) for jpeg, name in zip(jpegs, names, strict=True)]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, tuple[int, int], View, str]]:
        """uint8[bytes], height and width, view and name of each."""
        contents = self._data.split(self._lengths)
        return ((content, *facts) for content, facts in zip(contents, self._facts, strict=True))


def refuse_cache(cached: bool) -> None:
    if cached:
        raise Refused("--decode device: --cache keeps what data workers decode; leave out one of them")


def for_device(picture: Picture, view: View) -> Jpeg | None:
    """The image for the device, which shows this view; None if a worker has to decode it."""
    is_small = picture.height * picture.width <= _MAX_PIXELS
    is_near = all(part <= _MAX_REDUCTION * wanted for part, wanted in zip(view.box[2:], view.size, strict=True))
    data = picture.encoded if is_small and is_near else None
    return Jpeg(data, (picture.height, picture.width), view) if data else None


def noise(size: tuple[int, int]) -> Jpeg:
    """Noise of the size of a photograph, shown whole, to try how much memory a batch takes."""
    pixels = torch.randint(256, (64, 64, 3), dtype=torch.uint8).repeat_interleave(16, 0).repeat_interleave(16, 1)
    shape = tuple(pixels.shape[:2])
    return Jpeg(encode_jpeg(pixels.numpy()), shape, View((0, 0, *shape), size))


@functools.cache
def decoder(device: torch.device) -> "Decoder":
    """The decoder of a device: one per process."""
    return Decoder(device)


class Decoder:
    """Decodes on one device. The current stream waits for the pixels; the host waits only for nvJPEG."""

    def __init__(self, device: torch.device):
        if device.type not in ("cuda", "cpu"):  # where torchvision would decode on the host, without a word
            raise Refused(f"--decode device: torchvision decodes on CUDA, not on {device.type}; take --decode worker")
        self._device, self._decodes = device, False
        # nvJPEG writes on a stream of its own and does not wait until reused memory has been read. So its output is allocated
        # on a stream that does nothing else, and returns there after it has been read.
        self._memory = torch.Stream(device) if devices.has_streams(device) else None
        self._last = None  # nvJPEG's input must live until it has been read

    def __call__(self, encoded: Encoded) -> tuple[list[torch.Tensor], dict[int, str]]:
        """float32[3, H, W] of each image, 0 to 255; by number, name and reason of each broken one.

        A black image replaces a broken one. Raises `Refused` if the device can't decode.
        """
        self._last = encoded
        images, broken = [], {}
        for jpegs in _portions(encoded):
            wholes = self._decode([data for data, *_ in jpegs])
            for whole, (data, size, view, name) in zip(wholes, jpegs, strict=True):
                if whole is not None and whole.shape[1:] == size:
                    top, left, height, width = view.box
                    part = view.mirrored(whole[None, :, top : top + height, left : left + width])
                    images.append(_resized(part, view.size, encoded.interpolation)[0])
                    continue
                try:  # another decoder may read it, or name the fault
                    part = Picture(data.numpy().tobytes()).region(*view.box, view.size, encoded.interpolation)
                except BrokenImage as error:
                    broken[len(images)] = f"{name}: {error}"
                    part = torch.zeros(3, *view.size, dtype=torch.uint8)
                images.append(view.mirrored(part).to(self._device, torch.float32))
        torch._foreach_round_(images)
        torch._foreach_clamp_min_(images, 0)
        torch._foreach_clamp_max_(images, 255)
        return images, broken

    def _decode(self, jpegs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """uint8[3, H, W] of each, or None if the device can't decode it."""
        try:
            return self._try(jpegs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                raise
        self._see_that_it_decodes()
        # One by one: a single bad image makes all of them fail.
        return [self._decode([jpeg])[0] for jpeg in jpegs] if len(jpegs) > 1 else [None]

    def _try(self, jpegs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._memory or contextlib.nullcontext():
            wholes = decode_jpeg(jpegs, ImageReadMode.RGB, self._device)
        if self._memory:
            reading = torch.accelerator.current_stream(self._device)
            reading.wait_stream(self._memory)
            for whole in wholes:
                whole.record_stream(reading)
        self._decodes = True
        return wholes

    def _see_that_it_decodes(self) -> None:
        """Raise `Refused` if the device, or this torchvision, can't decode any image."""
        if self._decodes:
            return
        grey = torch.full((16, 16, 3), 128, dtype=torch.uint8).numpy()
        try:
            self._try([torch.frombuffer(bytearray(encode_jpeg(grey)), dtype=torch.uint8)])
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            problem = f"{self._device} can't decode JPEGs here ({reason})"
            raise Refused(f"--decode device: {problem}; take --decode worker") from None


def _portions(encoded: Encoded) -> Iterator[list[tuple[torch.Tensor, tuple[int, int], View, str]]]:
    """The JPEGs in order, in portions that fit into `_AT_ONCE` when decoded."""
    portion, filled = [], 0
    for jpeg in encoded:
        _, (height, width), *_ = jpeg
        if portion and filled + 3 * height * width > _AT_ONCE:
            yield portion
            portion, filled = [], 0
        portion.append(jpeg)
        filled += 3 * height * width
    yield portion


def _resized(part: torch.Tensor, size: tuple[int, int], interpolation: str) -> torch.Tensor:
    """uint8[1, 3, height, width] -> float32[1, 3, *size]: CUDA can't resize uint8 with anti-aliasing."""
    part = part.to(torch.float32)
    if part.shape[2:] == size:
        return part
    mode = "bilinear" if interpolation == "bilinear" else "bicubic"
    return F.interpolate(part, size, mode=mode, antialias=True)
