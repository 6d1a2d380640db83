"""Time limits that grow with the machine's load, and the end of processes that exceed theirs."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator

import psutil

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_DUMP = 20.0  # seconds that processes get to write their stacks


class Limit:
    """A time limit that grows with the machine's load.

    It counts seconds of a machine with nothing else to do: while twice as many processes want to
    run as there are cores, a second counts for half. So a slow start is not taken for one that
    hangs, which leaves the cores idle.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()
        self._asked = time.monotonic()
        self._spent = 0.0

    def left(self) -> float:
        """Seconds left. The load of the last minute counts, so ask every few seconds."""
        reading = time.monotonic()
        self._spent += (reading - self._asked) / max(1.0, os.getloadavg()[0] / _CORES)
        self._asked = reading
        return self.seconds - self._spent

    def turns(self, pause: float = 0.01) -> Iterator[float]:
        """Seconds left, again and again, `pause` seconds apart, while there are any."""
        left = self.left()
        while left > 0:
            yield left
            time.sleep(pause)
            left = self.left()

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s of an idle machine ({time.monotonic() - self._began:.0f} s of "
            "this one)"
        )


def end_with_stacks(processes: Iterable[psutil.Process]) -> None:
    """Kill processes that hang, and their descendants. Each first writes the stacks of its threads
    to its standard error.

    For that it needs Python's faulthandler, such as by PYTHONFAULTHANDLER=1 in its environment.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        heads = list(processes)
        family = set()
        for head in heads:
            family |= set(head.children(recursive=True))
        if family:  # a launcher that sees a rank end would kill the others before they have written
            for head in heads:
                head.suspend()
        for generation in (list(family - set(heads)), heads):
            for process in generation:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGABRT)
                    process.resume()
            psutil.wait_procs(generation, _DUMP)
        for process in heads + list(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
