"""Data workers hand over batches unchanged, end with their process in whatever state, and leave
nothing behind.
"""

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from common.data import workers
from common.data.loader import DeviceBatch, _create_loader
from common.errors import Refused
from tests.harness.launching import ROOT
from tests.harness.processes import list_data_workers

SCRIPT = """
import ctypes, os, signal, sys, time
import torch
from tests.data.test_workers import Asked, Numbers, begin

def batch(what, number):  # the fifth is asked for when the first has come
    if what == "in C" and number == 4:
        ctypes.PyDLL(None).sleep(3600)  # lets no other thread run
    if what == "stopped" and number == 4:
        os.kill(os.getpid(), signal.SIGSTOP)
    return Numbers(torch.arange(8000), "x" * 200_000 if what == "full pipe" else "")

if __name__ == "__main__":
    method, *doing = sys.argv[1:]
    torch.multiprocessing.set_start_method(method)
    loaders = [begin(Asked(batch, what)) for what in doing]
    print("ready", flush=True)
    time.sleep(3600)
"""


@dataclass
class Numbers(DeviceBatch):
    numbers: torch.Tensor
    text: str = ""


@dataclass
class Asked(Dataset):
    batch: Callable[[str, int], DeviceBatch]
    what: str = ""

    def __getitems__(self, indices: list[int]) -> DeviceBatch:
        return self.batch(self.what, indices[0])


def begin(data: Asked):
    batches = iter(_create_loader(data, [[number] for number in range(1000)], 1))
    next(batches)
    return batches


@pytest.mark.parametrize(
    "method, doing", [("fork", ["full pipe", "in C", "stopped"]), ("forkserver", ["full pipe"])]
)
def test_workers_end_with_their_process_when_it_is_killed(tmp_path, method, doing):
    if sys.platform != "linux":
        doing = ["full pipe", ""]  # elsewhere a thread of the worker sees it, if it may run
    script = tmp_path / "script.py"  # a file, since a fork server reads it again
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), method, *doing]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        family = []
        try:
            assert process.stdout.readline() == "ready\n"
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= len(doing)
            process.kill()
            _, alive = psutil.wait_procs(family, 5)
            assert not alive
        finally:
            for each in (process, *family):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def test_a_worker_keeps_no_socket_of_its_process():
    """Only the one that it hands batches over through. Letting go of the others closes no file that
    it opens later.
    """
    near, far = socket.socketpair()

    def count(_: str, number: int) -> Numbers:
        files = [int(name) for name in os.listdir("/dev/fd")[:-1]]
        is_socket = [
            os.path.exists(f"/dev/fd/{file}") and stat.S_ISSOCK(os.fstat(file).st_mode)
            for file in files
        ]
        with open(os.devnull) as file:
            near.close(), far.close()  # as where a worker drops what its process made
            open(os.devnull).close()
            file.read()
        return Numbers(torch.zeros(1), f"{sum(is_socket)} of {number}")

    assert [batch.text for batch in _create_loader(Asked(count), [[0], [1], [2]], 1)] == [
        "1 of 0",
        "1 of 1",
        "1 of 2",
    ]
    near.send(b"as before")
    assert far.recv(9) == b"as before"


def test_a_worker_outlives_the_thread_that_started_it():
    made = []
    thread = threading.Thread(
        target=lambda: made.append(begin(Asked(lambda _, number: Numbers(torch.tensor(number)))))
    )
    thread.start()
    thread.join()
    assert [int(next(made[0]).numbers) for _ in range(20)] == list(range(1, 21))


def test_a_worker_that_hangs_in_its_fork_is_replaced(monkeypatch):
    """Before Python 3.12 a child can inherit a lock of the interpreter without the thread that
    would release it.
    """
    forks = []
    parent = os.getpid()
    monkeypatch.setattr(workers, "_START_TIMEOUT_S", 1.0)

    def hang() -> None:
        if os.getppid() == parent and len(forks) == 1:
            time.sleep(3600)

    os.register_at_fork(
        before=lambda: forks.append("one") if len(forks) < 2 else None, after_in_child=hang
    )
    batches = _create_loader(Asked(lambda _, number: Numbers(torch.tensor(number))), [[0], [1]], 1)
    assert [int(batch.numbers) for batch in batches] == [0, 1] and len(forks) == 2


# ---- handing over


@dataclass
class Batch(DeviceBatch):
    images: torch.Tensor
    targets: list
    nothing: torch.Tensor
    text: int = 0


def batch(_: str, number: int) -> Batch:
    torch.manual_seed(number)
    images = torch.rand(4, 3, 50, 70 + number).contiguous(memory_format=torch.channels_last)
    targets = [
        {
            "boxes": torch.rand(3, 4),
            "masks": torch.rand(2, 300, 300).transpose(1, 2) > 0.5,
            "position": number,
        },
        {
            "boxes": torch.zeros(0, 4),
            "masks": torch.zeros(0, 300, 300, dtype=torch.bool),
            "position": -number,
        },
    ]
    return Batch(images, targets, torch.zeros(0, 3, dtype=torch.int64), number)


def test_batches_come_out_as_they_went_in() -> None:
    loaders = [
        _create_loader(Asked(batch), [[number] for number in range(start, start + 6)], 2)
        for start in (0, 100)
    ]
    kept = [batch for pair in zip(*loaders, strict=True) for batch in pair]
    for actual in kept:  # later ones have taken nothing from earlier ones
        expected = batch("", actual.text)
        torch.testing.assert_close(vars(actual), vars(expected), rtol=0, atol=0)
        assert actual.images.stride() == expected.images.stride()
        actual.images += 1  # it is the process's own
    assert [each.text for each in kept[:4]] == [0, 100, 1, 101]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is handed over in torch's way")
def test_nothing_stays_open_and_no_memory_has_a_name(monkeypatch, tmp_path) -> None:
    """A worker that is killed could not remove them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = {child.pid for child in list_data_workers()}
    batches = iter(_create_loader(Asked(batch), [[number] for number in range(40)], 1))
    kept = next(batches)
    before = len(os.listdir("/dev/fd"))
    for _ in range(30):
        next(batches)
    assert len(os.listdir("/dev/fd")) <= before + 2
    (worker,) = {child.pid for child in list_data_workers()} - others
    mapped = open(f"/proc/{os.getpid()}/maps").read() + open(f"/proc/{worker}/maps").read()
    assert kept and "/memfd:batch" in mapped and "/dev/shm/torch_" not in mapped
    assert not list(tmp_path.iterdir())


def test_a_worker_without_a_batch_is_not_started() -> None:
    """Python's garbage collector would close its queue while torch writes to it, with tracebacks at
    the end of a run.
    """
    assert (
        _create_loader(Asked(batch), [[0], [1]], 4).num_workers == 2
        and _create_loader(Asked(batch), [], 4).num_workers == 0
    )


def test_workers_that_cant_be_started_are_refused_in_one_line(monkeypatch) -> None:
    monkeypatch.setattr(
        DataLoader, "__iter__", MagicMock(side_effect=OSError(30, "Read-only file system"))
    )
    with pytest.raises(
        Refused, match=r"^1 data workers can't be started \(Read-only file system\): .* /dev/shm"
    ):
        iter(_create_loader(Asked(batch), [[0]], 1))
