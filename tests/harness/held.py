"""Runs a recipe whose first start waits at a step until it is asked to stop, so that it does not
matter when a signal comes.

    python tests/harness/held.py recipes/cls.py ...

The environment gives the step as HELD_AT. Each rank that waits writes a file with its number to the
folder HELD_IN.
"""

import os
import sys
from pathlib import Path

from common.run import Run
from tests.harness.resumed import AfterStep
from tests.harness.several import load_recipe, run_observed
from tests.harness.waiting import Limit


def wait(run: Run) -> None:
    sign.touch()
    for _ in Limit(150).turns():
        if run._ending.requested_by:
            return
    raise AssertionError("nobody has asked this process to stop")


if __name__ == "__main__":
    sign = Path(os.environ["HELD_IN"]) / os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    observer = (
        None if sign.exists() else AfterStep(wait, int(os.environ["HELD_AT"]), once_written=False)
    )
    sys.argv = sys.argv[1:]
    run_observed(load_recipe(Path(sys.argv[0])), observer)
