"""`--eval_only`: chooses the weights and the part of the data to evaluate, and matches their classes by name."""

import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from common.checkpoints.resume import load_model
from common.config.origin import Origin, by_name, called_by_weights, read_origin
from common.data import splits
from common.data.source import Source
from common.distributed import launch
from common.distributed.collectives import all_or_none
from common.errors import Refused


def begin(config, read: Callable[[str], Origin] = read_origin) -> Origin:
    """Read and print which weights `--eval_only` evaluates, and which settings differ from those of their run.

    `read` is what `parse` was given. Raises `Refused` if they can't be read.
    """
    origin = read(config.eval_only)
    launch.say(origin.describe(dataclasses.asdict(config)))
    return origin


def read(config, origin: Origin, build_data: Callable) -> tuple:
    """The data to evaluate on, the names of the model's classes, and the model's class id of each class of the data.

    `build_data(config, origin)` is the recipe's. Logs which part of the data is evaluated.
    Raises `Refused` for classes that the model does not know.
    """
    _, val = build_data(config, origin)
    called = called_by_weights(getattr(config, "init_classes", ""), val.classes)
    places = origin.places(val.classes, config.data, called)
    launch.say(f"{splits.describe(config.data, val)}, {origin.matched(val.classes)}")
    return val, origin.classes or val.classes, places


def model_of(config, origin: Origin) -> str:
    """The name or folder to build the model from: an exported folder, or for a checkpoint `--model`.

    Raises `Refused` if `--model` contradicts the exported folder.
    """
    if origin.is_alone:
        return config.model
    if config.model != origin.config.get("model"):
        theirs = origin.config.get("model")
        raise Refused(f"--model {config.model}: {origin.path} brings its own model, {theirs}; leave --model out")
    return origin.path


def load_weights(model: torch.nn.Module, origin: Origin) -> None:
    """Load a checkpoint's weights into `model`; an exported model was built with its own."""
    if origin.is_alone:
        with all_or_none("loading the weights"):
            load_model(model, Path(origin.path))


def report(config, results: dict, classes: Sequence[str]) -> None:
    """Print the results as one line of JSON, with classes by name."""
    launch.say(json.dumps({"eval_only": config.eval_only} | by_name(results, classes)))


class Columns(torch.nn.Module):
    """A classifier with some of the classes of `model`, in the order of `places`: images -> logits [B, len(places)]."""

    def __init__(self, model: torch.nn.Module, places: Sequence[int]):
        super().__init__()
        self.model, self.places = model, list(places)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)[:, self.places]


def match(model: torch.nn.Module, val: Source, names: Sequence[str], places: Sequence[int]):
    """`model` and `val` with the same classes in the same order: those of `val`, then the others that the model knows.

    `names` are the model's classes, `places` its class ids of the classes of `val`. Predicting one of the others counts as
    an error. For multi-label data, each class is a separate decision, so the others are left out.
    """
    others = () if val.multi_label else sorted(set(range(len(names))) - set(places))
    matched = copy.copy(val)
    object.__setattr__(matched, "classes", (*val.classes, *(names[place] for place in others)))  # sources are frozen
    return Columns(model, [*places, *others]), matched
