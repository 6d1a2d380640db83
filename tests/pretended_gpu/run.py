"""Runs a script unchanged, its kernels computed by the CPU: accelerate launch ... tests/pretended_gpu/run.py SCRIPT words."""

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(words: Sequence[str]) -> None:
    """On pretended GPUs."""
    from tests.pretended_gpu import kernels

    sys.argv = [*words]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as Python itself does for a script
    kernels.setup()
    with kernels.Kernels():
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            # Also if the program has caught the error.
            if (lost := kernels.unknown()) and sys.exc_info()[0] in (None, SystemExit):
                sys.exit(f"{lost} kernels or functions of the GPU were called that nothing computes: see above")


def run_in_fork(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """In a fork, with more variables; on real GPUs, if there are."""
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.path.insert(0, "")
    if "LD_PRELOAD" in os.environ:
        from tests.pretended_gpu import kernels

        kernels.runtime.pretended_read_environment()
        run(words)
    else:
        sys.argv = [*words]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
