"""Exit codes: a launcher and its processes tell each other about an intended end, which is no crash.

In a temporary folder of the launcher, processes announce their exit code, and the launcher its
reason for ending them.
"""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

# Variables that the launcher sets: the folder's path, and the number of machines that the run needs.
EXIT_FOLDER = "RECIPES_EXIT_FOLDER"
MIN_MACHINES = "RECIPES_AT_LEAST"
RESUMABLE = 75  # asked to stop, and saved: EX_TEMPFAIL of sysexits.h, "try again"
# They ask a process to stop.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A launcher ends its processes to start them again, or ends as well.
RESTART = "restart"
END = "end"
# Files in the folder.
_ANNOUNCEMENT = "exit"
_NOTICE = "notice"


class ExitAnnouncement(NamedTuple):
    """The exit code that a process intends to end with, and the machines that leave the run."""

    code: int
    leavers: list[int]


def find_leavers(requested: Collection[int], num_machines: int, min_machines: int) -> list[int]:
    """The machines that leave a run of `num_machines` when those in `requested` are asked to.

    All leave if fewer than `min_machines` would stay, or if machine 0 is asked to, since it keeps
    the store.
    """
    if 0 in requested or num_machines - len(requested) < min_machines:
        return list(range(num_machines))
    return sorted(requested)


def announce_exit(code: int, leavers: Collection[int] = ()) -> None:
    """Tell the launcher that this process intends to end with `code`, and which machines leave the run."""
    folder = os.environ.get(EXIT_FOLDER)
    if folder:
        announcement = [code]
        announcement.extend(leavers)
        with contextlib.suppress(OSError):  # the launcher is gone, and its folder
            (Path(folder) / _ANNOUNCEMENT).write_text(json.dumps(announcement))


def read_announced_exit(folder: Path) -> ExitAnnouncement | None:
    """What a process of this launcher has announced with `announce_exit`, or None."""
    file = folder / _ANNOUNCEMENT
    text = file.read_text() if file.exists() else ""
    if not text:
        return None
    code, *leavers = json.loads(text)
    return ExitAnnouncement(code, leavers)


def notify(folder: Path, reason: str) -> None:
    """Tell the processes of this launcher why it ends them.

    The reason is RESTART or END, or what asked the launcher to stop, such as SIGTERM.
    """
    (folder / _NOTICE).write_text(reason)


def read_notice() -> str:
    """The reason that the launcher gave to its processes with `notify`; "" if there is none."""
    with contextlib.suppress(KeyError, OSError):
        return (Path(os.environ[EXIT_FOLDER]) / _NOTICE).read_text()
    return ""


def get_signal_name(signal_number: int) -> str:
    """How messages name a signal: SIGTERM, SIGUSR1 or Ctrl-C."""
    if signal_number == signal.SIGINT:
        return "Ctrl-C"
    return signal.Signals(signal_number).name


def handle_stopping(handler: Callable) -> dict[int, Any]:
    """Call `handler` for the signals that ask to stop; returns the handlers before, by signal.

    Under `nohup`, SIGHUP stays ignored. But torchrun's own agent ends its processes at SIGHUP even
    then, so they save.
    """
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and EXIT_FOLDER not in os.environ
    previous_handlers = {}
    for signal_number in STOPPING:
        is_ignored = signal.getsignal(signal_number) == signal.SIG_IGN
        if is_ignored and signal_number == signal.SIGHUP and not is_torchrun:
            continue
        previous_handlers[int(signal_number)] = signal.signal(signal_number, handler)
    return previous_handlers


def clear_messages(folder: Path) -> None:
    """Remove the messages of both sides, before new processes start."""
    for name in (_ANNOUNCEMENT, _NOTICE):
        (folder / name).unlink(missing_ok=True)
