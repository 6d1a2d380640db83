"""Runs a script unchanged, its kernels computed by the CPU: accelerate launch ...
tests/pretended_gpu/run.py SCRIPT words.
"""

import functools
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def run(main: Callable[[], None]) -> None:
    """On pretended GPUs."""
    from tests.pretended_gpu import kernels

    kernels.setup()
    with kernels.Kernels():
        try:
            main()
        finally:
            # Also if the program has caught the error.
            count = kernels.count_unknown()
            if count and sys.exc_info()[0] in (None, SystemExit):
                sys.exit(
                    f"{count} kernels or functions of the GPU were called that nothing computes: "
                    "see above"
                )


def run_script(argv: Sequence[str]) -> None:
    """A script, as Python itself does."""
    sys.argv = list(argv)
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_in_fork(main: Callable[[], None]) -> None:
    """In a fork; on real GPUs, if there are."""
    sys.path.insert(0, "")
    if "LD_PRELOAD" in os.environ:
        from tests.pretended_gpu import kernels

        kernels.runtime.pretended_read_environment()
        run(main)
    else:
        main()


if __name__ == "__main__":
    run(functools.partial(run_script, sys.argv[1:]))
