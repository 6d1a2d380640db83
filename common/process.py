"""What a process finds when it starts: standard streams, a home. A missing or broken one never ends it."""

import atexit
import getpass
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def guard_streams() -> None:
    """Make all writes to standard output and standard error succeed.

    Also in cron, behind `| head`, on a full disk and in ASCII. This covers also what tqdm, W&B,
    warnings and argparse print, and Python itself when it exits.

    - A stream that is closed writes to nowhere. No other file gets its number, so C code can't
      write into that file.
    - A stream whose reader, disk or terminal is gone writes to nowhere from then on.
    - Characters that its encoding lacks are escaped.
    """
    for file_descriptor in range(3):
        try:
            os.fstat(file_descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w")
            setattr(sys, name, stream)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        for method_name in ("write", "flush"):
            setattr(stream, method_name, _guard(stream, getattr(stream, method_name)))


def drop_output(stream: Any) -> None:
    """Let `stream` write to nowhere.

    This covers what follows, what is still in its buffer, and what child processes print.
    """
    with suppress(OSError, ValueError, AttributeError):  # it has no file
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def ensure_home() -> None:
    """Give this process and its children a user's name and a home, if the system knows neither.

    So it is in some containers. Libraries fail without them, or write into a folder named `~`.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # no entry in /etc/passwd
        os.environ["USER"] = f"uid{os.getuid()}"
    if os.path.expanduser("~") != "~":
        return
    # The launcher of `machines` makes one for all its processes. Others that share a temporary
    # folder can't know its name.
    os.environ["HOME"] = tempfile.mkdtemp(prefix="home-")
    atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)


def _guard(stream: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of `stream`, without its errors."""

    def guarded(*args: Any) -> Any:
        try:
            return method(*args)
        except (BlockingIOError, RuntimeError):
            # A slow terminal; a signal's handler prints while this prints.
            return None
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            drop_output(stream)
            is_broken_pipe = isinstance(error, BrokenPipeError)
            if stream is sys.stdout and isinstance(error, OSError) and not is_broken_pipe:
                message = f"standard output can't be written, the rest of it is lost: {error}"
                print(message, file=sys.stderr)
            return None

    return guarded
