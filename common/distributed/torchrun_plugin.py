"""How do `accelerate launch` and torchrun get to know the rendezvous of these recipes?"""

import os
from collections.abc import Callable


def backend() -> Callable:
    """What torchrun asks of a plugin (pyproject.toml): a function that makes the rendezvous handler called `machines`."""
    # A store that outlives the processes keeps the addresses of dead ones, and who comes late connects to these. torch
    # reads this in every launcher; its own c10d rendezvous needs it as well.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return _create


def _create(parameters):
    from common.distributed.rendezvous import create  # late: it imports what is loading the plugins at this moment

    return create(parameters)
