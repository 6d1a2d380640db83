"""wandb, as of 0.31."""

import contextlib
import sys


def drop_exit_hook() -> None:
    """Remove W&B's exit hook, which would wait for a hanging service. The service ends with this
    process by itself.
    """
    with contextlib.suppress(Exception):  # not imported, not started, or another version of W&B
        sys.modules["wandb.sdk.wandb_setup"]._singleton.assert_service()._cleanup()
