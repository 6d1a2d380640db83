"""When one process hangs, fails or sees other data, all processes end soon, and one message says why."""

import math
import os
import re
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from common.run import Observer
from tests.harness.drawings import draw_stripes
from tests.harness.forked import Ended, Fork
from tests.harness.outcomes import read
from tests.harness.resumed import AfterStep
from tests.harness.waiting import Limit
from tests.recipes.copied import copy

GONE_S = 10.0  # it takes 1 to 2 s
PATIENCE = 20  # also on a busy machine longer than any start
WORDS = (
    "--image_size 16 --global_batch_size 24 --max_micro_batch_size 8 --tracker none --workers 1 "
    "--log_every 1 --eval_every 10000 --checkpoint_every 10000 --max_steps 10000"
).split()


def end_all(ranks: list[Fork], seconds: float = PATIENCE + 10) -> list[Ended]:
    """Wait for their ends, at most `seconds` of an idle machine."""
    return [each.end(seconds) for each in ranks]


def await_step(folder: Path, step: int, ranks: list[Fork]) -> None:
    rows = folder / "metrics.jsonl"
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= step):
        assert all(each.process.exitcode is None for each in ranks), [each.end() for each in ranks]
        time.sleep(0.02)


def assert_gone(processes: list[psutil.Process]) -> None:
    limit = Limit(GONE_S)
    while processes and limit.left() > 0:
        _, processes = psutil.wait_procs(processes, 1.0)
    assert not [each for each in processes if each.status() != psutil.STATUS_ZOMBIE]


def read_status(folder: Path) -> dict:
    return read(folder / "status.json")


# Ranks, and the one that hangs.
HANGING = {
    "stopped": (3, 2),
    "stopped where it keeps the store": (2, 0),
    "stuck in reading": (2, 1),
}


@pytest.fixture(scope="module")
def hung(forks, tmp_path_factory) -> dict[str, tuple[list[Fork], list[Ended], Path]]:
    """Runs of which one process hangs, at the same time: its main process is stopped, or its data worker."""
    folder = tmp_path_factory.mktemp("hung")
    argv = WORDS + ["--collective_timeout", PATIENCE, "--output_dir", folder]
    runs = {}
    for name, (count, _) in HANGING.items():
        runs[name] = forks.start_ranks(count, argv + ["--name", name])
    workers = []
    for name, ranks in runs.items():
        await_step(folder / name, 4, ranks)
        for rank, fork in enumerate(ranks):
            process = psutil.Process(fork.process.pid)
            [worker] = process.children()
            workers.append(worker)
            if rank != HANGING[name][1]:
                continue
            if "reading" in name:
                worker.suspend()
            else:
                process.suspend()
    outcomes = {name: (ranks, end_all(ranks), folder / name) for name, ranks in runs.items()}
    assert_gone(workers)
    return outcomes


@pytest.mark.parametrize("name", HANGING)
def test_a_process_that_hangs_is_named_and_all_end(hung, name):
    """As stopped by a debugger or a dying machine; its step and its stack are said."""
    ranks, ended, folder = hung[name]
    count, guilty = HANGING[name]
    codes = [1] * count
    if "stopped" in name:
        codes[guilty] = -signal.SIGKILL
    assert [rank.code for rank in ended] == codes, ended
    stderr = "".join(each.stderr for each in ended)
    who = f"cls.py: rank {guilty} (process {ranks[guilty].process.pid} on {os.uname().nodename})"
    assert stderr.count("cls.py: ") == stderr.count(who) == 1, stderr
    if "stopped" in name:
        assert (
            "gives no sign of life, it is stopped or its machine hangs; its last was step" in stderr
        )
        assert int(re.search(r"stands? at step (\d+)", stderr)[1]) >= 4
    else:
        assert re.search(
            r"keeps the others waiting: step \d+, waiting for data\n.* is at\n", stderr
        ), stderr
    assert f"No progress for {PATIENCE} s (--collective_timeout): all processes end" in stderr
    status = read_status(folder)
    assert status["status"] == "failed" and status["cause"] in stderr
    assert f"rank {guilty}" in status["cause"]


class Raise(Observer):
    def on_end_step(self, run, step) -> None:
        if step == 5:
            raise ValueError("of my own")


@dataclass
class SpoilWeights(Observer):
    """Makes weights not a number from the sample at `position` on."""

    position: int

    def on_prepare(self, model, train_set, compute_losses) -> None:
        self.weights = next(model.parameters())

    @torch.no_grad()
    def on_micro_batch(self, step, batch) -> None:
        if self.position in batch.positions:
            self.weights.fill_(math.nan)


