"""A step of a run, made again by the run's own recipe: its samples, their losses, and its metrics."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from common.checkpoints import Checkpoints
from common.config.recipe_source import FOLDER
from common.distributed import gather_objects, gather_to_main, is_main
from common.durable import remove
from common.errors import Refused
from common.run import Observer, Run
from common.run.folder import read_json, read_rows
from common.run.plots import to_pixels
from tools.replay.output import write
from tools.trained import find_recipe, load_recipe

_NEVER = 10**9  # steps

# Settings of a replay. None of them changes a step.
_SETTINGS = {
    "tracker": "none",
    "patience": 0,
    "max_hours": 0,
    "profile": "",
    "log_every": 1,
    "eval_every": _NEVER,
    "checkpoint_every": _NEVER,
}
# Flags that a user can't give: the replay sets them.
_RESERVED = {"config", "output_dir", "name", "resume"} | _SETTINGS.keys()


class StepReplayed(Exception):
    """The step that is replayed is over, and recorded."""


class StepRecorder(Observer):
    """Keeps the samples of one step, and ends the run after it.

    The samples are shown by a forward pass of their own, before that of the step, which it leaves
    as it would have been.
    """

    def __init__(self, step: int):
        self.step = step
        # One per sample; in the end, of all ranks, in the order of the stream.
        self.rows: list[dict] = []
        self.pictures: list[np.ndarray] = []  # uint8[H, W, 3] of each sample

    def on_prepare(self, model, train_set, compute_losses) -> None:
        self._model = model
        self._train_set = train_set
        self._compute_losses = compute_losses

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def on_micro_batch(self, step, batch) -> None:
        if step != self.step:
            return
        inputs = []
        outputs = []

        def network(*args):
            output = self._model(*args)
            inputs.append(args[0])
            outputs.append(output)
            return output

        device = batch.images.device
        accelerators = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(accelerators, device_type=device.type):
            losses = self._compute_losses(network, batch)
        self.rows += self._describe(batch, losses, outputs[0])
        config = getattr(self._model, "pretrained_cfg", None) or {}
        self.pictures += list(to_pixels(inputs[0], config))

    def _describe(self, batch, losses, output) -> list[dict]:
        """Each sample of a micro-batch: position in the stream, image, label or boxes, and loss."""
        rows = []
        images = self._train_set.describe_images(batch)
        positions = batch.positions.tolist()
        for position, image, loss in zip(positions, images, losses.tolist(), strict=True):
            label, name, boxes, *_ = image
            row = {"position": position, "image": name, "label": label, "loss": loss}
            if boxes:
                row["boxes"] = []
                for corners, class_name in boxes:
                    row["boxes"].append({"label": class_name, "box": corners})
            rows.append(row)
        if isinstance(output, torch.Tensor) and output.ndim == 2:  # logits [B, K]
            classes = self._train_set.source.classes
            for row, class_id in zip(rows, output.argmax(1).tolist(), strict=True):
                row["predicted"] = classes[class_id]
        return rows

    def on_report(self, report) -> None:
        if report.step != self.step:
            return
        rows_by_rank = gather_objects(self.rows)
        pictures_by_rank = gather_to_main(self.pictures)
        self.rows = [row for rows in rows_by_rank for row in rows]
        if pictures_by_rank:
            self.pictures = [picture for pictures in pictures_by_rank for picture in pictures]
        raise StepReplayed


def replay(run: Path, step: int, output: Path, flags: Sequence[str], from_start: bool) -> None:
    """Make `step` of the run in the folder `run` again, and write what it saw to `output`.

    `flags` are the recipe's. Raises `Refused`.
    """
    if output.exists():
        raise Refused(f"{output} exists: name another folder by -o")
    check_flags(flags)
    checkpoint = choose_checkpoint(run, step, from_start)
    recipe, flags = load_run_recipe(run, flags)
    environment = find_environment(run, step)
    # Another number of threads sums in another order.
    torch.set_num_threads(environment.get("threads") or torch.get_num_threads())
    recorder = StepRecorder(step)
    recipe.Run = partial(Run, observer=recorder)  # type: ignore[attr-defined]
    # Beside the output, where all ranks find it before they have met.
    scratch = output.with_name(f".{output.name}.run")
    if not int(os.environ.get("RANK", 0)):
        # Of a replay that was killed; the others look there once they have met the first one.
        remove(scratch)
    name = run.resolve().name
    settings = {
        "config": run / "config.yaml",
        "output_dir": scratch,
        "name": name,
        "resume": checkpoint,
    } | _SETTINGS
    if "micro_batch_size" in environment and not environment.get("undivided_for"):
        # One process then makes the micro-batches of all processes, one after another.
        settings["max_micro_batch_size"] = environment["micro_batch_size"]
    argv = sys.argv
    sys.argv = [str(recipe.__file__)]
    sys.argv += [f"--{key}={value}" for key, value in settings.items()]
    sys.argv += flags
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(StepReplayed):
            recipe.main()
        if is_main():
            replayed = find_row(scratch / name, step)
            write(recorder, replayed, find_row(run, step), run, output)
    finally:
        sys.argv = argv
        if is_main():
            remove(scratch)


def check_flags(flags: Sequence[str]) -> None:
    """Raise `Refused` for a flag that the replay sets itself."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and name.removeprefix("--") in _RESERVED:
            raise Refused(f"{name}: a replay sets it itself; leave it out")


