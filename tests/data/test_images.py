"""Every kind of image becomes the pixels that a person would see, or one `BrokenImage` with its reason."""

import errno
import io
import pickle
import re
import struct
import warnings
import zlib
from unittest.mock import MagicMock

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageFile, ImageOps, PngImagePlugin

from common.data.decoding import Picture
from common.data.images import MAX_PIXELS, SUFFIXES, BrokenImage, open_rgb
from common.detection.data.image_headers import read_header
from tests.harness.launching import ROOT
from tests.harness.odd_files import bounded
from tests.harness.photographs import build_exif, encode

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)


def read_pixels(source) -> np.ndarray:
    """As evaluation and training show them."""
    image = open_rgb(source)
    assert image.mode == "RGB"
    assert np.array_equal(Picture(source).decode().permute(1, 2, 0), image)
    return np.asarray(image)


def build_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def build_png(width: int, height: int, bit_depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG byte by byte, for what Pillow can't write."""
    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + build_chunk(b"IHDR", header)
        + build_chunk(b"IDAT", zlib.compress(rows))
        + build_chunk(b"IEND", b"")
    )


# ---- right pixels


def build_single(mode: str, *values, palette: list[int] = ()) -> Image.Image:
    """An image of one row of these pixels."""
    image = Image.new(mode, (len(values), 1))
    if palette:
        image.putpalette(palette)
    for x, value in enumerate(values):
        image.putpixel((x, 0), value)
    return image


def build_floats(*values: float) -> bytes:
    return encode(Image.fromarray(np.array([values], np.float32)), "TIFF")


def build_integers(*values: int) -> bytes:
    return encode(Image.fromarray(np.array([values], np.int32)), "TIFF")


RED_BLUE = build_single("P", 0, 1, palette=[255, 0, 0, 0, 0, 255])
RGBA = build_single("RGBA", (10, 20, 30, 255), (10, 20, 30, 0), (0, 0, 0, 51))
LA = build_single("LA", (40, 255), (40, 0))
SIXTEEN = np.array([[0, 128, 257, 4096], [32768, 40000, 65407, 65535]], np.uint16)
BIG_ENDIAN = Image.frombytes("I;16B", (4, 2), SIXTEEN.astype(">u2").tobytes())
ROW_OF_16_BITS = b"\x00" + struct.pack(">6H", 65535, 32768, 0, 257, 257, 257)
WHITE = [255, 255, 255]
INKS = {(0, 0, 0, 0): WHITE, (0, 255, 255, 0): [255, 0, 0], (0, 0, 0, 255): [0, 0, 0]}
FRAMES = [build_single("P", index, palette=[255, 0, 0, 0, 255, 0]) for index in range(2)]


def read_grey(values) -> list:
    return np.repeat(np.asarray(values)[..., None], 3, axis=2).tolist()


