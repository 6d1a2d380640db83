"""The settings of single images that a classifier's configuration has, without the rest of it."""

from dataclasses import dataclass


@dataclass
class ViewSettings:
    crop_scale: float = 0.7
    hflip: float = 0.0
    vflip: float = 0.0
    augment: str = ""
