"""A training of two machines, and its comparison with the same training of one process."""

from pathlib import Path

import numpy as np

from tests.harness.launching import add_small_defaults
from tests.harness.outcomes import Outcome

STEPS = 40
WORDS = add_small_defaults(
    "--image_size 16 --global_batch_size 24 --max_micro_batch_size 8 --workers 1 --tracker none "
    f"--max_steps {STEPS} --log_every 1 --eval_every {STEPS} --checkpoint_every {STEPS} --dtype "
    "float64 --batch_norm group --norm_batch_size 4 "
    "--hflip 0.5".split()
)


def assert_same_losses(run: Path, alone: Path, steps: int = STEPS) -> None:
    """Every step is there once, with the loss that one process has in it."""
    several, reference = (Outcome(folder=folder) for folder in (run, alone))
    assert [row["step"] for row in several.rows] == list(range(1, steps + 1))
    np.testing.assert_allclose(
        several.column("train/loss"), reference.column("train/loss"), rtol=1e-8
    )