EXACT = {
    "grey": (encode(Image.fromarray(RAMP)), read_grey(RAMP)),
    "one bit": (encode(Image.fromarray(RAMP % 2 == 1)), read_grey(RAMP % 2 * 255)),
    "palette": (encode(RED_BLUE), [[[255, 0, 0], [0, 0, 255]]]),
    "palette, one transparent": (encode(RED_BLUE, transparency=1), [[[255, 0, 0], WHITE]]),
    "palette of alphas": (
        encode(RED_BLUE, transparency=bytes([255, 128])),
        [[[255, 0, 0], [127, 127, 255]]],
    ),
    # Transparency lies on white, whatever colour hides under it.
    "RGBA": (encode(RGBA), [[[10, 20, 30], WHITE, [204, 204, 204]]]),
    "LA": (encode(LA), [[[40, 40, 40], WHITE]]),
    "a transparent colour": (
        encode(build_single("RGB", (9, 9, 9), (1, 2, 3)), transparency=(1, 2, 3)),
        [[[9] * 3, WHITE]],
    ),
    "CMYK, TIFF": (encode(build_single("CMYK", *INKS), "TIFF"), [list(INKS.values())]),
    "first frame": (
        encode(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
        [[[255, 0, 0]]],
    ),
    # Rescaled, not saturated. The scale is the type's: a night picture is not stretched into a day
    # picture.
    "16 bit, PNG": (encode(Image.fromarray(SIXTEEN)), read_grey(np.rint(SIXTEEN / 257))),
    "16 bit, other order": (encode(BIG_ENDIAN, "TIFF"), read_grey(np.rint(SIXTEEN / 257))),
    "16 bit, colour": (build_png(2, 1, 16, 2, ROW_OF_16_BITS), [[[255, 128, 0], [1, 1, 1]]]),
    "16 bit in 32": (build_integers(*SIXTEEN.ravel()), read_grey([np.rint(SIXTEEN.ravel() / 257)])),
    "32 bit": (build_integers(-100, 0, 100_000), read_grey([[0, 0, 255]])),
    "0 to 1": (build_floats(0.1, 0.5, 0.9), read_grey([[26, 128, 230]])),
    "a little over 1 is no other unit": (build_floats(0, 0.5, 1.02), read_grey([[0, 125, 255]])),
    "another unit": (build_floats(1000, 1500, 2000), read_grey([[0, 128, 255]])),
    "all floats": (build_floats(-3e38, 0, 3e38), read_grey([[0, 128, 255]])),
    "not finite": (build_floats(np.nan, 0.2, np.inf, -np.inf), read_grey([[0, 51, 255, 0]])),
    "constant": (build_floats(7, 7), read_grey([[0, 0]])),
}


@pytest.mark.parametrize("case", EXACT)
def test_an_image_has_the_pixels_that_a_person_would_see(case: str) -> None:
    source, expected = EXACT[case]
    assert read_pixels(source).tolist() == expected


def test_rgb_comes_out_as_it_is_from_every_kind_of_source(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    data = encode(image)
    path = tmp_path / "image.png"
    path.write_bytes(data)
    for source in (path, str(path), data, image):
        assert np.array_equal(read_pixels(source), np.asarray(image))
    opened = open_rgb(path)
    path.unlink()  # the file is closed, and the image outlives it
    assert np.array_equal(opened, image) and getattr(opened, "fp", None) is None


def test_white_of_a_cmyk_jpeg_does_not_come_out_black():
    """Adobe writes them with all values inverted."""
    for ink, colour in INKS.items():
        jpeg = encode(Image.new("CMYK", (16, 16), ink), "JPEG", quality=100)
        assert b"Adobe" in jpeg and np.abs(read_pixels(jpeg).astype(int) - colour).max() <= 2


# ---- TIFFs

KINDS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "float32", "float64"]


def build_tiff(
    values: np.ndarray, photometric: str, planarconfig: str | None = None, **options
) -> bytes:
    """Values [height, width] or [height, width, bands] as tifffile writes them."""
    if planarconfig == "separate":
        values = np.ascontiguousarray(np.moveaxis(values, -1, 0))
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, values, photometric=photometric, planarconfig=planarconfig, **options)
    return buffer.getvalue()


def scale(values: np.ndarray) -> np.ndarray:
    """By the rule of docs/data.md: from the full range of 8 or 16 bits or 0 to 1, or from the range
    of the image.
    """
    white = 1 if values.dtype.kind == "f" else 65535 if values.dtype.itemsize > 1 else 255
    low, high = (
        (0, white) if 0 <= values.min() and values.max() <= white else (values.min(), values.max())
    )
    return (values.astype(float) - low) * 255 / (float(high) - float(low))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byteorder", "<>")
def test_a_tiff_of_any_number_type_is_read_by_its_tags(kind: str, byteorder: str) -> None:
    random = np.random.default_rng(0)
    dtype = np.dtype(kind)
    if dtype.kind == "f":
        colours = random.random((24, 20, 3)).astype(kind)
    else:
        colours = random.integers(
            np.iinfo(kind).min, np.iinfo(kind).max, (24, 20, 3), dtype=kind, endpoint=True
        )
    grey = colours[..., 0]
    beside = np.concatenate([colours, colours[..., :1]], axis=2)
    cases = {
        "grey": (build_tiff(grey, "minisblack", byteorder=byteorder), scale(grey)[..., None]),
        "0 is white": (
            build_tiff(grey, "miniswhite", byteorder=byteorder),
            255 - scale(grey)[..., None],
        ),
        "pages": (
            build_tiff(np.stack([grey, grey.T.reshape(24, 20)]), "minisblack", byteorder=byteorder),
            scale(grey)[..., None],
        ),
    }
    for plane in ("contig", "separate"):
        for tile in (None, (16, 16)):
            options = {
                "planarconfig": plane,
                "tile": tile,
                "byteorder": byteorder,
                "bigtiff": byteorder == ">",
            }
            cases[f"RGB, {plane}, {tile}"] = (build_tiff(colours, "rgb", **options), scale(colours))
            unused = build_tiff(beside, "rgb", extrasamples=[0], **options)
            cases[f"RGB and another band, {plane}, {tile}"] = (unused, scale(colours))
    for name, (data, expected) in cases.items():
        assert np.abs(read_pixels(data) - expected).max() <= 1, name


