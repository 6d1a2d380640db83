"""scikit-learn's handwritten digits as a source, without importing all of scikit-learn."""

from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import distribution

import numpy as np
from PIL import Image

from common.data.source import Columns, hash_source
from common.data.splits import hold_out
from common.randomness import key_of, mix


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Images float64[1797, 8, 8] in 0..16 and their digits int64[1797].

    They are the test part of the UCI set (Alpaydin & Kaynak, 1998), read from scikit-learn's file,
    since importing scikit-learn is slow.
    """
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",")  # [N, 65], the last column is the digit
    images = table[:, :-1].reshape(-1, 8, 8)
    digits = table[:, -1].astype(np.int64)
    return images, digits


@dataclass(frozen=True, eq=False)
class Digits(Columns):
    """Grey digits, enlarged from 8x8 to 32x32 pixels so that crops can move."""

    pixels: np.ndarray  # uint8[N, 32, 32]
    rows: np.ndarray  # int64[N] in scikit-learn's order

    @cached_property
    def fingerprint(self) -> str:
        return hash_source(self.classes, self.labels, self.pixels)

    def get_name(self, index: int) -> str:
        return f"digits[{self.rows[index]}]"

    def get_content(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])


def load_digits() -> tuple[Digits, Digits]:
    """The digits to train on, and a fixed fifth of each class to evaluate on."""
    images, labels = read_digits()
    images = np.rint(images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], from 0..16
    indices = np.arange(len(labels))
    enlarged = [_enlarge(image) for image in images]
    digits = Digits(
        pixels=np.stack(enlarged), rows=indices, labels=labels, classes=tuple("0123456789")
    )
    train, val = hold_out(mix(indices, key_of("digits")), labels, share=0.2)
    return (
        replace(digits.select(train), split_text="all but the fixed fifth"),
        replace(digits.select(val), split_text="a fixed fifth, held out"),
    )


def _enlarge(image: np.ndarray) -> np.ndarray:
    """uint8[8, 8] -> uint8[32, 32]."""
    return np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC))
