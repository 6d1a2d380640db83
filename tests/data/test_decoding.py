"""Decoding a part of an image quickly gives what decoding all of it gives, and finds the same files
broken.
"""

import struct
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from simplejpeg import decode_jpeg

from common.data import decoding
from common.data.decoding import Picture
from common.data.images import BrokenImage, open_rgb
from common.detection.data.image_headers import read_file_headers, read_header
from tests.data.test_images import build_chunk, build_tiff, read_pixels
from tests.harness.photographs import CHINA, build_exif, encode, encode_jpeg


def decode_reference(
    data, box: tuple[int, int, int, int], size: tuple[int, int], filter: Image.Resampling
) -> np.ndarray:
    """Decoded whole and resized by Pillow: int[3, H, W]."""
    top, left, height, width = box
    image = open_rgb(data).crop((left, top, left + width, top + height)).resize(size[::-1], filter)
    return np.asarray(image).astype(int).transpose(2, 0, 1)


@pytest.mark.parametrize(
    "width, height, box, size, max_difference, mean",
    [
        # the reference rounds between its passes, as this does
        (500, 375, (40, 64, 200, 304), (224, 224), 1, 0.01),
        # enlarged; of a part the slow way would see its surroundings
        (120, 90, (0, 0, 90, 120), (224, 224), 1, 0.01),
        (2000, 1500, (160, 80, 1200, 1600), (224, 224), 8, 0.5),  # from half the resolution
        (4000, 3000, (160, 80, 2400, 3200), (96, 128), 8, 0.5),  # an eighth
    ],
)
@pytest.mark.parametrize(
    "filter", [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC], ids=["bilinear", "bicubic"]
)
def test_pixels_agree_with_those_of_the_slow_way(
    width, height, box, size, max_difference, mean, filter
) -> None:
    data = encode_jpeg(width, height)
    seen = Picture(data).crop_and_resize(*box, size, filter.name.lower())
    assert seen.dtype == torch.uint8 and seen.shape == (3, *size)
    off = np.abs(seen.numpy().astype(int) - decode_reference(data, box, size, filter))
    assert off.max() <= max_difference and off.mean() <= mean


def test_a_turned_photograph_is_upright() -> None:
    for orientation in range(1, 9):
        for height, width in ((48, 64), (480, 640)):  # whole, and at a reduced resolution
            data = encode_jpeg(width, height, exif=build_exif(orientation))
            picture = Picture(data)
            upright = open_rgb(data)
            assert (picture.width, picture.height) == upright.size
            box = (8, 16, upright.height - 16, upright.width - 32)
            expected = decode_reference(data, box, (24, 24), Image.Resampling.BILINEAR)
            assert (
                np.abs(
                    picture.crop_and_resize(*box, (24, 24), "bilinear").numpy() - expected
                ).mean()
                < 1.5
            ), orientation


def build_segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def write_turned_files() -> dict[str, bytes]:
    """Photographs of 64 x 48 pixels as stored, with orientation 6 in all places where it may stand."""
    tags = build_exif(6).tobytes()
    tags = tags if tags.startswith(b"Exif") else b"Exif\0\0" + tags
    packet = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    )
    in_exif = build_segment(0xE1, tags)
    in_xmp = build_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + packet)
    filler = b"".join(build_segment(0xEB, b"\xff\xda" + bytes(60_000)) for _ in range(3))
    segments = {
        "EXIF": in_exif,
        "EXIF behind 128 KiB": filler + in_exif,
        "EXIF behind 8 KiB": build_segment(0xE2, bytes(9_000)) + in_exif,
        "XMP": in_xmp,
        "XMP behind 128 KiB": filler + in_xmp,
        "EXIF without orientation, and XMP": build_segment(0xE1, b"Exif\0\0II*\0\x08" + bytes(5))
        + in_xmp,
    }
    plain = encode_jpeg(64, 48)
    files = {name: plain[:2] + inserted + plain[2:] for name, inserted in segments.items()}
    image = CHINA.resize((64, 48))
    png = encode(image)
    for side, index in (("before", png.index(b"IDAT") - 4), ("behind", len(png) - 12)):
        for kind, body in ((b"eXIf", tags[6:]), (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + packet)):
            files[f"PNG, {kind.decode()} {side} the pixels"] = (
                png[:index] + build_chunk(kind, body) + png[index:]
            )
    floats = np.asarray(image, np.float32) / 255
    return files | {
        "WebP": encode(image, "WEBP", exif=build_exif(6)),
        "WebP, XMP": encode(image, "WEBP", xmp=packet),
        "TIFF": encode(image, "TIFF", exif=build_exif(6)),
        "TIFF that Pillow can't read": build_tiff(floats, "rgb", extratags=[(274, 3, 1, 6, True)]),
        "AVIF": encode(image, "AVIF", exif=build_exif(6)),
    }


