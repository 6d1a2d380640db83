"""Every kind of image becomes the pixels that a person would see, or one `BrokenImage` with its reason."""

import errno
import io
import pickle
import re
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from common.data.images import MAX_PIXELS, SUFFIXES, BrokenImage, open_rgb
from tests.harness.launching import ROOT

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(source, **options) -> np.ndarray:
    image = open_rgb(source, **options)
    assert image.mode == "RGB"
    return np.asarray(image)


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(np.asarray(values, np.uint8)[..., None], 3, axis=2)


def png(width: int, height: int, bit_depth: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG byte by byte, for what Pillow can't write."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bit_depth, colour, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


# ---- right pixels


def test_rgb_comes_out_as_it_is_from_every_kind_of_source(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    data = encoded(image)
    path = tmp_path / "image.png"
    path.write_bytes(data)
    with open(path, "rb") as file:
        for source in (path, str(path), data, io.BytesIO(data), file, image):
            assert np.array_equal(pixels(source), np.asarray(image))


def test_the_file_is_closed_and_the_image_outlives_it(tmp_path):
    path = tmp_path / "image.png"
    Image.new("RGB", (3, 2), (1, 2, 3)).save(path)
    image = open_rgb(path)
    path.unlink()
    assert image.getpixel((2, 1)) == (1, 2, 3)
    assert getattr(image, "fp", None) is None


def test_grey_and_one_bit():
    assert np.array_equal(pixels(encoded(Image.fromarray(RAMP))), grey(RAMP))
    bits = RAMP % 2 == 1
    assert np.array_equal(pixels(encoded(Image.fromarray(bits))), grey(bits * 255))


def test_palette_with_and_without_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    assert pixels(encoded(image)).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    for kind in ("PNG", "GIF"):  # one index that is transparent
        assert pixels(encoded(image, kind, transparency=1)).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    half = pixels(encoded(image, transparency=bytes([255, 128])))  # an alpha for every index
    assert half.tolist() == [[[255, 0, 0], [127, 127, 255]]]


def test_transparency_lies_on_white_whatever_colour_hides_under_it():
    rgba = Image.new("RGBA", (3, 1))
    for x, value in enumerate([(10, 20, 30, 255), (10, 20, 30, 0), (0, 0, 0, 51)]):
        rgba.putpixel((x, 0), value)
    for kind in ("PNG", "TIFF"):
        assert pixels(encoded(rgba, kind)).tolist() == [[[10, 20, 30], [255, 255, 255], [204, 204, 204]]]
    la = Image.new("LA", (2, 1), (40, 0))
    la.putpixel((0, 0), (40, 255))
    assert pixels(encoded(la)).tolist() == [[[40, 40, 40], [255, 255, 255]]]


def test_a_transparent_colour_lies_on_white():
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((0, 0), (9, 9, 9))
    assert pixels(encoded(image, transparency=(1, 2, 3))).tolist() == [[[9, 9, 9], [255, 255, 255]]]
    image = Image.new("L", (2, 1), 7)
    image.putpixel((0, 0), 9)
    assert pixels(encoded(image, transparency=7)).tolist() == [[[9, 9, 9], [255, 255, 255]]]


def test_cmyk_tiff_and_adobe_inverted_jpeg():
    """Adobe writes CMYK JPEGs with all values inverted: white must not come out black."""
    inks = {(0, 0, 0, 0): (255, 255, 255), (0, 255, 255, 0): (255, 0, 0), (0, 0, 0, 255): (0, 0, 0)}
    for ink, colour in inks.items():
        image = Image.new("CMYK", (16, 16), ink)
        assert np.all(pixels(encoded(image, "TIFF")) == colour)
        jpeg = encoded(image, "JPEG", quality=100)
        assert b"Adobe" in jpeg
        assert np.abs(pixels(jpeg).astype(int) - colour).max() <= 2


SIXTEEN = np.array([[0, 128, 257, 4096], [32768, 40000, 65407, 65535]], np.uint16)
SIXTEEN_AS_EIGHT = np.rint(SIXTEEN / 257)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_rescaled_not_saturated(kind):
    data = encoded(Image.fromarray(SIXTEEN), kind)
    assert Image.open(io.BytesIO(data)).mode == "I;16"
    assert np.array_equal(pixels(data), grey(SIXTEEN_AS_EIGHT))


def test_16_bit_grey_of_the_other_byte_order():
    image = Image.frombytes("I;16B", (4, 2), SIXTEEN.astype(">u2").tobytes())
    data = encoded(image, "TIFF")
    assert Image.open(io.BytesIO(data)).mode == "I;16B"
    assert np.array_equal(pixels(data), grey(SIXTEEN_AS_EIGHT))
    assert np.array_equal(pixels(image), grey(SIXTEEN_AS_EIGHT))


def test_dark_16_bit_images_stay_dark():
    """The scale is the type's, not the image's: a night picture is not stretched into a day picture."""
    assert pixels(encoded(Image.fromarray(np.full((2, 2), 514, np.uint16)))).max() == 2


def test_32_bit_integers_hold_16_bits_or_are_stretched():
    small = Image.fromarray(SIXTEEN.astype(np.int32))
    assert small.mode == "I"
    assert np.array_equal(pixels(encoded(small, "TIFF")), grey(SIXTEEN_AS_EIGHT))
    large = Image.fromarray(np.array([[-100, 0, 100_000]], np.int32))
    assert pixels(encoded(large, "TIFF")).tolist() == [[[0] * 3, [0] * 3, [255] * 3]]
    assert pixels(Image.fromarray(np.array([[-(2**31), 0, 2**31 - 1]], np.int32)))[0, :, 0].tolist() == [0, 128, 255]


def test_floats_from_0_to_1_others_are_stretched():
    def first_row(*values: float) -> list[int]:
        return pixels(encoded(Image.fromarray(np.array([values], np.float32)), "TIFF"))[0, :, 0].tolist()

    assert first_row(0.1, 0.5, 0.9) == [26, 128, 230]
    assert first_row(-1, 0, 1) == [0, 128, 255]
    assert first_row(0, 0.5, 1.02) == [0, 125, 255]  # a little over is not taken for another unit: never nearly black
    assert first_row(1000, 1500, 2000) == [0, 128, 255]
    assert first_row(-3e38, 0, 3e38) == [0, 128, 255]
    assert first_row(np.nan, 0.2, np.inf, -np.inf) == [0, 51, 255, 0]
    assert first_row(7, 7) == [0, 0]


def test_floats_without_a_number_are_broken():
    with pytest.raises(BrokenImage, match="no finite pixel value"):
        open_rgb(Image.fromarray(np.full((2, 2), np.nan, np.float32)))


def test_16_bit_colour_png_also_with_a_transparent_colour():
    row = b"\x00" + struct.pack(">6H", 65535, 32768, 0, 257, 257, 257)
    assert pixels(png(2, 1, 16, 2, row)).tolist() == [[[255, 128, 0], [1, 1, 1]]]
    opaque = pixels(png(2, 1, 16, 2, row, (b"tRNS", struct.pack(">3H", 1, 2, 3))))
    assert opaque.tolist() == [[[255, 128, 0], [1, 1, 1]]]


def test_ycbcr_tiff_and_the_first_frame_of_an_animation():
    image = Image.new("RGB", (16, 16), (200, 30, 60))
    assert np.abs(pixels(encoded(image.convert("YCbCr"), "TIFF")).astype(int) - (200, 30, 60)).max() <= 2
    frames = [Image.new("P", (4, 4), index) for index in range(2)]
    for frame in frames:
        frame.putpalette([255, 0, 0, 0, 255, 0])
    assert np.all(pixels(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])) == (255, 0, 0))


