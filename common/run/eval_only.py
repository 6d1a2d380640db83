"""`--eval_only`: chooses the weights and the part of the data to evaluate, matches their classes by name, writes a report.

The report is a folder, `evaluation/WEIGHTS-PART/` in the run folder of the weights, such as `runs/NAME/evaluation/best-val/`,
else in `--output_dir`. It is replaced as a whole, so its files belong together:

    results.json  what was evaluated, and all numbers
    pictures/     those that the recipe draws of an evaluation
"""

import copy
import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader, Dataset

from common.checkpoints.resume import check_weights, load_model
from common.config.origin import Origin, by_name, called_by_weights, read_origin
from common.config.parsing import identity, short_hash
from common.data import splits
from common.data.loader import evaluation_loader
from common.data.source import Source
from common.distributed.collectives import all_or_none, is_main
from common.durable import make_folder, remove, replace_folder, sync_folder
from common.errors import Refused
from common.files import as_json
from common.launching import launch
from common.run import plots
from common.run.folder import write_json


def begin(config, read: Callable[[str], Origin] = read_origin) -> tuple[Accelerator, Origin]:
    """Join the processes of the launch; read and print which weights are evaluated, and how settings differ from their run's.

    `read` is what `parse` was given. Raises `Refused` if they can't be read.
    """
    accelerator, origin = launch.start(config), read(config.eval_only)
    launch.say(origin.describe(dataclasses.asdict(config)))
    return accelerator, origin


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


def loader(config, samples: Dataset) -> DataLoader:
    """This rank's batches of all images."""
    return evaluation_loader(samples, config.max_micro_batch_size, config.workers)


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
    """Load a checkpoint's weights into `model`; an exported model was built with its own, which are checked."""
    if origin.is_alone:
        with all_or_none("loading the weights"):
            load_model(model, Path(origin.path))
    else:
        check_weights(model, Path(origin.path) / "model.safetensors")


def report_folder(config, origin: Origin, val: Source) -> Path:
    """The folder of the report on `val`: one for each of weights, part of the data, and settings that the run did not have."""
    weights = Path(origin.path).absolute()
    run = weights.parent if weights.name == "best" else weights.parent.parent
    is_of_run = bool(origin.run) and (run / "config.yaml").is_file() and os.access(run, os.W_OK)
    known = origin.config | {"eval_only": config.eval_only, "split": config.split} if is_of_run else {}
    asked = {key: value for key, value in identity(config).items() if hasattr(config, key)}  # present names only
    differing = {key: asked[key] for key in asked if key not in known or asked[key] != known[key]}
    part = "held_out" if re.search("held.out", val.part) else Path(val.part.removeprefix("split ")).stem
    leaf = "-".join([_word(weights.name), _word(part)] + [short_hash(differing)] * bool(differing))
    run = run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run
    return (run if is_of_run else Path(config.output_dir)) / "evaluation" / leaf


def report(config, origin: Origin, val: Source, results: dict, details: Mapping, draw: Callable) -> None:
    """Print the `results` as one line of JSON, with classes by name; write the report, with `details` as well.

    A list in `results` or `details` has one value per class of `val`. `draw(place)` is the recipe's: it calls
    `place.draw(name, function, *arguments)` for each picture, as it calls a `Run`. With --dry_run, nothing is written.
    """
    folder = report_folder(config, origin, val)
    draft = folder.with_name(f".{folder.name}.new")
    printed = by_name(results, val.classes)
    evaluated = {
        "weights": os.path.abspath(origin.path) if os.path.exists(origin.path) else origin.path,
        "run": origin.run.get("name"),
        "recipe": origin.run.get("recipe"),
        "step": origin.run.get("step"),
        "data": config.data,
        "part": val.part,
        "fingerprint": val.fingerprint,
        "images": len(val),
        "classes": len(val.classes),
        "precision": AcceleratorState().mixed_precision,
        "config": {key: value for key, value in identity(config).items() if key != "eval_only"},
    }
    with all_or_none("writing the report"):
        if is_main() and not config.dry_run:
            try:
                remove(draft)
                make_folder(draft)
                draw(SimpleNamespace(draw=partial(_draw, draft / "pictures")))
                details = by_name(dict(details), val.classes)
                write_json(draft / "results.json", {"evaluated": evaluated} | printed | details)
                sync_folder(draft)
                replace_folder(folder, draft)
                launch.say(f"report: {folder}")
            except OSError as error:  # the numbers are not lost with it
                remove(draft)
                launch.say(f"no report: {folder} can't be written ({error.strerror}); name another --output_dir")
    launch.say(json.dumps(as_json({"eval_only": config.eval_only} | printed), allow_nan=False))


def _draw(folder: Path, name: str, function: Callable, *arguments) -> None:
    plots.attempt(folder / f"{name}.png", launch.say, function, *arguments)


def _word(text: str) -> str:
    """A text as a part of a file's name: "the folder" -> "the_folder"."""
    return re.sub(r"[^\w.]+", "_", text).strip("_.")[-60:] or "_"


class Columns(torch.nn.Module):
    """A classifier with some of the classes of `model`, in the order of `places`: images -> logits [B, len(places)]."""

    def __init__(self, model: torch.nn.Module, places: Sequence[int]):
        super().__init__()
        self.model, self.places = model, list(places)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images)[:, self.places]


def match(model: torch.nn.Module, val: Source, names: Sequence[str], places: Sequence[int]):
    """`model` and `val` with the same classes in the same order: `val`'s, then the others that the model knows.

    `names` are the model's classes, `places` its class ids of the classes of `val`. Predicting one of the others counts as
    an error. For multi-label data, each class is a separate decision, so the others are left out.
    """
    others = () if val.multi_label else sorted(set(range(len(names))) - set(places))
    matched = copy.copy(val)
    object.__setattr__(matched, "classes", (*val.classes, *(names[place] for place in others)))  # sources are frozen
    return Columns(model, [*places, *others]), matched
