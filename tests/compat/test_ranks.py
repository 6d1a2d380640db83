"""The Horovod API on three ranks, which are started once and run all cases of the modules beside this one."""

import functools
import json
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import compat.horovod as hvd
from compat.horovod.elastic import VARIABLE, choose_commit_file
from compat.horovod.serialization import dumps, loads
from tests.compat import (
    cases_batch_norm,
    cases_collectives,
    cases_disagreements,
    cases_elastic,
    cases_functions,
    cases_optimizer,
    cases_world,
)
from tests.harness.launching import find_free_port


def list_cases(*modules: ModuleType) -> dict[str, Callable[[], None]]:
    """The functions `test_*` of modules, once for each value where one is parametrized, by module
    and name.
    """
    cases = {}
    for module in modules:
        for name, function in vars(module).items():
            if not name.startswith("test_"):
                continue
            name = (
                f"{module.__name__.removeprefix('tests.compat.cases_')}: "
                f"{name.removeprefix('test_')}"
            )
            marks = getattr(function, "pytestmark", [])
            if not marks:
                cases[name] = function
            for mark in marks:
                for value in mark.args[1]:
                    cases[f"{name}: {value}"] = functools.partial(function, value)
    return cases


IN_ONE_WORLD = list_cases(
    cases_collectives,
    cases_disagreements,
    cases_functions,
    cases_batch_norm,
    cases_optimizer,
    cases_elastic,
)
CASES = IN_ONE_WORLD | list_cases(cases_world)


def run_cases(folder: Path) -> None:
    """On each rank: all cases, and the tracebacks of those that fail in a file of the folder."""
    failures = {}
    hvd.init()
    for name, case in CASES.items():
        if name in IN_ONE_WORLD:
            hvd.barrier()
        torch.manual_seed(0)
        try:
            case()
        except BaseException:
            failures[name] = traceback.format_exc()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(failures))


@pytest.fixture(scope="module")
def failures(forks, tmp_path_factory) -> list[dict[str, str]]:
    """Of each rank, the tracebacks of the cases that failed there, by name."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {"SECOND_PORT": str(find_free_port()), VARIABLE: str(folder / "commits")}
    done = forks.run_main(3, functools.partial(run_cases, folder), environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_a_case_passes_on_every_rank(failures, case: str) -> None:
    texts = [of_rank[case] for of_rank in failures if case in of_rank]
    assert not texts, "\n".join(texts)


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


def test_the_file_of_commits_depends_on_script_and_arguments(monkeypatch, tmp_path) -> None:
    import __main__

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(__main__, "__file__", str(tmp_path / "train.py"), raising=False)
    files = set()
    for argv in (["train.py"], ["train.py", "--lr", "1"], ["train.py", "--lr", "1"]):
        monkeypatch.setattr("sys.argv", argv)
        files.add(choose_commit_file(0))
    assert len(files) == 2 and {path.parent for path in files} == {tmp_path / "train.commits"}
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert choose_commit_file(0).parent == tmp_path != choose_commit_file(1)
    monkeypatch.setenv(VARIABLE, "none")
    assert choose_commit_file(0) is None
