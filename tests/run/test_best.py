"""`best/` is the model that the newest checkpoint records, or the log says why not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoints.state import TrainingState
from common.checkpoints.store import Checkpoint, Checkpoints
from common.run.best import Best
from common.run.progress import Progress


class Training:
    """A run of `steps`, each with an evaluation of these results and a checkpoint, as `Run` goes about it."""

    def __init__(self, run: Path, keep: int = 2) -> None:
        self.run = run
        self.messages = []
        self.state = TrainingState(torch.nn.Linear(1, 1), ema=torch.nn.Linear(1, 1))
        self.best = Best(run, self.state, self.export, self.messages.append)
        self.checkpoints = Checkpoints(run / "checkpoints", keep)
        self.progress = Progress()

    def export(self, model: torch.nn.Module, results: dict, folder: Path) -> None:
        folder.mkdir()
        save_file({"weight": model.weight.detach().clone()}, folder / "model.safetensors")
        (folder / "results.json").write_text(json.dumps(results))

    def record(self, step: int) -> dict:
        of_run = {"name": "a", "recipe": "cls", "environment": {"commit": "c0ffee"}}
        return of_run | {
            "step": step,
            "config": {"lr": 0.1, "name": ""},
            "identity": {"lr": 0.1, "data": "1-2"},
        }

    def step(self, step: int, top1: float, placed: bool = True) -> None:
        with torch.no_grad():
            self.state.model.weight.fill_(-step)
            self.state.ema.weight.fill_(step)
        if self.progress.record_evaluation(step, {"eval/top1": top1}, "eval/top1"):
            self.best.export(
                self.state.get_exported_model(),
                {"top1": top1, "of_classes": [top1, 1.0]},
                self.record(step),
            )
        self.best.stage()
        files = {"model": self.state.model.state_dict(), "ema": self.state.ema.state_dict()}
        record = self.record(step) | {
            "ledger": vars(self.progress).copy(),
            "best": self.best.seal(),
        }
        record["ledger"] = {key: value for key, value in record["ledger"].items() if key[0] != "_"}
        self.checkpoints.save(record, files)
        if placed:
            self.best.publish()

    def start_again(self, run: Path | None = None) -> "Training":
        """Another start, in another folder if one is given."""
        restarted = Training(run or self.run)
        checkpoint = self.checkpoints.find_newest(print)
        assert isinstance(checkpoint, Checkpoint)
        restarted.progress = Progress(**checkpoint.record["ledger"])
        restarted.best.repair(checkpoint, restarted.progress)
        return restarted


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    return tmp_path / "a"


def read_content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_weight(run: Path) -> float:
    return load_file(run / "best/model.safetensors")["weight"].item()


def list_names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def flip(best: Path) -> None:
    weights = (best / "model.safetensors").read_bytes()
    (best / "model.safetensors").write_bytes(weights[:-1] + b"\x07")


DAMAGES = {
    "emptied": lambda best: (best / "model.safetensors").write_bytes(b""),
    "changed": flip,
    "removed": shutil.rmtree,
}


def test_the_new_best_waits_for_the_checkpoint_that_records_it(run: Path) -> None:
    training = Training(run)
    training.step(1, 0.1)
    assert read_weight(run) == 1
    training.best.export(training.state.get_exported_model(), {"top1": 0.2}, training.record(2))
    training.best.seal()  # for a checkpoint that was on its way
    training.best.publish()
    assert read_weight(run) == 1 and list_names(run) == [".best.new", "best", "checkpoints"]
    restarted = training.start_again()
    assert (
        read_weight(run) == 1
        and restarted.messages == []
        and list_names(run) == ["best", "checkpoints"]
    )


@pytest.mark.parametrize(
    "moment", ["before", "old aside", "old left", "new alone is there", "no checkpoint"]
)
def test_the_next_start_completes_or_undoes_a_replacement(run: Path, moment: str) -> None:
    training = Training(run)
    training.step(1, 0.1)
    training.step(2, 0.2, placed=False)
    best = run / "best"
    draft = run / ".best.tmp"
    old = run / ".best.old"
    if moment in ("old aside", "old left", "no checkpoint"):
        best.rename(old)
    if moment in ("old left", "no checkpoint"):
        draft.rename(best)
    if moment == "new alone is there":
        shutil.rmtree(best)
    if moment == "no checkpoint":
        shutil.rmtree(run / "checkpoints/step_00000002")
    step = 1 if moment == "no checkpoint" else 2
    restarted = training.start_again()
    assert read_weight(run) == restarted.progress.best["step"] == step and restarted.messages == []
    assert list_names(run) == ["best", "checkpoints"]
    restarted.step(3, 0.05)
    assert read_weight(run) == step and restarted.start_again().messages == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_best_is_exported_again(run: Path, damage: str) -> None:
    """From the checkpoint of the same step, which need not be the newest; with its run and the
    results of each class.
    """
    training = Training(run)
    for step, top1 in enumerate((0.1, 0.3, 0.2), 1):
        training.step(step, top1)
    was = read_content(run / "best")
    of_run = {"name": "a", "recipe": "cls", "step": 2, "commit": "c0ffee", "config": {"lr": 0.1}}
    assert json.loads(was["run.json"]) == of_run
    DAMAGES[damage](run / "best")
    restarted = training.start_again()
    (message,) = restarted.messages
    assert message.startswith(f"{run}/best is damaged or of another checkpoint (")
    assert message.endswith(f"): exported again from {run}/checkpoints/step_00000002")
    assert read_content(run / "best") == was and list_names(run) == ["best", "checkpoints"]
    restarted.step(4, 0.2)
    assert restarted.start_again().messages == [], "it is as every checkpoint says"


@pytest.mark.parametrize("damage", ["changed", "removed"])
def test_without_its_checkpoint_the_next_evaluation_is_the_best(run: Path, damage: str) -> None:
    training = Training(run)
    for step, top1 in enumerate((0.3, 0.1, 0.2), 1):
        training.step(step, top1)
    DAMAGES[damage](run / "best")
    restarted = training.start_again()
    (message,) = restarted.messages
    lost = (
        f"{run}/checkpoints/step_00000001, from which it was exported, is gone: the best model, "
        "top-1 30.00 %, is lost; "
    )
    assert lost in message and message.endswith(
        "; best/ will be the best of the evaluations from now on"
    )
    assert restarted.progress.best == {} and list_names(run) == [
        *["best.damaged"] * (damage == "changed"),
        "checkpoints",
    ]
    assert restarted.best.seal() == {"results": {}, "files": {}}
    restarted.step(4, 0.01)
    assert read_weight(run) == 4 and restarted.start_again().messages == []


def test_a_run_that_branches_off_takes_the_best_along(run: Path, tmp_path: Path) -> None:
    training = Training(run)
    for step, top1 in enumerate((0.3, 0.1, 0.2), 1):
        training.step(step, top1)
    (tmp_path / "b").mkdir()
    branch = training.start_again(tmp_path / "b")
    assert branch.messages == [] and read_weight(run) == 1
    assert read_content(tmp_path / "b/best") == read_content(run / "best")
