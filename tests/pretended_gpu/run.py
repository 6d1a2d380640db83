"""accelerate launch ... tests/pretended_gpu/run.py SCRIPT words: the script as it is, with kernels that the CPU computes."""

import runpy
import sys
from pathlib import Path

from tests.pretended_gpu import kernels

sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as Python itself does for a script
kernels.setup()
computing = kernels.Kernels()
with computing:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        for what, often in computing.failed.items():
            print(f"no kernel for {what}, {often} times", file=sys.stderr)
