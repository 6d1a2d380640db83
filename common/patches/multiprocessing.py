"""multiprocessing, as of Python 3.11."""

import multiprocessing.queues
from collections.abc import Callable
from typing import Any


def call_on_unsent(function: Callable[[BaseException, Any], None]) -> None:
    """Let queues of this process call `function(error, item)` if an item can't be sent.

    Python prints a traceback and drops the item, so that the receiver would wait for ever. Its hook
    is for subclasses, but torch's data loader makes its queues itself.
    """
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(function)  # type: ignore[attr-defined]
