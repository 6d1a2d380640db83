"""Where are scikit-learn's handwritten digits, without importing all of scikit-learn for them?"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np


class HandwrittenDigits(NamedTuple):
    """The test part of the UCI set (Alpaydin & Kaynak, 1998), 1,797 images, named as scikit-learn names them."""

    images: np.ndarray  # float64[N, 8, 8] in 0..16
    target: np.ndarray  # int64[N]
    target_names: np.ndarray  # int64[10]


def load_digits() -> HandwrittenDigits:
    """What `sklearn.datasets.load_digits` returns, from the file that it reads; its import takes most of a second.

    Where an other version of scikit-learn has its file elsewhere, scikit-learn reads it.
    """
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        rows = np.loadtxt(file, delimiter=",")  # [N, 65], the last column is the digit
        return HandwrittenDigits(rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64), np.arange(10))
    from sklearn import datasets

    digits = datasets.load_digits()
    return HandwrittenDigits(digits.images, digits.target, digits.target_names)
