"""Agent: uses of torchrun's agent beyond its public interface, and the processes that it has started.

A new release of torch may change any of it; tests/launching/test_agent.py notices.
"""

import ctypes
import logging
import os
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
    torch_signals = os.environ.get(
        "TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    )
    remaining = set(torch_signals.split(","))
    for signal_number in STOPPING:
        remaining.discard(signal_number.name)
    if not remaining:
        remaining.add("SIGQUIT")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(remaining)
    handle_stopping(handler)


def replace_log(report: Callable[[int, int, int], None]) -> None:
    """Call `report(exit code, local rank, process)` instead of torch's log line of a failed process.

    Its lines about ending the other processes are dropped. torch has a file for the reason of a
    failure, but only a decorated function writes into it, and no killed process.
    """

    def should_log(record: logging.LogRecord) -> bool:
        text = str(record.msg)
        if text.startswith("failed (exitcode") and record.args and len(record.args) == 4:
            exit_code, local_rank, process_id, _ = record.args
            report(exit_code, local_rank, process_id)  # type: ignore[arg-type]
            return False
        return not text.startswith("Sending process")

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(should_log)


def silence_name_lookups() -> None:
    """Silence torch's C++ warnings about addresses without names, here and in the processes.

    Errors are still shown.
    """
    if os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR") != "ERROR":
        return
    library_name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
    # Torch has already read the variable; ValueError: no such symbol.
    with suppress(OSError, ValueError):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / library_name))
        ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2


def send_signal(signal_number: int) -> None:
    """Send a signal to the processes of this launcher."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            process.send_signal(signal_number)


def await_processes() -> None:
    """Wait for the processes of this launcher, which are ending.

    If torch ended them, it would print messages.
    """
    deadline = time.monotonic() + ENDING_S
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.02)
