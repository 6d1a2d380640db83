"""Accelerate, as of 1.15."""

import sys


def skip_search_for_lomo() -> None:
    """Let Accelerate know that there is no `lomo_optim`, unless it is imported already.

    `AcceleratedOptimizer.step` looks on disk for this package twice, which takes about a
    millisecond of each step.
    """
    sys.modules.setdefault("lomo_optim", None)  # type: ignore[arg-type]
