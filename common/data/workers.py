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
_PATIENCE = 5.0  # seconds to wait for a killed worker to end, which a dead network drive may prevent
_UP_S = 30.0  # seconds for a forked process to reach its first line, which takes some milliseconds


class _Worker(multiprocessing.context.ForkProcess):
    """A forked process that runs when `start` returns.

    Before Python 3.12 a forked process can hang for ever, if a thread of torch held a lock of the interpreter at that moment.
    Such a child never reaches its first line, and is replaced.
    """

    _up: tuple[int, int]  # a pipe: the end to read from, and the end that the child writes to

    @staticmethod
    def _Popen(process_obj):
        process_obj._up = os.pipe()
        try:
            while True:
                child = multiprocessing.context.ForkProcess._Popen(process_obj)
                if wait([process_obj._up[0], child.sentinel], _UP_S):
                    return child
                child.kill()
                child.wait()
                child.close()
        finally:
            for end in process_obj._up:
                os.close(end)

    def run(self) -> None:
        os.write(self._up[1], b"u")
        for end in self._up:
            os.close(end)
        super().run()


class _Forks(multiprocessing.context.ForkContext):
    Process = _Worker


def context() -> multiprocessing.context.BaseContext | None:
    """The context that data workers are started with; None if torch's own choice does not fork."""
    return _Forks() if multiprocessing.get_start_method() == "fork" else None


def begin(kept: int) -> None:
    """Prepare a data worker; called first in it. `kept` is the descriptor of the socket that it needs."""
    end_with_parent()
    _let_go_of_sockets(kept)
    # A signal to the whole process group is meant for the training process, which needs its workers until it has saved.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """From now on this process is killed when its parent ends, in whatever way.

    On Linux the system does it. Elsewhere, or if a fork server is the parent, a thread does it, for workers of
    multiprocessing only; it has to wait for C code that does not let other threads run.
    """
    # To Linux, the parent is a thread: if it is not the main thread, it may end earlier, and its workers would end with it.
    if sys.platform == "linux" and threading.main_thread().name == "MainThread":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if parent := multiprocessing.parent_process():  # covers a parent that had ended before prctl was called
        threading.Thread(target=lambda: wait([parent.sentinel]) and os._exit(1), name="parent", daemon=True).start()


def end() -> None:
    """Kill the data workers of this process: they have nothing to save. Called in the main thread."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise for each of them
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    for child in children:
        child.join(_PATIENCE)
    signal.signal(signal.SIGCHLD, handler)


def _let_go_of_sockets(kept: int) -> None:
    """Release the inherited sockets except `kept`: otherwise their peers would not see the parent end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # the list itself was a file
            number = int(name)
            if number not in (0, 1, 2, kept) and stat.S_ISSOCK(os.fstat(number).st_mode):
                # Replaced, not closed: a new file would get the number, and the socket's owner would close it.
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
