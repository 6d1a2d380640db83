"""Runs a script unchanged, its kernels computed by the CPU: accelerate launch ... tests/pretended_gpu/run.py SCRIPT words."""

import runpy
import sys
from pathlib import Path

from tests.pretended_gpu import kernels

sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as Python itself does for a script
kernels.setup()
with kernels.Kernels():
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        # Also if the program has caught the error.
        if (lost := kernels.unknown()) and sys.exc_info()[0] in (None, SystemExit):
            sys.exit(f"{lost} kernels or functions of the GPU were called that nothing computes: see above")
