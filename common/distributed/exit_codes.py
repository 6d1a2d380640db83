"""What do a launcher and its processes leave for each other to read, so that an end on purpose is not taken for a crash?"""

import contextlib
import json
import os
from collections.abc import Collection
from pathlib import Path

LAST_WORD = "RECIPES_LAST_WORD"  # names the folder; set by the launcher, see rendezvous
AT_LEAST = "RECIPES_AT_LEAST"  # how many machines the run needs; set by the launcher
RESUMABLE = 75  # exit code of a run that was asked to stop and saved: EX_TEMPFAIL of sysexits.h, "try again"
RESTART, END = "restart", "end"  # why a launcher ends its processes: to start them again, or to end with them


def leaving(asked: Collection[int], machines: int, least: int) -> list[int]:
    """The machines that leave a run of `machines` when those in `asked` are to: all of them, if fewer than `least` would stay.

    Machine 0 keeps the store over which they meet: without it none stays.
    """
    stays = 0 not in asked and machines - len(asked) >= least
    return sorted(asked) if stays else list(range(machines))


def leave_word(code: int, leavers: Collection[int] = ()) -> None:
    """Tell the launcher that this process ends with `code` on purpose, and which machines leave the run."""
    if folder := os.environ.get(LAST_WORD):
        with contextlib.suppress(OSError):  # the launcher is gone, and its folder
            (Path(folder) / "word").write_text(json.dumps([code, *leavers]))


def read_word(folder: Path) -> tuple[int, list[int]] | None:
    """The code and the leaving machines that a process of this launcher has left, None if none has."""
    word = folder / "word"
    text = word.read_text() if word.exists() else ""
    return (json.loads(text)[0], json.loads(text)[1:]) if text else None


def notify(folder: Path, why: str) -> None:
    """Tell the processes of this launcher why it ends them: RESTART or END."""
    (folder / "notice").write_text(why)


def notice() -> str:
    """Why the launcher ends this process: RESTART or END; empty if it doesn't."""
    with contextlib.suppress(KeyError, OSError):
        return (Path(os.environ[LAST_WORD]) / "notice").read_text()
    return ""


def forget(folder: Path) -> None:
    """Clear both, before new processes start."""
    for name in ("word", "notice"):
        (folder / name).unlink(missing_ok=True)
