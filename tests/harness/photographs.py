"""A photograph as a file of any size, kind and rotation."""

import io

from PIL import Image
from sklearn.datasets import load_sample_image

CHINA = Image.fromarray(load_sample_image("china.jpg"))  # 640 x 427


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encode_jpeg(width: int, height: int, mode: str = "RGB", **options) -> bytes:
    return encode(CHINA.convert(mode).resize((width, height)), "JPEG", quality=90, **options)


def build_exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags
