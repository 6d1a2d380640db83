"""Output of a replay: a sheet of pictures, the samples of the step, and its numbers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.durable import remove, replace_file, replace_folder, sync_folder
from common.errors import Refused
from common.files import as_json
from common.run.folder import write_json
from common.run.plots import ORANGE, Cell, arrow, sheet

PICTURES = 48  # on the sheet


def write(made: Any, rows: Sequence[dict], run: Path, output: Path) -> None:
    """Write the folder `output`, and print what was found. `made` is the `Replay`, `rows` come from metrics.jsonl."""
    row = next((row for row in rows if row["step"] == made.wanted), {})
    here = {
        "train/loss": made.report.loss,
        "train/lr": made.rate,
        "train/grad_norm": made.report.grad_norm,
        **made.report.logged,
    }
    numbers = {
        name: {"replayed": value, "logged": row.get(name)} | ({"difference": value - row[name]} if name in row else {})
        for name, value in here.items()
    }
    worst = sorted(range(len(made.rows)), key=lambda place: -made.rows[place]["loss"])[:PICTURES]
    draft = output.with_name(f".{output.name}.tmp")
    remove(draft)
    try:
        draft.mkdir(parents=True)
        write_json(draft / "step.json", {"step": made.wanted, "numbers": numbers})
        replace_file(draft / "samples.jsonl", "".join(json.dumps(as_json(row)) + "\n" for row in made.rows).encode())
        headline = (
            f"{run.resolve().name}, step {made.wanted}: {len(worst)} of {len(made.rows)} samples, largest losses first"
        )
        sheet([cell(made.rows[place], made.pictures[place]) for place in worst], headline, draft / "sheet.png")
        sync_folder(draft)
        replace_folder(output, draft)
    except OSError as error:
        raise Refused(f"{output}: can't be written ({error.strerror or error}); name another folder by -o") from error
    finally:
        remove(draft)
    print(f"{run}, step {made.wanted}: {len(made.rows)} samples in {output}: sheet.png, samples.jsonl, step.json")
    print(f"  train/loss  {made.report.loss:.17g} replayed, {compared(made.report.loss, row.get('train/loss'))}")
    if row and row["train/lr"] != made.rate:
        print(f"  train/lr    {made.rate:.6g} replayed, {row['train/lr']:.6g} logged: the run had another length then")


def compared(value: float, logged: float | None) -> str:
    """How the replayed number stands to the logged one, in words."""
    if logged is None:
        return "not logged: rows are written every --log_every steps"
    return f"{logged:.17g} logged: " + ("the same bits" if value == logged else f"{abs(value - logged):.1e} apart")


def cell(row: dict, pixels: np.ndarray) -> Cell:
    """A sample on the sheet: [3, H, W] with its label and prediction, or with its boxes."""
    boxes = [(found["box"], found["label"], ORANGE) for found in row.get("boxes", ())]
    numbers = f"loss {row['loss']:.3g}"
    if "label" in row:
        numbers = f"{arrow(row['label'], row['predicted'])}\n{numbers}"
    return Cell(pixels.transpose(1, 2, 0), numbers, row["image"], boxes)