def test_compressed_tiffs_are_read_right_or_refused_by_name() -> None:
    random = np.random.default_rng(0)
    colours = random.integers(0, 65536, (24, 20, 3), dtype=np.uint16)
    floats = random.random((24, 20), dtype=np.float32)
    right = {
        "planes": (build_tiff(colours, "rgb", "separate", compression="zlib"), scale(colours)),
        "floats": (build_tiff(floats, "minisblack", compression="zlib"), scale(floats)[..., None]),
    }
    for name, (data, expected) in right.items():
        assert np.abs(read_pixels(data) - expected).max() <= 1, name
    for data in (
        build_tiff(
            floats, "minisblack", compression="zlib", byteorder=">"
        ),  # Pillow swaps its bytes
        build_tiff(colours[..., 0], "miniswhite", compression="zlib"),
        build_tiff(colours.astype(np.float32), "rgb", compression="zlib"),
    ):
        with pytest.raises(
            BrokenImage,
            match=r"a TIFF of \d bands of \d+ bits, .*compression 8, .*: save it as RGB without",
        ):
            open_rgb(data)


def test_bands_without_a_meaning_are_refused_or_not_used() -> None:
    colours = np.full((16, 16, 4), (100, 100, 100, 51), np.uint8)
    unspecified = build_tiff(colours, "rgb", extrasamples=[0])
    missing = unspecified.replace(struct.pack("<H", 338), struct.pack("<H", 65000))
    transparent = build_tiff(colours, "rgb", extrasamples=[2])
    for data, level in ((unspecified, 100), (missing, 100), (transparent, 224)):
        assert np.all(read_pixels(data) == level)
    for bands in (2, 4, 13):
        data = build_tiff(np.ones((16, 16, bands), np.uint16), "minisblack", "contig")
        with pytest.raises(
            BrokenImage, match=rf"a TIFF of {bands} bands of 16 bits, 16 x 16 .*docs/change_it\.md"
        ):
            open_rgb(data)


def test_a_tiff_of_any_size_in_its_header_costs_no_memory() -> None:
    for side, reason in ((60_000, "60000 x 60000"), (8_000, "cut off")):
        data = build_tiff(np.zeros((16, 16, 3), np.float32), "rgb", tile=(16, 16))
        for tag in (256, 257):  # width and height
            data = data.replace(
                struct.pack("<HHII", tag, 4, 1, 16), struct.pack("<HHII", tag, 4, 1, side)
            )
        with bounded(10, 256), pytest.raises(BrokenImage, match=reason):
            open_rgb(data)


# ---- metadata


def test_large_text_and_profiles_of_a_png_cost_no_image() -> None:
    image = Image.new("RGB", (6, 4), (10, 20, 30))
    text = PngImagePlugin.PngInfo()
    text.add_itxt("workflow", "[" + "7, " * 700_000 + "]", zip=True)
    text.add_text("notes", "x" * 2_000_000)
    for options in ({"pnginfo": text}, {"icc_profile": bytes(1_200_000)}):
        data = encode(image, **options)
        assert np.all(read_pixels(data) == (10, 20, 30))
        assert read_header(data)[:2] == (6, 4)


# ---- upright

# How a camera stores `upright` under each orientation of the EXIF standard (tag 0x0112) but 1.
STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,  # Pillow turns to the left
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_every_exif_orientation_comes_out_upright(kind):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = (255, 0, 0)
    upright[:8, 16:] = (0, 255, 0)
    upright[8:, :16] = (0, 0, 255)
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    for orientation, transpose in STORED.items():
        image = Image.fromarray(upright).transpose(transpose)
        seen = read_pixels(encode(image, kind, exif=build_exif(orientation), **options))
        assert seen.shape == upright.shape
        assert np.abs(seen.astype(int) - upright).max() <= (6 if kind == "JPEG" else 0)


