"""The Horovod API on 1, 2 and 3 ranks: each number is started once, and runs every case of the modules beside this one."""

import os
import pickle

import pytest
import torch

import compat.horovod as hvd
from compat.horovod.elastic.commits import VARIABLE, folder
from compat.horovod.serialization import dumps, loads
from tests.compat import (
    cases_batch_norm,
    cases_collectives,
    cases_disagreements,
    cases_elastic,
    cases_functions,
    cases_optimizer,
    cases_uneven,
)
from tests.compat.ranks import run_ranks

MODULES = (
    cases_collectives,
    cases_disagreements,
    cases_functions,
    cases_batch_norm,
    cases_optimizer,
    cases_uneven,
    cases_elastic,
)


def every_case(place: str) -> list[str]:
    os.environ[VARIABLE] = place
    hvd.init()
    ran = []
    for module in MODULES:
        for case in module.CASES:
            hvd.barrier()
            torch.manual_seed(0)
            case()
            ran.append(case.__name__)
    hvd.shutdown()
    if len(hvd.global_process_set.ranks) or hvd.is_initialized():
        raise AssertionError("the world has not ended")
    return ran


@pytest.mark.parametrize("size", [2, 3])
def test_every_case(size: int, tmp_path) -> None:
    for ran in run_ranks(size, every_case, str(tmp_path / "commits"), seconds=300):
        assert len(ran) == sum(len(module.CASES) for module in MODULES)


def process_sets() -> None:
    cases_disagreements.process_sets()


def test_process_sets() -> None:
    run_ranks(3, process_sets)


def alone() -> None:
    hvd.init()
    cases_collectives.alone()
    cases_optimizer.equals_one_process()
    hvd.shutdown()


def test_one_process_is_a_world_too() -> None:
    run_ranks(1, alone)


def pairs_of_pairs() -> None:
    hvd.init()
    cases_collectives.adasum()
    hvd.shutdown()


def test_adasum_of_four() -> None:
    run_ranks(4, pairs_of_pairs)


class Attack:
    """What somebody who reaches the port would send."""

    def __reduce__(self) -> tuple:
        return print, ("taken over",)


def test_nothing_that_arrives_runs_code(capsys) -> None:
    with pytest.raises(TypeError, match=r"the message holds .*print.*add_safe_globals"):
        dumps(Attack(), "the message")
    with pytest.raises(pickle.UnpicklingError):
        loads(pickle.dumps(Attack()))
    assert "taken over" not in capsys.readouterr().out


def test_folder_of_commits_depends_on_script_and_arguments(monkeypatch, tmp_path) -> None:
    import __main__

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "train.py"), raising=False)
    folders = set()
    for words in (["train.py"], ["train.py", "--lr", "1"], ["train.py", "--lr", "1"]):
        monkeypatch.setattr("sys.argv", words)
        folders.add(folder())
    assert len(folders) == 2 and {path.parent for path in folders} == {tmp_path / "train.commits"}
    monkeypatch.setenv(VARIABLE, "none")
    assert folder() is None
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert folder() == tmp_path
