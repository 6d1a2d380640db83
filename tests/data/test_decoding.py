"""Decoding a part of an image quickly gives what decoding all of it gives, and finds the same files broken."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from simplejpeg import decode_jpeg
from sklearn.datasets import load_sample_image

from common.data import decoding
from common.data.decoding import Picture
from common.data.images import BrokenImage, open_rgb

CHINA = Image.fromarray(load_sample_image("china.jpg"))  # 640 x 427


def jpeg(width: int, height: int, **options) -> bytes:
    buffer = io.BytesIO()
    options.setdefault("quality", 90)
    CHINA.convert(options.pop("mode", "RGB")).resize((width, height)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def reference(data, box: tuple[int, int, int, int], size: tuple[int, int], filter: Image.Resampling) -> np.ndarray:
    """Decoded whole and resized by Pillow: int[3, H, W]."""
    top, left, height, width = box
    image = open_rgb(data).crop((left, top, left + width, top + height)).resize(size[::-1], filter)
    return np.asarray(image).astype(int).transpose(2, 0, 1)


@pytest.mark.parametrize(
    "width, height, box, size, most, mean",
    [
        (500, 375, (40, 64, 200, 304), (224, 224), 1, 0.01),  # the reference rounds between its passes, as this does
        (500, 375, (0, 0, 375, 500), (96, 64), 1, 0.01),
        (120, 90, (0, 0, 90, 120), (224, 224), 1, 0.01),  # enlarged; of a part the slow way would see its surroundings
        (2000, 1500, (160, 80, 1200, 1600), (224, 224), 8, 0.5),  # from half the resolution
        (4000, 3000, (160, 80, 2400, 3200), (224, 224), 8, 0.5),  # a quarter
        (4000, 3000, (160, 80, 2400, 3200), (96, 128), 8, 0.5),  # an eighth
    ],
)
@pytest.mark.parametrize("filter", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC], ids=["bilinear", "bicubic"])
def test_pixels_agree_with_those_of_the_slow_way(width, height, box, size, most, mean, filter) -> None:
    data = jpeg(width, height)
    seen = Picture(data).region(*box, size, filter.name.lower())
    assert seen.dtype == torch.uint8 and seen.shape == (3, *size)
    off = np.abs(seen.numpy().astype(int) - reference(data, box, size, filter))
    assert off.max() <= most and off.mean() <= mean


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(48, 64), (480, 640)], ids=["small", "reduced"])
def test_a_turned_photograph_is_upright(orientation: int, size: tuple[int, int]) -> None:
    data = jpeg(size[1], size[0], exif=exif(orientation))
    picture, upright = Picture(data), open_rgb(data)
    assert (picture.width, picture.height) == upright.size
    box = (8, 16, upright.height - 16, upright.width - 32)
    off = picture.region(*box, (24, 24), "bilinear").numpy() - reference(data, box, (24, 24), Image.Resampling.BILINEAR)
    assert np.abs(off).mean() < 1.5


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "P"])
def test_any_file_shows_what_open_rgb_shows(kind: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "image"
    try:
        CHINA.resize((60, 40)).convert(mode).save(path, kind)
    except (OSError, ValueError):
        pytest.skip(f"there is no {kind} of {mode}")
    expected = np.asarray(open_rgb(path)).transpose(2, 0, 1)
    for content in (path, str(path), path.read_bytes(), Image.open(path)):
        picture = Picture(content)
        assert np.array_equal(picture.region(0, 0, picture.height, picture.width, (40, 60), "bilinear"), expected)
        assert np.array_equal(picture.region(5, 7, 20, 30, (20, 30), "bilinear"), expected[:, 5:25, 7:37])


def test_a_large_photograph_is_never_decoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def decode(data: bytes, **least):
        sizes.append(decode_jpeg(data, **least))
        return sizes[-1]

    monkeypatch.setattr(decoding, "decode_jpeg", decode)
    for side, decoded in ((500, 500), (895, 895), (896, 448), (1791, 896), (1792, 448), (3583, 896), (3584, 448)):
        Picture(jpeg(side, side)).region(0, 0, side, side, (224, 224), "bilinear")
        assert sizes.pop().shape == (decoded, decoded, 3)


def test_libjpeg_reduces_the_same_for_both_decoders() -> None:
    for width, height, mode in ((3001, 1999, "RGB"), (1800, 2600, "L"), (899, 901, "RGB")):
        for options in ({}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 1}):
            data = jpeg(width, height, mode=mode, **options)
            for reduction in (1, *decoding.REDUCTIONS):
                size = (-(-height // reduction), -(-width // reduction))
                picture = Picture(data)
                part = picture.part(reduction, 0, 0, *size)
                slow = np.asarray(open_rgb(data, reduction=reduction)).transpose(2, 0, 1)
                assert part.shape[1:] == size and np.array_equal(part, slow)


def outcome(show, data: bytes):
    try:
        return show(data)
    except BrokenImage as broken:
        return f"broken: {broken}"


def both(data: bytes) -> tuple:
    """What the quick way and the slow one make of a small file."""

    def whole(data: bytes) -> np.ndarray:
        picture = Picture(data)
        size = picture.height, picture.width
        return picture.region(0, 0, *size, size, "bilinear").numpy()

    return outcome(whole, data), outcome(lambda data: np.asarray(open_rgb(data)).transpose(2, 0, 1), data)


def test_what_is_cut_off_is_broken_for_the_same_reason() -> None:
    data = jpeg(36, 24)
    for end in range(0, len(data), 7):
        quick, slow = both(data[:end])
        assert str(quick) == str(slow) and str(quick).startswith("broken"), end
    with pytest.raises(BrokenImage, match="No such file"):
        Picture("/nowhere/a.jpg")


def test_a_flipped_byte_breaks_an_image_for_both_or_for_none() -> None:
    random, data = np.random.default_rng(0), jpeg(36, 24)
    same = 0
    for place in random.integers(0, len(data), 400):
        changed = bytearray(data)
        changed[place] ^= int(random.integers(1, 256))
        quick, slow = both(bytes(changed))
        same += isinstance(quick, str) == isinstance(slow, str) and (
            isinstance(quick, str) or np.array_equal(quick, slow)
        )
    assert same == 400


def test_a_bomb_is_refused_from_its_header() -> None:
    data = bytearray(jpeg(36, 24))
    place = data.index(b"\xff\xc0") + 5  # height and width of the frame
    data[place : place + 4] = (20_000).to_bytes(2) * 2
    with pytest.raises(BrokenImage, match="400000000 pixels"):
        Picture(bytes(data))
