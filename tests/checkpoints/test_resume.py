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

MINE = {"lr": 0.1, "data": "3f-4a", "seed": 0}


def save(run: Path, *steps: int, identity: dict = MINE) -> list[Path]:
    run.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(run / "checkpoints", keep=9)
    files = {"model": {"weight": torch.zeros(2)}}
    return [checkpoints.save({"step": step, "identity": identity}, files) for step in steps]


def chosen(resume: object, run: Path, mine: dict = MINE) -> int | None:
    """The step from which a run resumes, of which nothing is to be reported."""
    checkpoint = choose_checkpoint(str(resume), Checkpoints(run / "checkpoints"), mine, pytest.fail)
    return checkpoint and checkpoint.step


@pytest.mark.smoke
def test_auto_resumes_from_the_newest_or_starts_a_new_run(tmp_path: Path) -> None:
    assert chosen("auto", tmp_path) is None
    save(tmp_path, 1, 2, 30)
    assert chosen("auto", tmp_path) == 30


def test_a_path_names_a_checkpoint_of_another_folder_or_of_this(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a", 10, 20)
    assert chosen(first, tmp_path / "b") == 10
    assert chosen(second.parent / ".." / "checkpoints" / second.name, tmp_path / "a") == 20
    save(tmp_path / "c", 15)
    assert chosen(second, tmp_path / "c") == 20  # further than what this folder has
    save(tmp_path / "d", 20)
    assert chosen(first, tmp_path / "d") == 20, "a run that branched off resumes from its own"


@pytest.mark.parametrize(
    "changed, differing",
    [
        ({"new_flag": "folder"}, r"new_flag \(absent\) there, folder here"),
        ({"new_flag": ""}, ""),
        ({"new_switch": False}, ""),
    ],
)
def test_a_flag_newer_than_the_run_may_stay_off(
    tmp_path: Path, changed: dict, differing: str
) -> None:
    save(tmp_path, 1)
    if not differing:
        assert chosen("auto", tmp_path, MINE | changed) == 1
        return
    with pytest.raises(
        Refused, match=f"belongs to another run: {differing}; give this run another --name"
    ):
        chosen("auto", tmp_path, MINE | changed)


def test_the_average_is_evaluated_and_another_model_is_refused(tmp_path: Path) -> None:
    loaded = nn.Linear(3, 2)
    for step, averages in (
        (1, {}),
        (2, {"ema": {"weight": torch.full((2, 3), 3.0), "bias": torch.zeros(2)}}),
    ):
        files = {"model": {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}} | averages
        load_model(loaded, Checkpoints(tmp_path).save({"step": step}, files))
        assert (loaded.weight == (3.0 if averages else 1.0)).all()
    path = Checkpoints(tmp_path / "other").save(
        {"step": 1}, {"model": nn.Linear(3, 4).state_dict()}
    )
    with pytest.raises(
        Refused, match=r"is of another model: bias \(\(4,\) there, \(2,\) here\), weight"
    ):
        load_model(loaded, path)
    assert (loaded.weight == 3.0).all()
    with pytest.raises(Refused, match="no checkpoint, nothing is there"):
        load_model(loaded, tmp_path / "missing")


def choose_on_ranks(folders: list[Path]) -> str:
    """Each rank sees a run folder of its own: as machines without a shared file system do."""
    try:
        with contextlib.chdir(folders[rank()]):
            found = choose_checkpoint("auto", Checkpoints(Path("checkpoints")), MINE, print)
    except Refused as refusal:
        return str(refusal)
    return str(found and found.step)


def test_machines_resume_only_from_a_checkpoint_that_all_have(processes, tmp_path: Path) -> None:
    first, second, host = tmp_path / "first", tmp_path / "second", socket.gethostname()
    second.mkdir()
    save(first, 1)

    def told(*folders: Path) -> list[str]:
        return processes.run(choose_on_ranks, list(folders), ranks=2)

    lacking = (
        f"checkpoints/step_00000001: {host} does not have the one that {host} resumes from: name "
        "an --output_dir that all"
    )
    assert all(text.startswith(lacking) for text in told(first, second))
    ahead = (
        f"checkpoints: {host} has step_00000001, but {host}, which writes, has none: name an "
        "--output_dir that all"
    )
    assert all(text.startswith(ahead) for text in told(second, first))
    shutil.copytree(first, second, dirs_exist_ok=True)
    assert told(first, second) == ["1"] * 2
    (second / "checkpoints/step_00000001/manifest.json").write_text("{}")
    assert all(text.startswith(lacking) for text in told(first, second)), "another one of that name"
    for folder in (first, second):
        shutil.rmtree(folder / "checkpoints")
    assert told(first, second) == ["None"] * 2
