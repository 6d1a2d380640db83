"""Data workers end with their process, whatever they are doing, and nobody waits for sockets that they have inherited."""

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import ctypes, os, signal, socket, stat, sys, threading, time
from dataclasses import dataclass
import torch
from common.data.loader import DeviceBatch, _loader

@dataclass
class Numbers(DeviceBatch):
    numbers: torch.Tensor
    text: str = ""

@dataclass
class Data(torch.utils.data.Dataset):  # its fifth batch is asked for when the first has come
    what: str
    def __getitems__(self, places):
        if self.what == "in C" and places[0] == 4:
            ctypes.PyDLL(None).sleep(3600)  # lets no other thread run
        if self.what == "stopped" and places[0] == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        return Numbers(torch.arange(8000) + places[0], "x" * 200_000 if self.what == "full pipe" else "")

def begin(what):
    batches = iter(_loader(Data(what), [[number] for number in range(1000)], 1))
    next(batches)
    return batches

if __name__ == "__main__":
    {}
"""
KILLED = """
    torch.multiprocessing.set_start_method(sys.argv[1])
    loaders = [begin(what) for what in sys.argv[2:]]
    print("ready", flush=True)
    time.sleep(3600)
"""
HUNG = """
    from common.data import workers as data_workers
    data_workers._UP_S, forks = 1.0, []
    hang = lambda: len(forks) == 1 and time.sleep(3600)
    os.register_at_fork(before=lambda: forks.append("one"), after_in_child=hang)
    print([int(batch.numbers[0]) for batch in _loader(Data(""), [[0], [1]], 1)], len(forks))
"""
SHARED = """
    near, far = socket.socketpair()
    class Counted(Data):
        def __getitems__(self, places):
            files = [int(name) for name in os.listdir("/dev/fd")[:-1]]
            sockets = [file for file in files if os.path.exists(f"/dev/fd/{file}") and stat.S_ISSOCK(os.fstat(file).st_mode)]
            with open(os.devnull) as file:
                near.close(), far.close()  # as where a worker drops what its process made
                open(os.devnull).close()
                file.read()
            return Numbers(torch.zeros(1), " ".join(map(str, sockets)))
    counts = [len(batch.text.split()) for batch in _loader(Counted(""), [[0]] * 5, 1)]
    near.send(b"as before")

    made = []
    thread = threading.Thread(target=lambda: made.append(begin("")))
    thread.start()
    thread.join()
    last = [int(next(made[0]).numbers[0]) for _ in range(20)][-1]
    print(counts, far.recv(9).decode(), last)
"""
REPLACED = """
    import psutil
    from common.launching import launch
    from common.errors import RestartNeeded
    def main():
        if "again" in sys.orig_argv:
            return print([child.name() for child in psutil.Process().children()])
        kept = begin("full pipe")
        sys.orig_argv.append("again")
        raise RestartNeeded("once more")
    launch.run(main)
"""


def python(folder: Path, script: str, *words: str) -> list[str]:
    file = folder / "script.py"
    file.write_text(SCRIPT.replace("{}", script.strip()))
    return [sys.executable, str(file), *words]


def printed(folder: Path, script: str) -> str:
    done = subprocess.run(python(folder, script), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("method, doing", [("fork", ["full pipe", "in C", "stopped"]), ("forkserver", ["full pipe"])])
def test_workers_end_with_their_process_when_it_is_killed(tmp_path, method, doing):
    if sys.platform != "linux":
        doing = ["full pipe", ""]  # elsewhere a thread of the worker sees it, if it may run
    with subprocess.Popen(python(tmp_path, KILLED, method, *doing), stdout=subprocess.PIPE, text=True) as process:
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


def test_a_worker_keeps_no_socket_and_outlives_the_thread_that_started_it(tmp_path):
    """Of its process's: the one that it has is for what it hands over. Letting go of them closes no other file."""
    assert printed(tmp_path, SHARED) == f"{[1] * 5} as before 20"


def test_a_process_that_is_replaced_leaves_no_worker_to_its_successor(tmp_path):
    assert printed(tmp_path, REPLACED) == "[]"


def test_a_worker_that_hangs_in_its_fork_is_replaced(tmp_path):
    assert printed(tmp_path, HUNG) == "[0, 1] 2"
