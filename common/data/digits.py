"""scikit-learn's handwritten digits as a source of labelled images, without importing all of scikit-learn."""

import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from common.data.source import Source, fingerprint_of
from common.data.splits import held_out
from common.randomness import key_of, mix


class _Columns(NamedTuple):
    """The test part of the UCI set (Alpaydin & Kaynak, 1998), 1,797 images, named as scikit-learn names them."""

    images: np.ndarray  # float64[N, 8, 8] in 0..16
    target: np.ndarray  # int64[N]
    target_names: np.ndarray  # int64[10]


def read_digits() -> _Columns:
    """What `sklearn.datasets.load_digits` returns, from its file: importing scikit-learn takes most of a second.

    If another version of scikit-learn has the file elsewhere, scikit-learn reads it.
    """
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        rows = np.loadtxt(file, delimiter=",")  # [N, 65], the last column is the digit
        return _Columns(rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64), np.arange(10))
    from sklearn import datasets

    digits = datasets.load_digits()
    return _Columns(digits.images, digits.target, digits.target_names)


@dataclass(frozen=True, eq=False)
class Digits(Source):
    """Handwritten digits of the UCI set (Alpaydin & Kaynak, 1998), grey, enlarged once from 8x8 to 32x32 pixels.

    Enlarged, since a random crop of 8x8 pixels could only move by an eighth of the image.
    """

    pixels: np.ndarray  # uint8[N, 32, 32]
    rows: np.ndarray  # int64[N] in scikit-learn's order
    labels: np.ndarray
    classes: tuple[str, ...]
    origin: str
    notes: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.classes, self.labels, self.pixels)

    def name(self, index: int) -> str:
        return f"digits[{self.rows[index]}]"

    def content(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])


def load_digits() -> tuple[Source, Source]:
    """The digits to train on, and a fixed fifth of each class to evaluate on."""
    digits = read_digits()
    small = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], from 0..16
    large = [Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC) for image in small]
    pixels, labels = np.stack([np.asarray(image) for image in large]), digits.target.astype(np.int64)
    classes = tuple(str(name) for name in digits.target_names)
    draws = mix(np.arange(len(labels)), key_of("digits"))

    def part(rows: np.ndarray, origin: str) -> Digits:
        return Digits(pixels[rows], rows, labels[rows], classes, origin)

    train, val = held_out(draws, labels, share=0.2)
    return part(train, "all but the fixed fifth"), part(val, "a fixed fifth, held out")