@pytest.mark.parametrize("name, data", write_turned_files().items(), ids=write_turned_files())
def test_all_readers_agree_on_the_orientation(name: str, data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(data)
    evaluated = read_pixels(file)
    trained = Picture(data)
    assert evaluated.shape == (trained.height, trained.width, 3) == (64, 48, 3)
    if not data.startswith(b"\xff\xd8"):  # no JPEG, whose colours depend on what is beside
        part = trained.crop_and_resize(5, 7, 20, 30, (20, 30), "bilinear")
        assert np.array_equal(part.permute(1, 2, 0), evaluated[5:25, 7:37])
    upright = CHINA.resize((64, 48)).transpose(Image.Transpose.ROTATE_270)
    assert np.abs(evaluated.astype(int) - np.asarray(upright)).mean() < 12
    of_file = read_file_headers(str(tmp_path), pa.array([b"image"], pa.large_binary()))[0]
    assert tuple(of_file) == read_header(data) == (64, 48, 6, len(data))


def test_a_large_photograph_is_never_decoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = MagicMock(wraps=decode_jpeg)
    monkeypatch.setattr(decoding, "decode_jpeg", decode)
    for side, decoded in ((895, 895), (896, 448), (1791, 896), (1792, 448), (3584, 448)):
        Picture(encode_jpeg(side, side)).crop_and_resize(0, 0, side, side, (224, 224), "bilinear")
        assert (
            decode.call_args.kwargs["min_height"] == decode.call_args.kwargs["min_width"] == decoded
        )


def test_libjpeg_reduces_the_same_for_both_decoders() -> None:
    for options in ({}, {"mode": "L"}, {"progressive": True}, {"subsampling": 0}):
        data = encode_jpeg(899, 601, **options)
        for reduction in (1, *decoding.REDUCTIONS):
            size = (-(-601 // reduction), -(-899 // reduction))
            part = Picture(data).decode_crop(reduction, 0, 0, *size)
            slow = np.asarray(open_rgb(data, reduction=reduction)).transpose(2, 0, 1)
            assert part.shape[1:] == size and np.array_equal(part, slow)


def decode(show, data: bytes):
    try:
        return show(data)
    except BrokenImage as broken:
        return f"broken: {broken}"


def test_a_damaged_file_is_broken_for_both_for_the_same_reason() -> None:
    random = np.random.default_rng(0)
    data = encode_jpeg(36, 24)
    flipped = [
        (position, int(random.integers(1, 256))) for position in random.integers(0, len(data), 200)
    ]
    flips = [
        data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]
        for position, bits in flipped
    ]
    for damaged in [*(data[:end] for end in range(0, len(data), 7)), *flips]:
        quick = decode(lambda data: Picture(data).decode().numpy(), damaged)
        slow = decode(lambda data: np.asarray(open_rgb(data)).transpose(2, 0, 1), damaged)
        assert type(quick) is type(slow) and (isinstance(quick, str) or np.array_equal(quick, slow))
        assert len(damaged) == len(data) or (quick == slow and isinstance(quick, str)), (
            "all that are cut off are broken"
        )
    bomb = bytearray(data)
    position = bomb.index(b"\xff\xc0") + 5  # height and width of the frame
    bomb[position : position + 4] = (20_000).to_bytes(2) * 2
    with pytest.raises(BrokenImage, match="more than 178956970 pixels"):
        Picture(bytes(bomb))