def kill_the_worker(run) -> None:
    psutil.Process().children()[0].kill()


def use_up_descriptors(run) -> None:
    free = os.dup(0)  # the lowest one
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))  # one, to write its last word


NOT_FINITE = "step 3: the loss of the samples at positions 66, 67, 68, 69, 70, 71 is not finite"
# What happens to rank 1, words of the command, the message of that process, and the cause that
# programs read.
FAULTS = {
    "an exception": (Raise(), [], "ValueError: of my own", "rank 1: ValueError: of my own"),
    "not a number": (
        SpoilWeights(66),
        ["--checkpoint_every", 1],
        f"cls.py: {NOT_FINITE}",
        NOT_FINITE,
    ),
    # It depends on what the worker was doing whether torch or the pipe to it notices first.
    "a dead worker": (AfterStep(kill_the_worker, 2), [], " worker ", "rank 1: RuntimeError: "),
    "no file descriptor left": (
        AfterStep(use_up_descriptors, 2),
        ["--workers", 2, "--image_size", 64],
        "Too many open files",
        "rank 1: ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_of_one_rank_ends_all_and_is_the_cause(forks, tmp_path, fault):
    """None of them waits for its time to run out."""
    observer, flags, message, cause = FAULTS[fault]
    argv = WORDS + ["--output_dir", tmp_path, "--name", "run"] + flags
    ended = end_all(forks.start_ranks(2, argv, observers={1: observer}), 60)
    first, second = ended
    status = read_status(tmp_path / "run")
    assert status["status"] == "failed", (status, first.stderr)
    assert status["cause"].startswith(cause), (status, first.stderr)
    if message.startswith("cls.py: "):
        assert first.code == second.code == 2
        assert message in first.stderr, ended
        assert message not in second.stderr, "a refusal is printed once per machine"
        checkpoints = (tmp_path / "run/checkpoints").glob("step_*")
        assert max(path.name for path in checkpoints) < "step_00000003"
    else:
        assert first.code == second.code == 1
        assert message in second.stderr, ended
        host = os.uname().nodename
        assert f"on rank 1 ({host})" in second.stderr and "Traceback" not in first.stderr
        assert f"cls.py: rank 0 ({host}) lost another process: see its message" in first.stderr


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_takes_its_workers_and_peers_along(forks, tmp_path, victim):
    """As its workers wait to hand over the next batches."""
    flags = "--model test_vit --drop_path 0.1 --random_erasing 0.3 --mixup 0.2"
    sizes = "--global_batch_size 32 --image_size 64 --workers 2"
    argv = WORDS + flags.split() + sizes.split() + ["--output_dir", tmp_path, "--name", "run"]
    ranks = forks.start_ranks(2, argv)
    await_step(tmp_path / "run", 6, ranks)
    family = [psutil.Process(each.process.pid) for each in ranks]
    family += [worker for each in family for worker in each.children()]
    assert len(family) == 6
    ranks[victim].process.kill()
    survivor = ranks[1 - victim].end(GONE_S)
    assert_gone(family)
    if victim == 1:
        assert survivor.code == 1
        assert "lost another process" in survivor.stderr, survivor.stderr
    status = read_status(tmp_path / "run")
    assert (status["status"], status["cause"]) == ("resumable", "the loss of another process")


OTHER_DATA = """The second rank reads another folder, as where machines have copies of their own.
@@ main
+        config.data += "_of_another_time" * run.accelerator.process_index
         train_data, val_data = build_data(config, run.weights)
"""


def test_a_process_that_sees_other_data_is_refused_by_name(forks, tmp_path):
    recipe = copy(tmp_path / "cls.py", OTHER_DATA)
    for number, data in enumerate(("data", "data_of_another_time")):
        draw_stripes(tmp_path / data, (8, 7 + number))
    argv = WORDS + ["--output_dir", tmp_path / "runs", "--data", tmp_path / "data"]
    ended = end_all(forks.start_ranks(2, argv, recipe=recipe), 60)
    assert [each.code for each in ended] == [2, 2]
    [message] = [each.stderr for each in ended if "cls.py: " in each.stderr]  # once per machine
    assert "cls.py: data differs between ranks: " in message
    assert f"on rank 1 ({os.uname().nodename})" in message
    assert not list((tmp_path / "runs").iterdir())
