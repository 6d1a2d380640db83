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
from typing import Any

# Variables that the launcher sets: the folder's path, and the number of machines that the run
# needs.
EXIT_FOLDER, MIN_MACHINES = "RECIPES_EXIT_FOLDER", "RECIPES_AT_LEAST"
RESUMABLE = 75  # asked to stop, and saved: EX_TEMPFAIL of sysexits.h, "try again"
# They ask a process to stop.
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A launcher ends its processes to start them again, or ends as well.
RESTART, END = "restart", "end"
_ANNOUNCEMENT, _NOTICE = "exit", "notice"  # files in the folder


def find_leavers(asked: Collection[int], machines: int, least: int) -> list[int]:
    """The machines that leave a run of `machines` when those in `asked` are asked to: all, if fewer
    than `least` would stay.

    Also all if machine 0 is asked to, since it keeps the store.
    """
    stays = 0 not in asked and machines - len(asked) >= least
    return sorted(asked) if stays else list(range(machines))


def announce_exit(code: int, leavers: Collection[int] = ()) -> None:
    """Tell the launcher that this process intends to end with `code`, and which machines leave the run."""
    if folder := os.environ.get(EXIT_FOLDER):
        with contextlib.suppress(OSError):  # the launcher is gone, and its folder
            (Path(folder) / _ANNOUNCEMENT).write_text(json.dumps([code, *leavers]))


def read_announced_exit(folder: Path) -> tuple[int, list[int]] | None:
    """The exit code and the leaving machines that a process of this launcher has announced, or None."""
    file = folder / _ANNOUNCEMENT
    text = file.read_text() if file.exists() else ""
    return (json.loads(text)[0], json.loads(text)[1:]) if text else None


def notify(folder: Path, why: str) -> None:
    """Tell the processes of this launcher why it ends them: RESTART or END, or what asked it to
    stop, such as SIGTERM.
    """
    (folder / _NOTICE).write_text(why)


def read_notice() -> str:
    """The text that the launcher has told its processes with `notify`; "" if there is none."""
    with contextlib.suppress(KeyError, OSError):
        return (Path(os.environ[EXIT_FOLDER]) / _NOTICE).read_text()
    return ""


def get_signal_name(number: int) -> str:
    """How messages name a signal: SIGTERM, SIGUSR1 or Ctrl-C."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def handle_stopping(handler: Callable) -> dict[int, Any]:
    """Call `handler` for the signals that ask to stop; returns the handlers before, by signal.

    Under `nohup`, SIGHUP stays ignored. But torchrun's own agent ends its processes at SIGHUP even
    then, so they save.
    """
    is_torchs = "TORCHELASTIC_RUN_ID" in os.environ and EXIT_FOLDER not in os.environ
    handlers = {}
    for number in STOPPING:
        if number != signal.SIGHUP or is_torchs or signal.getsignal(number) != signal.SIG_IGN:
            handlers[int(number)] = signal.signal(number, handler)
    return handlers


def clear_messages(folder: Path) -> None:
    """Remove the messages of both sides, before new processes start."""
    for name in (_ANNOUNCEMENT, _NOTICE):
        (folder / name).unlink(missing_ok=True)
