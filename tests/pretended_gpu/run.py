"""accelerate launch ... tests/pretended_gpu/run.py SCRIPT words: the script as it is, with kernels that the CPU computes."""

import runpy
import sys

from tests.pretended_gpu import kernels

sys.argv = sys.argv[1:]
kernels.setup()
with kernels.Kernels():
    runpy.run_path(sys.argv[0], run_name="__main__")
