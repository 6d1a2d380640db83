"""Imports timm and Accelerate without what makes it slow; modules that need timm import this one first.

Half of the time is no import: Python's garbage collector walks again and again through what was imported before, and timm
imports wandb for a function that recipes don't call.
"""

import gc
import sys


def _import() -> None:
    if "timm" in sys.modules:
        return
    collects, tracker = gc.isenabled(), "wandb" not in sys.modules
    gc.disable()
    if tracker:
        # An ImportError to timm, whose `update_summary` can't write to W&B then; common/run/tracking.py imports it later.
        sys.modules["wandb"] = None
    try:
        import accelerate  # noqa: F401
        import timm  # noqa: F401
    finally:
        if tracker:
            del sys.modules["wandb"]
        if collects:
            gc.enable()
    # What is imported stays: no collection looks at it again, in no step, and none copies it into a data worker.
    gc.freeze()


_import()

import timm  # noqa: E402, F401