def find_row(run: Path, step: int) -> dict:
    """Find the row of `step` in metrics.jsonl; empty if none was written."""
    for row in read_rows(run / "metrics.jsonl"):
        if row["step"] == step and "train/loss" in row:
            return row
    return {}


def choose_checkpoint(run: Path, step: int, from_start: bool) -> str:
    """Choose what `--resume` is given: the newest checkpoint before `step`, or "never".

    Raises `Refused` if the step can't be replayed.
    """
    if not (run / "config.yaml").is_file():
        raise Refused(f"{run}: is no run folder, it has no config.yaml")
    steps = sorted(_list_checkpoints(run))
    logged = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    last = max([0] + steps + logged)
    if not 1 <= step <= last:
        raise Refused(f"--step {step}: {run} has made the steps 1 to {last}")
    if from_start:
        return "never"
    steps_before = [checkpoint_step for checkpoint_step in steps if checkpoint_step < step]
    if steps_before:
        return str((run / "checkpoints" / f"step_{steps_before[-1]:08d}").resolve())
    possible = f"{run} has none"
    if steps and steps[0] < last:
        possible = f"the checkpoints of {run} allow {steps[0] + 1} to {last}"
    raise Refused(
        f"--step {step}: needs a checkpoint from before it, {possible}; --from_start makes all "
        "steps again, and --keep_checkpoints with --checkpoint_every keeps more of them in the "
        "next run"
    )


def load_run_recipe(run: Path, flags: Sequence[str]) -> tuple[ModuleType, list[str]]:
    """Load the recipe that made the run, see `find_recipe`; returns it and the other flags.

    Raises `Refused` if it can't be observed.
    """
    name = Path(str(read_json(run / "environment.json").get("recipe", ""))).stem
    if not (run / FOLDER / f"{name}.py").is_file():
        raise Refused(
            f"{run}: keeps no source of its recipe in {run / FOLDER}, which older runs and "
            "notebooks lack"
        )
    file, other_flags = find_recipe(str(run), run, name, flags)
    recipe = load_recipe(file.resolve())
    if not hasattr(recipe, "Run") or not hasattr(recipe, "main"):
        raise Refused(
            f"{file}: must import the name Run and have a function main, as recipes/cls.py does"
        )
    return recipe, other_flags


def find_environment(run: Path, step: int) -> dict:
    """Find the environment of the start that made `step`.

    The next checkpoint has it; if there is none, the newest start made the step.
    """
    environment = None
    checkpoints = _list_checkpoints(run)
    next_steps = [checkpoint_step for checkpoint_step in checkpoints if checkpoint_step >= step]
    if next_steps:
        environment = read_json(checkpoints[min(next_steps)] / "record.json").get("environment")
    return environment or read_json(run / "environment.json")


def _list_checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoints of a run by their steps."""
    paths = Checkpoints(run / "checkpoints").list_paths()
    return {int(path.name.removeprefix("step_")): path for path in paths}