# ---- upright

# What a viewer must do with each orientation of the EXIF standard (tag 0x0112) to show `upright`.
STORED = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.transpose(1, 0, 2),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: upright[::-1, ::-1].transpose(1, 0, 2),
    8: lambda upright: np.rot90(upright, -1),
}


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_every_exif_orientation_comes_out_upright(orientation, kind):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16], upright[:8, 16:], upright[8:, :16] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    stored = Image.fromarray(np.ascontiguousarray(STORED[orientation](upright)))
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(kind, {})
    data = encoded(stored, kind, exif=exif(orientation), **options)
    for source in (data, Image.open(io.BytesIO(data))):
        seen = pixels(source)
        assert seen.shape == upright.shape
        assert np.abs(seen.astype(int) - upright).max() <= (6 if kind == "JPEG" else 0)


def test_rotation_and_16_bits_together_and_nobody_rotates_twice():
    values = np.array([[0, 65535]], np.uint16)
    image = open_rgb(encoded(Image.fromarray(values), exif=exif(6)))
    assert np.asarray(image)[:, 0, 0].tolist() == [0, 255]
    twice = open_rgb(open_rgb(encoded(Image.new("RGB", (4, 2)), "JPEG", exif=exif(6))))
    assert twice.size == (2, 4)


def test_a_damaged_exif_block_costs_no_image_and_no_warning():
    image = Image.new("RGB", (8, 8), (50, 60, 70))
    for block in (b"Exif\x00\x00garbage", b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff\x12\x01", b"Exif\x00\x00"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.abs(pixels(encoded(image, "JPEG", quality=100, exif=block)).astype(int) - (50, 60, 70)).max() <= 2


def test_an_image_given_as_an_object_stays_as_it_was():
    source = Image.new("LA", (4, 2), (0, 0))
    source.getexif()[0x0112] = 6
    open_rgb(source)
    assert (source.mode, source.size, source.getexif()[0x0112]) == ("LA", (4, 2), 6)


# ---- the same without this project


def documents(name: str) -> list[str]:
    """The texts of `open_image` in the documents: each stands alone, so each has it whole."""
    page = (ROOT / name).read_text()
    return re.findall(r"^def open_image\(file\):\n(?:(?: .*)?\n)*?    return .*\n", page, re.MULTILINE)


def test_scripts_that_stand_alone_open_every_kind_of_file_as_the_recipes_do():
    (text,) = {*documents("docs/after_training.md"), *documents("docs/detect.py")}
    scope = {"np": np, "Image": Image, "ImageOps": ImageOps}
    exec(text, scope)
    random = np.random.default_rng(0)
    colours = Image.fromarray(random.integers(0, 256, (8, 8, 4), dtype=np.uint8), "RGBA")
    sixteen = random.integers(0, 65536, (8, 8))
    palette = colours.convert("RGB").quantize(5)
    floats = random.random((8, 8)).astype(np.float32)
    files = {f"exif {number}": encoded(colours, exif=exif(number)) for number in STORED}
    files |= {f"16 bit, exif {n}": encoded(Image.fromarray(sixteen.astype(np.uint16)), exif=exif(n)) for n in (1, 6)}
    files |= {mode: encoded(colours.convert(mode)) for mode in ("RGB", "L", "LA", "1", "P")}
    files |= {mode: encoded(colours.convert(mode), "TIFF") for mode in ("CMYK", "YCbCr", "RGBA")}
    files |= {f"palette {kind}": encoded(palette, kind, transparency=1) for kind in ("PNG", "GIF")}
    files |= {"palette of alphas": encoded(palette, transparency=bytes([255, 128, 0, 255, 7]))}
    files |= {
        "a colour": encoded(colours.convert("L"), transparency=7),
        "JPEG": encoded(palette.convert("RGB"), "JPEG"),
    }
    files |= {"CMYK of Adobe": encoded(colours.convert("CMYK"), "JPEG")}
    other = Image.frombytes("I;16B", (8, 8), sixteen.astype(">u2").tobytes())
    files["I;16B"] = encoded(other, "TIFF")
    for name, values in {"I": sixteen, "stretched I": sixteen * 30_000 - 100_000_000}.items():
        files[name] = encoded(Image.fromarray(values.astype(np.int32)), "TIFF")
    for name, values in {"F": floats, "stretched F": floats * 3_000 - 7}.items():
        files[name] = encoded(Image.fromarray(values), "TIFF")
    for name, data in files.items():
        alone = scope["open_image"](io.BytesIO(data))
        assert alone.mode == "RGB" and np.array_equal(np.asarray(alone), pixels(data)), name


# ---- broken


@pytest.mark.parametrize("data", [b"", b"\xff", b"dear diary\n" * 30, b"\x89PNG\r\n\x1a\n"], ids=range(4))
def test_what_is_no_image_is_broken_also_with_the_name_of_one(tmp_path, data):
    path = tmp_path / "image.jpg"
    path.write_bytes(data)
    for source in (path, data):
        with pytest.raises(BrokenImage, match="not an image"):
            open_rgb(source)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "BMP"])
