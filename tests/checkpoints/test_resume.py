"""A run resumes from its own newest intact checkpoint; anything else is refused or logged."""

import contextlib
import shutil
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

from common.checkpoints.resume import choose_checkpoint, load_model
from common.checkpoints.store import Checkpoints
from common.distributed.collectives import rank
from common.errors import Refused

IDENTITY = {"lr": 0.1, "data": "3f-4a", "seed": 0}


def save(run: Path, *steps: int, identity: dict = IDENTITY) -> list[Path]:
    run.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(run / "checkpoints", keep=9)
    files = {"model": {"weight": torch.zeros(2)}}
    return [checkpoints.save({"step": step, "identity": identity}, files) for step in steps]


def choose_step(resume: object, run: Path, identity: dict = IDENTITY) -> int | None:
    """The step from which a run resumes; logs nothing."""
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoint = choose_checkpoint(str(resume), checkpoints, identity, pytest.fail)
    return checkpoint.step if checkpoint else None


@pytest.mark.smoke
def test_auto_resumes_from_the_newest_or_starts_a_new_run(tmp_path: Path) -> None:
    assert choose_step("auto", tmp_path) is None
    save(tmp_path, 1, 2, 30)
    assert choose_step("auto", tmp_path) == 30


def test_a_path_names_a_checkpoint_of_another_folder_or_of_this(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a", 10, 20)
    assert choose_step(first, tmp_path / "b") == 10
    assert choose_step(second.parent / ".." / "checkpoints" / second.name, tmp_path / "a") == 20
    save(tmp_path / "c", 15)
    assert choose_step(second, tmp_path / "c") == 20  # further than what this folder has
    save(tmp_path / "d", 20)
    assert choose_step(first, tmp_path / "d") == 20, "a run that branched off resumes from its own"


@pytest.mark.parametrize(
    "changes, difference",
    [
        ({"new_flag": "folder"}, r"new_flag \(absent\) there, folder here"),
        ({"new_flag": ""}, ""),
        ({"new_switch": False}, ""),
    ],
)
def test_a_flag_newer_than_the_run_may_stay_off(
    tmp_path: Path, changes: dict, difference: str
) -> None:
    save(tmp_path, 1)
    if not difference:
        assert choose_step("auto", tmp_path, IDENTITY | changes) == 1
        return
    with pytest.raises(
        Refused, match=f"belongs to another run: {difference}; give this run another --name"
    ):
        choose_step("auto", tmp_path, IDENTITY | changes)


def test_the_average_is_evaluated_and_another_model_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    files = {"model": {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}}
    load_model(model, Checkpoints(tmp_path).save({"step": 1}, files))
    assert (model.weight == 1.0).all()
    files["ema"] = {"weight": torch.full((2, 3), 3.0), "bias": torch.zeros(2)}
    load_model(model, Checkpoints(tmp_path).save({"step": 2}, files))
    assert (model.weight == 3.0).all()
    files = {"model": nn.Linear(3, 4).state_dict()}
    path = Checkpoints(tmp_path / "other").save({"step": 1}, files)
    with pytest.raises(
        Refused, match=r"is of another model: bias \(\(4,\) there, \(2,\) here\), weight"
    ):
        load_model(model, path)
    assert (model.weight == 3.0).all()
    with pytest.raises(Refused, match="no checkpoint, nothing is there"):
        load_model(model, tmp_path / "missing")


def choose_on_ranks(folders: list[Path]) -> str:
    """Each rank sees a run folder of its own: as machines without a shared file system do."""
    try:
        with contextlib.chdir(folders[rank()]):
            checkpoints = Checkpoints(Path("checkpoints"))
            checkpoint = choose_checkpoint("auto", checkpoints, IDENTITY, print)
    except Refused as refusal:
        return str(refusal)
    return str(checkpoint.step) if checkpoint else "none"


def test_machines_resume_only_from_a_checkpoint_that_all_have(processes, tmp_path: Path) -> None:
    first = tmp_path / "first"
    second = tmp_path / "second"
    host = socket.gethostname()
    second.mkdir()
    save(first, 1)

    def choose(*folders: Path) -> list[str]:
        return processes.run(choose_on_ranks, list(folders), ranks=2)

    lacking = (
        f"checkpoints/step_00000001: {host} does not have the one that {host} resumes from: name "
        "an --output_dir that all"
    )
    assert all(text.startswith(lacking) for text in choose(first, second))
    ahead = (
        f"checkpoints: {host} has step 1, but {host}, which writes, has none: name an --output_dir "
        "that all"
    )
    assert all(text.startswith(ahead) for text in choose(second, first))
    shutil.copytree(first, second, dirs_exist_ok=True)
    assert choose(first, second) == ["1"] * 2
    (second / "checkpoints/step_00000001/manifest.json").write_text("{}")
    assert all(text.startswith(lacking) for text in choose(first, second)), (
        "another one of that name"
    )
    save(first, 99_999_999)
    save(second, 100_000_000)  # a name with one digit more
    ahead = f"checkpoints: {host} has step 100000000, but {host}, which writes, has step 99999999:"
    assert all(text.startswith(ahead) for text in choose(first, second))
    for folder in (first, second):
        shutil.rmtree(folder / "checkpoints")
    assert choose(first, second) == ["none"] * 2
