"""When one process hangs, fails or sees other data, all processes end soon, and one message says why."""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import resource
import signal
import threading
import time
from pathlib import Path

import psutil

from tests.harness.drawings import draw_stripes
from tests.harness.forked import Ended, Fork
from tests.harness.waiting import Limit

GONE_S = 10.0  # it takes 1 to 2 s
PATIENCE = 30  # also on a busy machine longer than any start
WORDS = (
    *("--image_size", 16, "--global_batch_size", 24, "--max_micro_batch_size", 8, "--tracker", "none", "--workers", 1),
    *("--log_every", 1, "--eval_every", 10_000, "--checkpoint_every", 10_000, "--max_steps", 10_000),
)


def ends(ranks: list[Fork], seconds: float = PATIENCE + 10) -> list[Ended]:
    """How they end, within that time of an idle machine."""
    return [each.end(seconds) for each in ranks]


def until_step(folder: Path, step: int, ranks: list[Fork]) -> None:
    rows = folder / "metrics.jsonl"
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= step):
        assert all(each.process.exitcode is None for each in ranks), [each.end() for each in ranks]
        time.sleep(0.02)


def assert_gone(processes: list[psutil.Process]) -> None:
    limit = Limit(GONE_S)
    while processes and (left := limit.left()) > 0:
        _, processes = psutil.wait_procs(processes, min(left, 1.0))
    assert not [each for each in processes if each.status() != psutil.STATUS_ZOMBIE]


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def on_rank(number: int, change, rank: int) -> None:
    """For `before`: change something on that rank alone."""
    if rank == number:
        change()


def hang_in_data() -> None:
    from common.classification.batches import TrainDataset

    read = TrainDataset.__getitems__

    def wait_for_ever(samples, positions):
        if positions[0] > 240:
            threading.Event().wait()
        return read(samples, positions)

    TrainDataset.__getitems__ = wait_for_ever


def fail_in_a_step(error: Exception) -> None:
    from common.run.run import Run

    steps = Run.steps

    def fail(run):
        for step in steps(run):
            if step == 5:
                raise error
            yield step

    Run.steps = fail


def see_other_data() -> None:
    from recipes import cls

    build = cls.build_data
    cls.build_data = lambda config, _: build(dataclasses.replace(config, data=f"{config.data}_of_another_time"))


def make_a_loss_nan() -> None:
    from recipes import cls

    build, calls = cls.build_loss, itertools.count()

    def build_spoilt(*arguments):
        losses = build(*arguments)
        # The trial and DDP's warm-up make the first three calls.
        return lambda logits, targets: losses(logits, targets) * (math.nan if next(calls) == 3 + 5 else 1.0)

    cls.build_loss = build_spoilt


def before_the_sixth_batch(change) -> None:
    from common.data.loader import Prefetcher

    take, calls = Prefetcher.__next__, itertools.count()

    def change_and_take(feed):
        if next(calls) == 5:
            change()
        return take(feed)

    Prefetcher.__next__ = change_and_take


def kill_the_worker() -> None:
    psutil.Process().children()[0].kill()


def use_up_descriptors() -> None:
    free = os.dup(0)  # the lowest one
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, free + 1))  # one, to write its last word


def test_a_process_that_hangs_is_named_with_where_it_stands_and_all_end(forks, tmp_path):
    """Stopped, as by a debugger or a dying machine; stopped where it keeps the store; stuck in reading."""
    words = (*WORDS, "--collective_timeout", PATIENCE, "--output_dir", tmp_path)
    hang = functools.partial(on_rank, 1, hang_in_data)
    runs = {
        "stopped": forks.start_ranks(3, *words, "--name", "stopped"),
        "first": forks.start_ranks(2, *words, "--name", "first"),
        "stuck": forks.start_ranks(2, *words, "--name", "stuck", before=hang),
    }
    hanging = {"stopped": 2, "first": 0, "stuck": 1}
    for name, ranks in runs.items():
        until_step(tmp_path / name, 4, ranks)
        if name != "stuck":
            os.kill(ranks[hanging[name]].process.pid, signal.SIGSTOP)
    family = {rank.process.pid for ranks in runs.values() for rank in ranks}
    workers = [worker for process in family for worker in psutil.Process(process).children()]
    assert len(workers) == len(family)
    for name, ranks in runs.items():
        guilty = hanging[name]
        ended = ends(ranks)
        assert [each.code for each in ended] == [
            -signal.SIGKILL if rank == guilty and name != "stuck" else 1 for rank in range(len(ranks))
        ], (name, ended)
        said = "".join(each.stderr for each in ended)
        who = f"cls.py: rank {guilty} (process {ranks[guilty].process.pid} on {os.uname().nodename})"
        assert said.count("cls.py: ") == said.count(who) == 1, (name, said)
        if name == "stuck":
            assert re.search(r"keeps the others waiting: step \d+, waiting for data\n.* is at\n", said), said
        else:
            assert "gives no sign of life, it is stopped or its machine hangs; its last was step" in said
            assert int(re.search(r"stands? at step (\d+)", said)[1]) >= 4
        assert f"No progress for {PATIENCE} s (--collective_timeout): all processes end" in said
        assert status(tmp_path / name)["status"] == "failed"
        assert status(tmp_path / name)["cause"] in said and f"rank {guilty}" in status(tmp_path / name)["cause"]
    assert_gone(workers)


