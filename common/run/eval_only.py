"""`--eval_only`: chooses the weights and the split of the data to evaluate, matches their classes by
name, writes a report.

The report is a folder, `evaluation/WEIGHTS-PART/` in the run folder of the weights, such as
`runs/NAME/evaluation/best-val/`, else in `--output_dir`. It is replaced as a whole, so its files
belong together:

    results.json     what was evaluated, and all numbers
    predictions.csv  the prediction for each image; of a detector predictions.json
    pictures/        those that the recipe draws of an evaluation
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from common.checkpoints.resume import check_weights, load_model
from common.config.fields import get_fields_with
from common.config.origin import Origin, key_by_class
from common.config.parsing import compute_short_hash, get_identity, get_weight_fields
from common.data import splits
from common.data.loader import create_eval_loader
from common.data.source import Source
from common.distributed.collectives import all_or_none, is_main
from common.durable import make_folder, remove, replace_folder, sync_folder
from common.files import to_json
from common.launching import launch
from common.run import plots
from common.run.eval_batches import EvalBatches
from common.run.folder import write_json


def announce(config: Any, origin: Origin) -> None:
    """Log which weights are evaluated, and how settings differ from their run's."""
    settings = dataclasses.asdict(config) | _get_run_settings(config, origin)
    launch.print_on_main(origin.describe(settings, get_fields_with(config, "reads_data")))


def load_weights(model: nn.Module, origin: Origin) -> None:
    """Load a checkpoint's weights into `model`; an exported model was built with its own, which are
    checked.
    """
    if origin.is_state_dict:
        with all_or_none("loading the weights"):
            load_model(model, Path(origin.path))
    else:
        check_weights(model, Path(origin.path) / "model.safetensors")


def build_batches(config: Any, dataset: Any, accelerator: Accelerator) -> EvalBatches:
    """This rank's share of all images of an `EvalDataset`."""
    loader = create_eval_loader(dataset, config.max_micro_batch_size, config.workers)
    return EvalBatches(loader, dataset.normalize, accelerator)


def describe_data(config: Any, origin: Origin, val: Source) -> str:
    """Which split of the data is evaluated, and how its classes correspond to the model's."""
    return f"{splits.describe_eval_data(config.data, val)}, {origin.describe_classes(val.classes)}"


def _get_run_settings(config: Any, origin: Origin) -> dict:
    """The settings that `--eval_only` has replaced by the evaluated weights, as their run had them."""
    names = [name for name in get_weight_fields(config) if name in origin.config]
    return {name: origin.config[name] for name in names}


def choose_report_folder(config: Any, origin: Origin, val: Source) -> Path:
    """Choose the folder of the report on `val`.

    There is one for each of weights, split of the data, and settings that the run did not have.
    """
    weights = Path(origin.path).absolute()
    run = weights.parent if weights.name == "best" else weights.parent.parent
    parent = Path(config.output_dir)
    run_settings = {}
    if origin.run and (run / "config.yaml").is_file() and os.access(run, os.W_OK):
        run_settings = origin.config | {"eval_only": config.eval_only, "split": config.split}
        parent = run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run
    split = Path(val.split_text.removeprefix("split ")).stem
    if re.search("held.out", val.split_text):
        split = "held_out"
    name = f"{_make_file_name(weights.name)}-{_make_file_name(split)}"
    settings = get_identity(config) | _get_run_settings(config, origin)
    differing = {}
    for key, value in settings.items():
        is_same = key in run_settings and value == run_settings[key]
        if hasattr(config, key) and not is_same:  # flags of today only
            differing[key] = value
    if differing:
        name += f"-{compute_short_hash(differing)}"
    return parent / "evaluation" / name


def report(config: Any, origin: Origin, val: Source, results: dict, evaluation: Any) -> None:
    """Print the `results` as one line of JSON, with classes by name; write the report.

    `evaluation` is what the recipe's `evaluate` returned: its `details()` and `draw(pictures)`, if
    it has them, are written as well. A list in results or details has one value per class of `val`.
    With --dry_run, nothing is written.
    """
    folder = choose_report_folder(config, origin, val)
    draft = folder.with_name(f".{folder.name}.new")
    printed = key_by_class(results, val.classes)
    settings = get_identity(config) | _get_run_settings(config, origin)
    evaluated = {
        "weights": os.path.abspath(origin.path) if os.path.exists(origin.path) else origin.path,
        "run": origin.run.get("name"),
        "recipe": origin.run.get("recipe"),
        "step": origin.run.get("step"),
        "data": config.data,
        "part": val.split_text,
        "fingerprint": val.fingerprint,
        "images": len(val),
        "classes": len(val.classes),
        "precision": AcceleratorState().mixed_precision,
        "config": {key: value for key, value in settings.items() if key != "eval_only"},
    }
    with all_or_none("writing the report"):
        if is_main() and not config.dry_run:
            try:
                remove(draft)
                make_folder(draft)
                content = {"evaluated": evaluated} | printed
                pictures = SimpleNamespace(draw=partial(_draw, draft / "pictures"))
                plots.draw_evaluation(evaluation, pictures, launch.print_on_main)
                if hasattr(evaluation, "details"):
                    content |= key_by_class(evaluation.details(), val.classes)
                if hasattr(evaluation, "write_predictions"):
                    evaluation.write_predictions(draft)
                write_json(draft / "results.json", content)
                sync_folder(draft)
                replace_folder(folder, draft)
                launch.print_on_main(f"report: {folder}")
            except OSError as error:  # the numbers are not lost with it
                remove(draft)
                launch.print_on_main(
                    f"no report: {folder} can't be written ({error.strerror}); name another "
                    "--output_dir"
                )
    launch.print_on_main(
        json.dumps(to_json({"eval_only": config.eval_only} | printed), allow_nan=False)
    )


def _draw(folder: Path, name: str, function: Callable, *arguments) -> None:
    plots.attempt(folder / f"{name}.png", launch.print_on_main, function, *arguments)


def _make_file_name(text: str) -> str:
    """A text as a part of a file's name: "the folder" -> "the_folder"."""
    return re.sub(r"[^\w.]+", "_", text).strip("_.")[-60:] or "_"