def test_a_damaged_exif_block_costs_no_image_and_no_warning():
    image = Image.new("RGB", (8, 8), (50, 60, 70))
    for block in (
        b"Exif\x00\x00garbage",
        b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff\x12\x01",
        b"Exif\x00\x00",
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (
                np.abs(
                    read_pixels(encode(image, "JPEG", quality=100, exif=block)).astype(int)
                    - (50, 60, 70)
                ).max()
                <= 2
            )


# ---- the same without this project


EXTREME = ("not finite", "all floats", "constant")  # no promise of the scripts


def test_scripts_that_stand_alone_open_files_as_the_recipes_do():
    pages = [(ROOT / name).read_text() for name in ("docs/after_training.md", "docs/detect.py")]
    pattern = re.compile(r"^def open_image\(file\):\n(?:(?: .*)?\n)*?    return .*\n", re.MULTILINE)
    # Each stands alone, so each has it whole.
    (text,) = {found for page in pages for found in pattern.findall(page)}
    scope = {"np": np, "Image": Image, "ImageOps": ImageOps}
    exec(text, scope)
    random = np.random.default_rng(0)
    colours = Image.fromarray(random.integers(0, 256, (8, 8, 4), dtype=np.uint8), "RGBA")
    sixteen = Image.fromarray(random.integers(0, 65536, (8, 8)).astype(np.uint16))
    files = {
        name: data
        for name, (data, _) in EXACT.items()
        if isinstance(data, bytes) and name not in EXTREME
    }
    files |= {f"exif {number}": encode(colours, exif=build_exif(number)) for number in STORED}
    files |= {
        f"16 bit, exif {number}": encode(sixteen, exif=build_exif(number)) for number in (1, 6)
    }
    files |= {mode: encode(colours.convert(mode), "TIFF") for mode in ("RGB", "YCbCr", "RGBA")}
    files |= {
        "JPEG": encode(colours.convert("RGB"), "JPEG"),
        "CMYK": encode(colours.convert("CMYK"), "JPEG"),
    }
    for name, data in files.items():
        alone = scope["open_image"](io.BytesIO(data))
        assert alone.mode == "RGB" and np.array_equal(np.asarray(alone), read_pixels(data)), name


# ---- broken


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF"])
def test_a_file_that_is_cut_off_is_broken(kind):
    assert not ImageFile.LOAD_TRUNCATED_IMAGES  # nothing imported so far may have switched it on
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), kind, exif=build_exif(6))
    read_pixels(data)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(BrokenImage) as broken:
            open_rgb(data[: int(len(data) * share)])
        assert str(broken.value) and "\n" not in str(broken.value)


def test_a_bomb_is_refused_from_its_header():
    bomb = build_png(
        20_000, 20_000, 8, 2, b""
    )  # would decode to 1.2 GB, and Pillow itself refuses it
    with pytest.raises(
        BrokenImage, match=f"more than {2 * MAX_PIXELS} pixels, the limit is {MAX_PIXELS}"
    ):
        open_rgb(bomb)
    suspicious = build_png(10_000, 10_000, 8, 2, b"")  # Pillow would only warn
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            BrokenImage, match=f"10000 x 10000 = 100000000 pixels, the limit is {MAX_PIXELS}"
        ):
            open_rgb(suspicious)


def test_what_is_no_image_is_broken_in_words(tmp_path):
    (tmp_path / "diary.jpg").write_bytes(b"dear diary\n" * 30)
    for source, reason in (
        *(
            (source, "not an image")
            for source in (b"", b"\x89PNG\r\n\x1a\n", tmp_path / "diary.jpg")
        ),
        *(
            (b"\0\0\0\x18ftyp" + brand, "HEIC, .*pip install pillow-heif")
            for brand in (b"heic", b"hevc", b"mif1")
        ),
        (encode(Image.effect_noise((64, 64), 50))[:900], "can't be decoded: "),
        (encode(Image.new("RGB", (4, 4)), "EPS"), "not an image"),  # it would start a program
        (Image.new("RGB", (0, 5)), "0 x 5 pixels: the image has no pixels"),
        (Image.fromarray(np.full((2, 2), np.nan, np.float32)), "no finite pixel value"),
        (build_png(0, 5, 8, 2, b""), "."),
        (build_png(5, 0, 8, 2, b""), "."),
        (tmp_path / "nothing.jpg", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(BrokenImage, match=reason) as broken:
            open_rgb(source)
        assert str(tmp_path) not in str(broken.value)  # who asks knows the name
        # It travels between processes.
        assert str(pickle.loads(pickle.dumps(broken.value))) == str(broken.value)
    assert not SUFFIXES & {".eps", ".ps", ".h5", ".mpg"}
    assert {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif"} <= SUFFIXES


def test_a_failing_machine_is_not_a_broken_image(monkeypatch):
    """Replacing an image because of this machine's trouble would train it on other samples than
    another layout.
    """
    for trouble in (
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EIO, "I/O error"),
        MemoryError(),
    ):
        monkeypatch.setattr(Image, "open", MagicMock(side_effect=trouble))
        with pytest.raises(type(trouble)):
            open_rgb(b"")
