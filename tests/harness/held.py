"""Runs a recipe whose first start waits at a step until it is asked to stop, so that it does not matter when a signal comes.

    python tests/harness/held.py recipes/cls.py ...

The environment gives the step as HELD_AT. Each rank that waits writes a file with its number to the folder HELD_IN.
"""

import os
import runpy
import sys
from pathlib import Path

from common.run.run import Run
from tests.harness.resumed import after_step
from tests.harness.waiting import Limit


def hold(step: int, sign: Path) -> None:
    """Let this process wait when it has done `step`, having written the file `sign`."""

    def wait(run: Run) -> None:
        sign.touch()
        for _ in Limit(150).turns():
            if run._ending.requested_by:
                return
        raise AssertionError("nobody has asked this process to stop")

    after_step(wait, step, once_written=False)


if __name__ == "__main__":
    sign = Path(os.environ["HELD_IN"]) / os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if not sign.exists():
        hold(int(os.environ["HELD_AT"]), sign)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
