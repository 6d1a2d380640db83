"""Output of a replay: a sheet of pictures, the samples of the step, and its metrics."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from common.durable import remove, replace_file, replace_folder, sync_folder
from common.files import to_json
from common.run.folder import write_json
from common.run.plots import ORANGE, Cell, draw_cells, format_arrow
from tools.command_line import refuse_unwritable

MAX_PICTURES = 48  # on the sheet


def write(recorder: Any, replayed: dict, logged: dict, run: Path, output: Path) -> None:
    """Write the folder `output`, and print the result.

    `recorder` is the `StepRecorder`; `replayed` and `logged` are the step's rows of metrics,
    `logged` is empty if the run wrote none.
    """
    step = recorder.step
    samples = recorder.rows
    largest_first = sorted(range(len(samples)), key=lambda i: -samples[i]["loss"])[:MAX_PICTURES]
    headline = (
        f"{run.resolve().name}, step {step}: {len(largest_first)} of {len(samples)} samples, "
        "largest losses first"
    )
    draft = output.with_name(f".{output.name}.tmp")
    remove(draft)
    try:
        with refuse_unwritable(f"--output {output}"):
            draft.mkdir(parents=True)
            comparison = {"step": step, "numbers": compare_metrics(replayed, logged)}
            write_json(draft / "step.json", comparison)
            lines = [json.dumps(to_json(sample)) + "\n" for sample in samples]
            replace_file(draft / "samples.jsonl", "".join(lines).encode())
            cells = [build_cell(samples[i], recorder.pictures[i]) for i in largest_first]
            draw_cells(cells, headline, draft / "sheet.png")
            sync_folder(draft)
            replace_folder(output, draft)
    finally:
        remove(draft)
    loss = replayed["train/loss"]
    print(
        f"{run}, step {step}: {len(samples)} samples in {output}: sheet.png, samples.jsonl, "
        "step.json"
    )
    print(
        f"  train/loss  {loss:.17g} replayed, {describe_difference(loss, logged.get('train/loss'))}"
    )
    if logged and logged["train/lr"] != replayed["train/lr"]:
        print(
            f"  train/lr    {replayed['train/lr']:.6g} replayed, {logged['train/lr']:.6g} logged: "
            "the run had another length then"
        )


def compare_metrics(replayed: dict, logged: dict) -> dict[str, dict]:
    """The step's metrics of training, replayed and logged. Times and totals of the run are no part of it."""
    numbers = {}
    for name, value in replayed.items():
        if name.partition("/")[0] in ("step", "epoch", "samples", "perf", "data", "run"):
            continue
        numbers[name] = {"replayed": value, "logged": logged.get(name)}
        if name in logged:
            numbers[name]["difference"] = value - logged[name]
    return numbers


def describe_difference(value: float, logged: float | None) -> str:
    """How the replayed loss compares with the logged one, for people."""
    if logged is None:
        return "not logged: rows are written every --log_every steps"
    if value == logged:
        return f"{logged:.17g} logged: the same bits"
    return f"{logged:.17g} logged: {abs(value - logged):.1e} apart"


def build_cell(sample: dict, pixels: np.ndarray) -> Cell:
    """A sample on the sheet: uint8[H, W, 3] with its label and prediction, or with its boxes."""
    caption = sample["label"]
    if "predicted" in sample:
        caption = format_arrow(caption, sample["predicted"])
    boxes = [(box["box"], box["label"], ORANGE) for box in sample.get("boxes", [])]
    return Cell(pixels, f"{caption}\nloss {sample['loss']:.3g}", sample["image"], boxes)
