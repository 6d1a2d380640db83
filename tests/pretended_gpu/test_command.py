"""`make gpu` works: the real program, run on pretended GPUs."""

import json
import sys

import psutil
import pytest

from tests.gpu.checks import CHECKS
from tests.harness.launching import ROOT

THROUGH = ("--quick", "--through", "tests/pretended_gpu/run.py")


def check(gpus, tmp_path, *words, devices=1, timeout=6000):
    """Runs the command; returns the ended process, the states of its rows by name, and its file."""
    env, file = gpus.environment | {"PRETENDED_GPUS": str(devices)}, tmp_path / "gpu.json"
    words = ["-m", "tests.gpu", *THROUGH, "--seconds", timeout, "--output", file, *words]
    done = gpus.launch.start_python(*words, env=env).finish(timeout + 60)
    report = json.loads(file.read_text()) if file.exists() else {"rows": []}
    return done, {row["check"]: row["state"] for row in report["rows"]}, report


def words_of(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def test_one_check_makes_a_row_and_a_file_that_names_nobody(gpus, tmp_path):
    done, states, report = check(gpus, tmp_path, "--only", "memory at the peak")
    assert done.returncode == 0 and states == {"memory at the peak": "ok"}, f"{done.stdout}\n{done.stderr}"
    assert "1 x Pretended GPU, 16 GiB" in done.stdout and "1 ok, 0 FAILED, 0 not run" in done.stdout
    assert report["machine"]["gpus"] == ["Pretended GPU"] and report["machine"]["commit"]
    text = json.dumps(report)
    assert str(tmp_path) not in text and str(ROOT) not in text and sys.prefix not in text


def test_without_a_gpu_it_says_what_it_needs(gpus, tmp_path):
    done, states, _ = check(gpus, tmp_path, devices=0)
    assert (done.returncode, done.stdout, states) == (2, "", {})
    assert done.stderr == "make gpu needs a GPU that torch sees: look at nvidia-smi and CUDA_VISIBLE_DEVICES\n"


@pytest.mark.long
def test_an_interrupt_ends_all_of_its_processes(gpus, tmp_path):
    """So does the time limit of a check."""
    env = gpus.environment | {"PRETENDED_GPUS": "1"}
    started = gpus.launch.start_python("-m", "tests.gpu", *THROUGH, "--only", "cls demo fp32", env=env)
    process = psutil.Process(started.process.pid)
    while not (ranks := [each for each in process.children(recursive=True) if "recipes/cls.py" in words_of(each)]):
        assert started.process.poll() is None, started.stderr.read_text()
    family = process.children(recursive=True)
    process.terminate()
    assert started.finish().returncode == 130
    assert len(ranks) and not psutil.wait_procs(family, 30)[1]

    done, states, report = check(gpus, tmp_path, "--only", "cls demo fp32", timeout=40)
    assert done.returncode == 1 and states == {"cls demo fp32": "FAILED"}
    assert "no end within 5 s" in report["rows"][0]["told"]


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_the_whole_of_it_works(gpus, tmp_path, devices):
    done, states, _ = check(gpus, tmp_path, devices=devices)
    missing = {"nccl"} if devices == 1 else set()
    print(done.stdout)
    assert list(states) == [check.name for check in CHECKS]
    assert {name: state for name, state in states.items() if state != "ok"} == dict.fromkeys(missing, "not run"), (
        done.stdout
    )
    assert done.returncode == 0
