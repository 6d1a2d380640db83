"""Agent: uses of torchrun's agent beyond its public interface, and the processes that it has started.

A new release of torch may change any of it; tests/launching/test_agent.py notices.
"""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from common.launching.exit_codes import STOPPING, handle_stopping

ENDING_S = 10.0  # how long processes that are ending may take


def handle_signals(handler: Callable) -> None:
    """Call `handler` for the signals that ask this machine to leave.

    Otherwise torch, which reads its list at each start of processes, would end them at once: at
    SIGHUP even under `nohup`.
    """
    handled = os.environ.get(
        "TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    ).split(",")
    others = {*handled} - {signal.Signals(number).name for number in STOPPING}
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(others) or "SIGQUIT"
    handle_stopping(handler)


def replace_log(tell: Callable[[int, int, int], None]) -> None:
    """Call `tell(exit code, local rank, process)` instead of the log line of a failed process; drop
    those about ending others.

    torch has a file for the reason of a failure, but only a decorated function writes into it, and
    no killed process.
    """

    def keeps(record: logging.LogRecord) -> bool:
        if (
            is_failure := str(record.msg).startswith("failed (exitcode")
            and len(record.args or ()) == 4
        ):
            tell(*record.args[:3])  # type: ignore[index, misc]
        return not is_failure and not str(record.msg).startswith("Sending process")

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(keeps)


def silence_name_lookups() -> None:
    """Silence torch's C++ warnings about addresses without names, here and in the processes; errors
    are still shown.
    """
    if os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":
        name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
        # Torch has already read the variable; ValueError: no such symbol.
        with suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2


def send_signal(number: int) -> None:
    """Send a signal to the processes of this launcher."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            process.send_signal(number)


def await_processes() -> None:
    """Wait for the processes of this launcher, which are ending. If torch ended them, it would
    print messages.
    """
    until = time.monotonic() + ENDING_S
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
                time.sleep(0.02)