def test_a_truncated_image_is_broken_wherever_it_was_cut(kind):
    assert not ImageFile.LOAD_TRUNCATED_IMAGES  # nothing imported so far may have switched it on
    data = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)), kind)
    open_rgb(data)
    for share in (0.1, 0.5, 0.9):
        with pytest.raises(BrokenImage) as broken:
            open_rgb(data[: int(len(data) * share)])
        assert str(broken.value) and "\n" not in str(broken.value)


def test_any_flipped_byte_gives_an_image_or_broken_but_nothing_else():
    random = np.random.default_rng(0)
    for kind in ("JPEG", "PNG", "TIFF", "WEBP", "GIF", "BMP"):
        data = encoded(Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)), kind, exif=exif(6))
        for place in random.integers(0, len(data), 150):
            changed = bytearray(data)
            changed[place] ^= int(random.integers(1, 256))
            try:
                assert open_rgb(bytes(changed), max_pixels=10_000).mode == "RGB"
            except BrokenImage as broken:
                assert str(broken)


def test_a_bomb_is_refused_from_its_header_with_the_value_and_the_limit():
    bomb = png(20_000, 20_000, 8, 2, b"")  # would decode to 1.2 GB, and Pillow itself refuses it
    with pytest.raises(BrokenImage, match=r"400000000 pixels.* limit of 178956970"):
        open_rgb(bomb)
    suspicious = png(10_000, 10_000, 8, 2, b"")  # Pillow would only warn
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BrokenImage, match=f"10000 x 10000 = 100000000 pixels, the limit is {MAX_PIXELS}"):
            open_rgb(suspicious)
    small = Image.new("RGB", (11, 10))
    for source in (small, encoded(small)):
        with pytest.raises(BrokenImage, match="11 x 10 = 110 pixels, the limit is 109"):
            open_rgb(source, max_pixels=109)
        assert open_rgb(source, max_pixels=110).size == (11, 10)