CASES = {  # the fault on rank 1, words of the command, the message of that process, and the cause that programs read
    "an exception": (
        functools.partial(fail_in_a_step, ValueError("of my own")),
        (),
        "ValueError: of my own",
        "rank 1: ValueError: of my own",
    ),
    "not a number": (
        make_a_loss_nan,
        ("--checkpoint_every", 1),
        "cls.py: step 3: the loss of the samples at positions 66, 67, 68, 69, 70, 71 is not finite",
        "step 3: the loss of the samples at positions 66, 67, 68, 69, 70, 71 is not finite",
    ),
    # It depends on what the worker was doing whether torch or the pipe to it notices first.
    "a dead worker": (
        functools.partial(before_the_sixth_batch, kill_the_worker),
        (),
        " worker ",
        "rank 1: RuntimeError: ",
    ),
    "no file descriptor left": (
        functools.partial(before_the_sixth_batch, use_up_descriptors),
        ("--workers", 2, "--image_size", 64),
        "Too many open files",
        "rank 1: ",
    ),
}


def test_a_failure_of_one_process_ends_all_at_once_and_is_the_cause(forks, tmp_path):
    """None of them waits for its time to run out."""
    for name, (change, words, said, cause) in CASES.items():
        words = (*WORDS, "--output_dir", tmp_path, "--name", name, *words)
        first, second = ended = ends(forks.start_ranks(2, *words, before=functools.partial(on_rank, 1, change)), 60)
        assert first.code == second.code == (2 if said.startswith("cls.py: ") else 1), name
        assert said in (second.stderr if first.code == 1 else first.stderr), (name, ended)
        assert status(tmp_path / name)["status"] == "failed"
        assert status(tmp_path / name)["cause"].startswith(cause), (name, first.stderr)
        if name == "not a number":
            assert max(path.name for path in (tmp_path / name / "checkpoints").glob("step_*")) < "step_00000003"
        if first.code == 1:
            host = os.uname().nodename
            assert f"on rank 1 ({host})" in second.stderr and "Traceback" not in first.stderr
            assert f"cls.py: rank 0 ({host}) lost another process: see its message" in first.stderr
        else:
            assert said not in second.stderr, "a refusal is printed once per machine"


def test_a_killed_process_takes_its_workers_along_and_the_others_end_at_once(forks, tmp_path):
    """The first and the last one, as their workers wait to hand over the next batches."""
    words = (*WORDS, "--model", "test_vit", "--drop_path", 0.1, "--random_erasing", 0.3, "--mixup", 0.2)
    words += ("--global_batch_size", 32, "--image_size", 64, "--output_dir", tmp_path, "--workers", 2)
    for victim in (0, 1):
        ranks = forks.start_ranks(2, *words, "--name", victim)
        until_step(tmp_path / str(victim), 6, ranks)
        family = [psutil.Process(each.process.pid) for each in ranks]
        family += [worker for each in family for worker in each.children()]
        assert len(family) == 6
        ranks[victim].process.kill()
        other = ranks[1 - victim].end(GONE_S)
        assert_gone(family)
        assert (other.code == 1 and "lost another process" in other.stderr) or victim == 0, other.stderr
        found = status(tmp_path / str(victim))
        assert (found["status"], found["cause"]) == ("resumable", "the loss of another process"), victim


def test_a_process_that_sees_other_data_is_refused_by_name(forks, tmp_path):
    for number, data in enumerate(("data", "data_of_another_time")):
        draw_stripes(tmp_path / data, (8, 7 + number))
    words = (*WORDS, "--output_dir", tmp_path / "runs", "--data", tmp_path / "data")
    ended = ends(forks.start_ranks(2, *words, before=functools.partial(on_rank, 1, see_other_data)), 60)
    assert [each.code for each in ended] == [2, 2]
    [said] = [each.stderr for each in ended if "cls.py: " in each.stderr]  # once per machine
    assert "cls.py: data differs between ranks: " in said and f"on rank 1 ({os.uname().nodename})" in said
    assert not list((tmp_path / "runs").iterdir())
