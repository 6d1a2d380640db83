"""A tracker that remembers what it is sent, and what the files of real ones have."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class Dashboard:
    """Stands in for a tracker, and remembers."""

    def __init__(self):
        self.rows: list[tuple] = []
        self.results: dict = {}
        self.ended: tuple = ()
        self.shown: dict = {}
        self.begun = False

    def begin(self) -> None:
        self.begun = True

    def log(self, step: int, values: dict) -> None:
        self.rows.append((step, values))

    def summary(self, values: dict) -> None:
        self.results = values

    def images(self, step: int, images: dict) -> None:
        self.shown = {step: images}

    def finish(self, exit_code: int, patience: float) -> None:
        self.ended = (exit_code, patience)

    def where(self) -> str:
        return "over there"


def records(folder: Path) -> list[list[dict]]:
    """The records of every W&B run in the run folder, oldest first."""
    files = sorted(folder.glob("wandb/*run-*/*.wandb"))
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
    texts = [subprocess.run([*inspect, file], capture_output=True, text=True).stdout for file in files]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def logged(folder: Path, tracker: str) -> dict[int, dict]:
    """What the dashboard's files in the run folder have, by step: numbers and pictures by key."""
    rows: dict[int, dict] = defaultdict(dict)
    if tracker == "wandb":
        items = (record["history"]["item"] for run in records(folder) for record in run if record["type"] == "history")
        for item in items:
            rows[item.pop("step")] |= {key.removesuffix("._type"): value for key, value in item.items()}
    else:
        events = EventAccumulator(str(folder / "tensorboard"), size_guidance=dict.fromkeys(("images", "scalars"), 0))
        tags = events.Reload().Tags()
        for key in tags["scalars"]:
            for event in events.Scalars(key):
                rows[event.step][key] = event.value
        for key in tags["images"]:
            for event in events.Images(key):
                rows[event.step][key] = event
    return dict(rows)


def results(folder: Path, tracker: str) -> dict[str, float]:
    """What the dashboard's table of runs has of the best and the last evaluation."""
    if tracker == "tensorboard":
        of_steps = sorted(logged(folder, tracker).items())
        items = [(key.removeprefix("summary/"), value) for _, row in of_steps for key, value in row.items()]
    else:
        summaries = (record["summary"] for run in records(folder) for record in run if record["type"] == "summary")
        items = [item for summary in summaries for item in summary["update"].items()]
    return {key: value for key, value in items if key.startswith(("best/", "last/"))}
