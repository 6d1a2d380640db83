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
    """Images float64[1797, 8, 8] in 0..16 and their digits int64[1797]: the test part of the UCI
    set (Alpaydin & Kaynak, 1998).

    Read from scikit-learn's file, since importing scikit-learn is slow.
    """
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")  # [N, 65], the last column is the digit
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Digits(Columns):
    """Grey digits, enlarged from 8x8 to 32x32 pixels so that crops can move."""

    pixels: np.ndarray  # uint8[N, 32, 32]
    rows: np.ndarray  # int64[N] in scikit-learn's order

    @cached_property
    def fingerprint(self) -> str:
        return hash_source(self.classes, self.labels, self.pixels)

    def name(self, index: int) -> str:
        return f"digits[{self.rows[index]}]"

    def content(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])


def load_digits() -> tuple[Digits, Digits]:
    """The digits to train on, and a fixed fifth of each class to evaluate on."""
    images, labels = read_digits()
    small = np.rint(images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], from 0..16
    large = [Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC) for image in small]
    pixels = np.stack([np.asarray(image) for image in large])
    train, val = hold_out(mix(np.arange(len(labels)), key_of("digits")), labels, share=0.2)
    every = Digits(pixels, np.arange(len(labels)), labels=labels, classes=tuple("0123456789"))
    parts = (train, "all but the fixed fifth"), (val, "a fixed fifth, held out")
    of_train, of_val = (replace(every.select(rows), part=part) for rows, part in parts)
    return of_train, of_val
