"""Decoding of JPEGs on the device (`--decode device`), for machines whose data workers are too slow for their GPUs.

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

from common.classification.transforms import TrainingTransform, View
from common.data.decoding import Picture
from common.data.images import BrokenImage
from common.errors import Refused

# torchvision 0.29 and later warn in each run that TorchCodec will replace their decoders. docs/data.md says so.
warnings.filterwarnings("ignore", "The image decoding and encoding capabilities of TorchVision", DeprecationWarning)

_MOST_PIXELS = 2**25  # of an image: 100 MB decoded, and four times as much while it is resized
_MOST_REDUCTION = 32  # of a side: CUDA's anti-aliasing refuses more than 47
_AT_ONCE = 2**27  # bytes of decoded pixels in the device's memory at a time, unless one image is larger


@dataclass(frozen=True)
class Jpeg:
    """An image that the device is to decode."""

    data: bytes
    size: tuple[int, int]  # height and width, in pixels
    view: View
    name: str  # for the report, if it turns out to be broken


@dataclass(frozen=True)
class Encoded:
    """The JPEGs of a micro-batch. They stay on the host, in one tensor, so that a worker hands over one file descriptor."""

    data: torch.Tensor  # uint8: the bytes of all files
    jpegs: list[tuple[int, tuple[int, int], View, str]]  # number of bytes, and the other fields of `Jpeg`
    places: list[int]  # of these images in the micro-batch; the worker has decoded the others
    transform: TrainingTransform

    def __iter__(self) -> Iterator[tuple[torch.Tensor, tuple[int, int], View, str]]:
        """uint8[bytes], size, view and name of each."""
        parts = self.data.split([length for length, *_ in self.jpegs])
        return ((part, *rest) for part, (_, *rest) in zip(parts, self.jpegs, strict=True))


def check(transform: TrainingTransform, cached: bool) -> None:
    """Raise `Refused` for options that need pixels in the worker."""
    if transform.policy:
        raise Refused(
            "--decode device: a policy works on images in the data worker; leave out --augment, or take --decode worker"
        )
    if cached:
        raise Refused("--decode device: --cache keeps what data workers decode; leave out one of them")


def varied(transform: TrainingTransform, picture: Picture, name: str) -> torch.Tensor | Jpeg:
    """The transformed pixels uint8[3, H, W], or what the device needs to make them."""
    view = transform.draw(picture.height, picture.width)
    small = picture.height * picture.width <= _MOST_PIXELS
    near = all(part <= _MOST_REDUCTION * wanted for part, wanted in zip(view.box[2:], transform.size, strict=True))
    if small and near and (data := picture.encoded):
        return Jpeg(data, (picture.height, picture.width), view, name)
    return transform.show(picture, view)


def stack(images: list[torch.Tensor | Jpeg], transform: TrainingTransform) -> tuple[torch.Tensor, Encoded | None]:
    """Pixels uint8[n, 3, H, W] (channels_last) of the images that the worker has decoded, and the others, or None."""
    pixels = [image.permute(1, 2, 0) for image in images if isinstance(image, torch.Tensor)]
    stacked = torch.stack(pixels) if pixels else torch.empty(0, *transform.size, 3, dtype=torch.uint8)
    jpegs = {place: image for place, image in enumerate(images) if isinstance(image, Jpeg)}
    encoded = None
    if jpegs:
        data = torch.frombuffer(bytearray().join(jpeg.data for jpeg in jpegs.values()), dtype=torch.uint8)
        rest = [(len(jpeg.data), jpeg.size, jpeg.view, jpeg.name) for jpeg in jpegs.values()]
        encoded = Encoded(data, rest, list(jpegs), transform)
    return stacked.permute(0, 3, 1, 2), encoded


def noise() -> Jpeg:
    """Noise of the size of a photograph, shown whole, to try how much memory a batch takes."""
    pixels = torch.randint(256, (64, 64, 3), dtype=torch.uint8).repeat_interleave(16, 0).repeat_interleave(16, 1)
    size = tuple(pixels.shape[:2])
    return Jpeg(encode_jpeg(pixels.numpy()), size, View((0, 0, *size), vflip=False, hflip=False), "noise")


@functools.cache
def decoder(device: torch.device) -> "Decoder":
    """The decoder of a device: one per process."""
    return Decoder(device)


class Decoder:
    """Decodes on one device. On a GPU the current stream waits for the pixels; the host waits only for nvJPEG."""

    def __init__(self, device: torch.device):
        self._device, self._decodes = device, False
        # nvJPEG writes on a stream of its own and does not wait until reused memory has been read. So its output is allocated
        # on a stream that does nothing else, and returns there after it has been read.
        self._memory = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last = None  # nvJPEG's input must live until it has been read

    def __call__(self, pixels: torch.Tensor, encoded: Encoded) -> tuple[torch.Tensor, tuple[str, ...]]:
        """uint8[B, 3, H, W] of a whole micro-batch, and name and reason of each broken image, which a black one replaces.

        `pixels`, on the device, are those of the images that the worker decoded. Raises `Refused` if the device can't decode.
        """
        self._last, transform = encoded, encoded.transform
        images, broken = [], []
        for jpegs in _portions(encoded):
            resized = []
            wholes = self._decode([data for data, *_ in jpegs])
            for whole, (data, size, view, name) in zip(wholes, jpegs, strict=True):
                if whole is not None and whole.shape[1:] == size:
                    top, left, height, width = view.box
                    part = view.mirrored(whole[None, :, top : top + height, left : left + width])
                    resized.append(_resized(part, transform))
                    continue
                try:  # another decoder may read it, or tell what is wrong with it
                    part = Picture(data.numpy().tobytes()).region(*view.box, transform.size, transform.interpolation)
                except BrokenImage as error:
                    broken.append(f"{name}: {error}")
                    part = torch.zeros(3, *transform.size, dtype=torch.uint8)
                resized.append(view.mirrored(part).to(self._device, torch.float32)[None])
            images.append(torch.cat(resized).round_().clamp_(0, 255).to(torch.uint8))
        return _in_order(pixels, torch.cat(images), encoded.places), tuple(broken)

    def _decode(self, jpegs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """uint8[3, H, W] of each, or None if the device can't decode it."""
        try:
            return self._try(jpegs)
        except RuntimeError as error:
            _raise_if_memory(error)
            self._see_that_it_decodes()
        result = []
        for jpeg in jpegs:  # one by one: a single bad image makes all of them fail
            try:
                result += self._try([jpeg])
            except RuntimeError as error:
                _raise_if_memory(error)
                result.append(None)
        return result

    def _try(self, jpegs: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.cuda.stream(self._memory) if self._memory else contextlib.nullcontext():
            wholes = decode_jpeg(jpegs, ImageReadMode.RGB, self._device)
        if self._memory:
            reading = torch.cuda.current_stream(self._device)
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
            raise Refused(
                f"--decode device: {self._device} can't decode JPEGs here ({reason}); take --decode worker"
            ) from None


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


def _resized(part: torch.Tensor, transform: TrainingTransform) -> torch.Tensor:
    """uint8[1, 3, height, width] -> float32[1, 3, H, W]: CUDA can't resize uint8 with anti-aliasing."""
    part = part.to(torch.float32)
    if part.shape[2:] == transform.size:
        return part
    mode = "bilinear" if transform.interpolation == "bilinear" else "bicubic"
    return F.interpolate(part, transform.size, mode=mode, antialias=True)


def _in_order(pixels: torch.Tensor, decoded: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Both in one tensor, with `decoded` at `places`. Slices, because indices would have to be copied to the device."""
    if not len(pixels):
        return decoded
    rows = dict(zip(places, decoded.split(1), strict=True))
    others = iter(pixels.split(1))
    return torch.cat([rows[place] if place in rows else next(others) for place in range(len(pixels) + len(decoded))])


def _raise_if_memory(error: RuntimeError) -> None:
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        raise error
