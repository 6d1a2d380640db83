"""Weights of a trained detector, whoever trained it, in the terms of this project."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """Weights of a detector, and the flags of `recipes/det.py` that make one that they fit."""

    settings: dict[str, Any]  # flag -> value: detector, model, levels, width, short_sides, ...
    tensors: dict[str, Tensor]  # our state dict; class heads have a row for each item of `classes`
    classes: tuple[str | None, ...]  # of the rows of the heads; None: background, or no class
    # Normalisation of images, for pixels in 0..1.
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    source: str = ""  # as the user named it
    score_threshold: float | None = None  # the authors', if it differs from ours
    notes: tuple[str, ...] = ()  # for the start table

    @property
    def has_background(self) -> bool:
        """True if the first row of the class heads is the background."""
        return str(self.settings["detector"]).endswith("rcnn")

    @property
    def is_unnamed(self) -> bool:
        """True if nobody says which class a row is for."""
        return not any(self.classes)

    @property
    def row_names(self) -> tuple[str, ...]:
        """Distinct names of the rows; a row without a class gets a name that no class has."""
        return tuple(name or f"__{index}__" for index, name in enumerate(self.classes))
