"""A data set and a model of your own: the part of a script that stays when you come from elsewhere."""

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn


class Digits:
    """scikit-learn's digits, 8 x 8 pixels; every fifth is held out."""

    classes = tuple("0123456789")

    def __init__(self, part, transform=None):
        digits = load_digits()
        self.transform = transform
        rows = (np.arange(len(digits.target)) % 5 == 0) == (part == "val")
        self.images = (digits.images[rows] * 15).astype(np.uint8)
        self.labels = digits.target[rows]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index]).convert("RGB")
        return self.transform(image) if self.transform else image, int(self.labels[index])


class Net(nn.Sequential):
    """Images [B, 3, 8, 8] -> logits [B, 10]."""

    def __init__(self):
        layers = (
            nn.Conv2d(3, 32, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.GELU(),
        )
        super().__init__(*layers, nn.Flatten(), nn.Linear(512, 10))
