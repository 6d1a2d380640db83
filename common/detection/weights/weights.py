"""Weights of a trained detector, whoever trained it, in the terms of this project."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """Weights of a trained detector, and which flags of `recipes/det.py` make a detector that they fit.

    A converter of another project's checkpoints has two functions, `matches(state) -> bool` and `convert(state) -> Weights`.
    `state` is the file's state dict, {name: tensor}: tensors are views of a mapped file, so looking at names and shapes
    costs nothing. `convert` leaves `source` empty.
    """

    settings: dict[str, object]  # flag -> value: detector, model, levels, width, ..., and short_sides as it was trained
    tensors: dict[
        str, Tensor
    ]  # by the names that our module's state dict has; class heads have a row per item of `classes`
    classes: tuple[str | None, ...]  # name of each row of the class heads; None: background, or an id without a class
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # that images of pixels in 0..1 were normalised with
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    source: str = ""  # as the user named it
    notes: tuple[str, ...] = field(default=())  # what the start table says about them
