"""Files that nobody should read, and a guard that notices what reads them all the same."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path


class TooLong(BaseException):
    """Not an Exception, which code under test may take for a fault of the file."""


@contextlib.contextmanager
def bounded(seconds: float = 30, megabytes: int = 1024) -> Iterator[None]:
    """The block neither takes longer nor gets more memory than this; a FIFO would block it, a
    device fill the machine.
    """

    def end(*_) -> None:
        raise TooLong(f"no end within {seconds} s")

    statm = Path("/proc/self/statm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, end)
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def link_to_fifo(path: Path) -> None:
    os.mkfifo(path.parent / ".pipe")
    path.symlink_to(".pipe")


def write_huge(path: Path) -> None:
    """2**40 bytes that take no room on the disk."""
    path.touch()
    os.truncate(path, 2**40)


class Malicious:
    """Its pickle makes the folder `marker` when it is read."""

    def __init__(self, marker: Path | str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)
