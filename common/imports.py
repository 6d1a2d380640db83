"""Quick imports of timm and Accelerate. Modules that need timm import this module first.

Half of the usual import time is avoidable: Python's garbage collector scans all earlier imports again and again, and timm
imports wandb for a function that the recipes don't call.
"""

import gc
import sys


def _import() -> None:
    if "timm" in sys.modules:
        return
    collects, tracker = gc.isenabled(), "wandb" not in sys.modules
    gc.disable()
    if tracker:
        # timm gets an ImportError; only its `update_summary` needs wandb. common/run/tracking.py imports wandb later.
        sys.modules["wandb"] = None
    try:
        import accelerate  # noqa: F401
        import timm  # noqa: F401
    finally:
        if tracker:
            del sys.modules["wandb"]
        if collects:
            gc.enable()
    # Modules stay for ever, so later collections skip them: they cost no time in a step, and no copied pages in a data worker.
    gc.freeze()


_import()

import timm  # noqa: E402, F401
