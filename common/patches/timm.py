"""timm, as of 1.0.31."""

import functools
import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def import_timm() -> ModuleType:
    """timm, imported quickly together with Accelerate if it is not imported yet. Modules that need
    timm call this first.

    Half of timm's usual import time is avoidable: Python's garbage collector scans all earlier
    imports again and again, and timm imports wandb for a function that the recipes don't call.
    """
    if "timm" in sys.modules:
        return sys.modules["timm"]
    collects = gc.isenabled()
    hides_wandb = "wandb" not in sys.modules
    gc.disable()
    if hides_wandb:
        # timm gets an ImportError; only its `update_summary` needs wandb. common/run/tracking.py
        # imports wandb later.
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        import accelerate  # noqa: F401
        import timm
    finally:
        if hides_wandb:
            del sys.modules["wandb"]
        if collects:
            gc.enable()
    # Modules stay for ever, so later collections skip them: they cost no time in a step, and no
    # copied pages in a data worker.
    gc.freeze()
    return timm


def orthogonalize_shards(gather: Callable[[Any], Any], cut: Callable[[Any, Any], Any]) -> None:
    """Let Muon orthogonalise whole matrices where it holds shards, as its update depends on the whole matrix.

    `gather(matrix)` is the whole matrix, and `cut(whole, matrix)` the part of a whole matrix that
    `matrix` is of its own; both leave a matrix alone that is not in shards. timm's optimizer offers
    no hook between its momentum and its update.
    """
    from timm.optim import muon

    plain = muon.zeropower_via_newtonschulz
    if hasattr(plain, "__wrapped__"):  # by an earlier call
        return

    @functools.wraps(plain)
    def orthogonalize(matrix: Any, *arguments: Any, **options: Any) -> Any:
        return cut(plain(gather(matrix), *arguments, **options), matrix)

    muon.zeropower_via_newtonschulz = orthogonalize
