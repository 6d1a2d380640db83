"""Start and end of a data worker: it ends with its process at the latest."""

import contextlib
import ctypes
import multiprocessing.context
import os
import signal
import stat
import sys
import threading
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process is sent when its parent ends
_PATIENCE = 5.0  # seconds for a killed worker to be gone: one that waits for a dead network drive may never be
_UP_S = 30.0  # for a fork to get to its first line, which takes some milliseconds


class _Worker(multiprocessing.context.ForkProcess):
    """A forked process that is up when `start` returns.

    Python before 3.12 can hang in a fork for ever, if a thread of torch held a lock of the interpreter at that moment: the fork
    has the lock, but not the thread that would let go of it. Such a child never gets to its first line, and is replaced.
    """

    _up: tuple[int, int]  # of a pipe: the end that is read, and the end that the child writes to

    @staticmethod
    def _Popen(process: "_Worker"):
        process._up = os.pipe()
        try:
            while True:
                child = multiprocessing.context.ForkProcess._Popen(process)
                if wait([process._up[0], child.sentinel], _UP_S):
                    return child
                child.kill()
                child.wait()
                child.close()
        finally:
            for end in process._up:
                os.close(end)

    def run(self) -> None:
        os.write(self._up[1], b"u")
        for end in self._up:
            os.close(end)
        super().run()


class _Forks(multiprocessing.context.ForkContext):
    Process = _Worker


def context() -> multiprocessing.context.BaseContext | None:
    """What data workers are started with: None for torch's own choice, where that does not fork."""
    return _Forks() if multiprocessing.get_start_method() == "fork" else None


def begin(kept: int) -> None:
    """What a data worker does first. `kept`: the one socket that it needs."""
    end_with_parent()
    _let_go_of_sockets(kept)
    # A signal to the whole process group is for the training process, which still needs its workers to save and stop.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """From now on this process is killed when its parent ends, in whatever way and whatever this one is doing then.

    On Linux by the system. Elsewhere, or where a fork server is the parent, a thread does it, for workers of multiprocessing
    alone; it has to wait for code in C that does not let other threads run.
    """
    # The system's parent is a thread: one beside the main thread may end, and its workers would go with it.
    if sys.platform == "linux" and threading.main_thread().name == "MainThread":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if parent := multiprocessing.parent_process():  # also where it had ended before the system was told
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), name="parent", daemon=True).start()


def end() -> None:
    """End the data workers of this process at once: they have nothing to save. For the main thread."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would raise for each of them
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(_PATIENCE)
    signal.signal(signal.SIGCHLD, handler)


def _let_go_of_sockets(kept: int) -> None:
    """All but one of those that a fork has inherited: while one is open here, its other end misses the end of the parent."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the list itself was a file
            number = int(name)
            if number not in (0, 1, 2, kept) and stat.S_ISSOCK(os.fstat(number).st_mode):
                # Not closed: the number would be given to a new file, and what is left here of the socket's owner close that.
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
