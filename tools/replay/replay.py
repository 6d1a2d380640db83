"""A step of a run, made again by the run's own recipe: what it saw, and what came out of it."""

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from common.checkpoints import Checkpoints
from common.config.recipe_source import FOLDER
from common.distributed import gather_objects, gather_to_main, is_main, world_size
from common.durable import remove
from common.errors import Refused
from common.run import Run
from common.run.folder import read_json, read_rows
from common.training import timm_models
from tools.replay.output import write
from tools.trained import find_recipe, load_recipe

_QUIET = {"tracker": "none", "patience": 0, "max_hours": 0, "profile": ""}  # settings of a replay that change no step


class Replay(Run):
    """A run that ends with step `wanted`, without evaluations and checkpoints, and keeps what that step saw.

    One process makes the micro-batches of all processes of the recorded `layout`, one after another.
    """

    wanted: int
    layout: dict  # the run's environment.json
    made: "Replay"  # the last one; a recipe's main returns nothing

    def prepare(self, model, optimizer, schedule, samples, *others):
        Replay.made = self
        self._samples, self._train = samples, samples.source
        self.rate = schedule(self.wanted - 1)
        self._seen: dict[str, list] = {"batch": [], "input": [], "guess": [], "losses": []}
        network, optimizers = super().prepare(model, optimizer, schedule, samples, *others)
        self._ending.last = self.wanted
        return partial(self._forward, network), optimizers

    def _make_plan(self, samples):
        plan = super()._make_plan(samples)
        pieces = self.layout.get("world_size", 1) * self.layout.get("micro_steps", 1)
        if world_size() > 1 or plan.units < pieces or plan.undivided_for:
            return plan
        return dataclasses.replace(plan, max_micro_batch_size=plan.unit * -(-plan.units // pieces))

    def _keep(self, name: str, value: Any) -> None:
        if self._started and self.step + 1 == self.wanted:
            self._seen[name].append(value)

    def _forward(self, network, *inputs):
        outputs = network(*inputs)
        if len(self._seen["input"]) < len(self._seen["batch"]):  # the first call for a micro-batch
            self._keep("input", inputs[0].detach())
            self._keep("guess", outputs.argmax(-1) if isinstance(outputs, torch.Tensor) else None)
        return outputs

    def micro_batches(self):
        for batch in super().micro_batches():
            self._keep("batch", batch)
            yield batch

    def backward(self, losses) -> None:
        self._keep("losses", losses.detach())
        super().backward(losses)

    def end_step(self, grad_norm) -> None:
        super().end_step(grad_norm)
        if self.step == self.wanted:
            self._settle()
            self._collect()

    def _record_reports(self, reports) -> None:
        self.report = next((report for report in reports if report.step == self.wanted), None)
        super()._record_reports(reports)

    def should_evaluate(self) -> bool:
        return False

    def should_save(self) -> bool:
        return False

    def draw(self, *_) -> None:
        """A replay leaves nothing in its run folder."""

    def _collect(self) -> None:
        """Bring the samples of all processes to the main one, in the order of the stream."""
        losses, seen = torch.cat(self._seen["losses"]).cpu(), self._seen
        rows = [row for parts in zip(seen["batch"], seen["guess"], strict=True) for row in self._rows_of(*parts)]
        for row, loss in zip(rows, losses.tolist(), strict=True):
            row["loss"] = loss
        pictures = np.concatenate([*map(self._pictures, seen["batch"], seen["input"])])
        self.rows = [row for theirs in gather_objects(rows) for row in theirs]
        self.pictures = np.concatenate([theirs for (theirs,) in gather_to_main([pictures]) or [[pictures]]])

    def _rows_of(self, batch, guess) -> list[dict]:
        """Of each sample of a micro-batch: where it is from, with its boxes, or its label and the model's guess."""
        classes, positions = self._train.classes, batch.positions.cpu().numpy()
        indices = self._samples.stream.indices(positions)
        rows = [
            {"position": position, "image": self._train.name(index)}
            for position, index in zip(positions.tolist(), indices.tolist(), strict=True)
        ]
        if hasattr(batch, "targets"):
            for row, target in zip(rows, batch.targets, strict=True):
                boxes = zip(target["labels"].tolist(), target["boxes"].tolist(), strict=True)
                row["boxes"] = [{"label": classes[label], "box": box} for label, box in boxes]
            return rows
        for row, label, number in zip(rows, batch.labels.cpu().numpy(), guess.tolist(), strict=True):
            own = np.flatnonzero(label) if label.ndim else [label]
            row |= {"label": ", ".join(classes[one] for one in own), "predicted": classes[number]}
        return rows

    def _pictures(self, batch, images) -> np.ndarray:
        """uint8[B, 3, H, W]: what the network saw, without normalisation."""
        if hasattr(batch, "targets"):
            return batch.images.cpu().numpy()
        found = timm_models.resolve_data_config(self.model, getattr(self.config, "image_size", 0))
        mean, std = (255 * images.new_tensor(found[name])[:, None, None] for name in ("mean", "std"))
        return (images * std + mean).round().clamp(0, 255).byte().cpu().numpy()


def replay(run: Path, step: int, output: Path, flags: Sequence[str], from_start: bool) -> None:
    """Make `step` of the run in the folder `run` again, and write what it saw to the folder `output`. Raises `Refused`."""
    if output.exists():
        raise Refused(f"{output} exists: name another folder by -o")
    checkpoint = begin_with(run, step, from_start)
    recipe, flags = load_run_recipe(run, flags)
    Replay.wanted, Replay.layout = step, layout_of(run, step)
    vars(recipe)["Run"] = Replay
    torch.set_num_threads(Replay.layout.get("threads") or torch.get_num_threads())  # other numbers sum in another order
    said, own = io.StringIO(), sys.argv
    # Beside the output, where all ranks find it before they have met.
    scratch = output.with_name(f".{output.name}.run")
    if not int(os.environ.get("RANK", 0)):
        remove(scratch)  # of a replay that was killed; the others look there once they have met the first one
    given = {"config": run / "config.yaml", "output_dir": scratch, "name": run.resolve().name, "resume": checkpoint}
    sys.argv = [str(recipe.__file__), *(f"--{name}={value}" for name, value in (given | _QUIET).items()), *flags]
    try:
        with contextlib.redirect_stdout(said):
            recipe.main()
    finally:
        sys.argv = own
        if is_main():
            remove(scratch)
    if is_main():
        write(Replay.made, read_rows(run / "metrics.jsonl"), run, output)


def begin_with(run: Path, step: int, from_start: bool) -> str:
    """What `--resume` is given: the newest checkpoint before `step`. Raises `Refused` if the step can't be replayed."""
    if not (run / "config.yaml").is_file():
        raise Refused(f"{run}: is no run folder, it has no config.yaml")
    steps = sorted(int(path.name.removeprefix("step_")) for path in Checkpoints(run / "checkpoints").paths())
    last = max([0, *steps, *(row["step"] for row in read_rows(run / "metrics.jsonl"))])
    if not 1 <= step <= last:
        raise Refused(f"--step {step}: {run} has made the steps 1 to {last}")
    if from_start:
        return "never"
    if before := [number for number in steps if number < step]:
        return str((run / "checkpoints" / f"step_{before[-1]:08d}").resolve())
    there = (
        f"the checkpoints of {run} allow {steps[0] + 1} to {last}" if steps and steps[0] < last else f"{run} has none"
    )
    raise Refused(
        f"--step {step}: needs a checkpoint from before it, {there}; --from_start makes all steps again, and "
        "--keep_checkpoints with --checkpoint_every keeps more of them in the next run"
    )


def load_run_recipe(run: Path, flags: Sequence[str]) -> tuple[ModuleType, list[str]]:
    """The recipe that made the run, see `find_recipe`, and the other flags. Raises `Refused` if it can't be observed."""
    name = Path(str(read_json(run / "environment.json").get("recipe", ""))).stem
    if not (run / FOLDER / f"{name}.py").is_file():
        raise Refused(f"{run}: keeps no source of its recipe in {run / FOLDER}, which older runs and notebooks lack")
    file, other_flags = find_recipe(str(run), run, name, flags)
    recipe = load_recipe(file.resolve())
    if not hasattr(recipe, "Run") or not hasattr(recipe, "main"):
        raise Refused(f"{file}: must import the name Run and have a function main, as recipes/cls.py does")
    return recipe, other_flags


def layout_of(run: Path, step: int) -> dict:
    """The environment of the start that made `step`: as the next checkpoint has it, else of the newest start."""
    later = [path for path in reversed(Checkpoints(run / "checkpoints").paths()) if int(path.name[5:]) >= step]
    found = read_json(later[0] / "record.json").get("environment") if later else None
    return found or read_json(run / "environment.json")
