"""The data of the comparison: handwritten digits of scikit-learn as 32 x 32 pictures."""

import math
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits


def save_digits(folder: Path, num_train: int) -> None:
    """Save `train/`, and a quarter as many in `val/`: a folder per class.

    All are in `flat/`, too, as `<class>_<number>.jpg`.
    """
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    for position, index in enumerate(order[: num_train + math.ceil(num_train / 4)]):
        image = Image.fromarray((digits.images[index] * 15).astype(np.uint8))
        split = "train" if position < num_train else "val"
        label = digits.target[index]
        for path in (f"{split}/{label}/{index}.png", f"flat/{label}_{index}.jpg"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            image.resize((32, 32)).convert("RGB").save(folder / path)
