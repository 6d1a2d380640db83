"""The Horovod API on three ranks, which are started once and run all cases of the modules beside this one."""

import functools
import pickle
import traceback
from pathlib import Path

import pytest
import torch

import compat.horovod as hvd
from compat.horovod.elastic import VARIABLE, commit_file
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
from tests.harness.launching import free_port

CASES = (
    *(*cases_collectives.CASES, *cases_disagreements.CASES, *cases_functions.CASES),
    *(*cases_batch_norm.CASES, *cases_optimizer.CASES, *cases_elastic.CASES),
)


def every_case() -> None:
    failed = []

    def run(case) -> None:
        torch.manual_seed(0)
        try:
            case()
        except BaseException:
            failed.append(traceback.format_exc())

    hvd.init()
    for case in CASES:
        hvd.barrier()
        run(case)
    hvd.shutdown()
    assert not hvd.global_process_set.ranks and not hvd.is_initialized()
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    assert "pt_gloo_runloop" not in names  # one that still held a tensor would abort Python's end
    for case in cases_world.CASES:
        run(case)
    if failed:
        raise AssertionError("\n".join(failed))
    print("every case passed")


def test_every_case(forks, tmp_path) -> None:
    environment = {"SECOND_PORT": str(free_port()), VARIABLE: str(tmp_path / "commits")}
    done = forks.run_main(3, functools.partial(every_case), environment, timeout=300)
    assert done.returncode == 0 and done.stdout.count("every case passed") == 3, done.stderr


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
    for words in (["train.py"], ["train.py", "--lr", "1"], ["train.py", "--lr", "1"]):
        monkeypatch.setattr("sys.argv", words)
        files.add(commit_file(0))
    assert len(files) == 2 and {path.parent for path in files} == {tmp_path / "train.commits"}
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert commit_file(0).parent == tmp_path != commit_file(1)
    monkeypatch.setenv(VARIABLE, "none")
    assert commit_file(0) is None