def test_an_image_without_pixels_is_broken():
    with pytest.raises(BrokenImage, match="0 x 5 pixels: the image has no pixels"):
        open_rgb(Image.new("RGB", (0, 5)))
    for width, height in ((0, 5), (5, 0)):
        with pytest.raises(BrokenImage):
            open_rgb(png(width, height, 8, 2, b""))


def test_a_missing_file_and_a_folder_are_broken_in_words(tmp_path):
    for path, reason in ((tmp_path / "nothing.jpg", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(BrokenImage, match=reason) as broken:
            open_rgb(path)
        assert str(tmp_path) not in str(broken.value)  # who asks knows the name


def test_a_failing_machine_is_not_a_broken_image(tmp_path, monkeypatch):
    """Replacing an image because of this machine's trouble would train it on other samples than another layout."""
    path = tmp_path / "image.png"
    Image.new("RGB", (2, 2)).save(path)
    for trouble in (OSError(errno.EMFILE, "Too many open files"), OSError(errno.EIO, "I/O error"), MemoryError()):

        def fail(*_, trouble=trouble, **__):
            raise trouble

        monkeypatch.setattr(Image, "open", fail)
        with pytest.raises(type(trouble)):
            open_rgb(path)


def test_postscript_never_starts_a_program():
    with pytest.raises(BrokenImage, match="not an image"):
        open_rgb(encoded(Image.new("RGB", (4, 4)), "EPS"))
    assert not SUFFIXES & {".eps", ".ps", ".h5", ".mpg"}
    assert {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif"} <= SUFFIXES


def test_broken_image_travels_between_processes():
    assert str(pickle.loads(pickle.dumps(BrokenImage("cut off")))) == "cut off"
