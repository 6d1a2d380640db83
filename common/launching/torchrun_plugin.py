"""Plugin of torchrun, also used by `accelerate launch`: registers the rendezvous backend `machines`."""

import os
from collections.abc import Callable


def backend() -> Callable:
    """Return the function that makes the rendezvous handler `machines`: the entry point in pyproject.toml."""
    # A store that outlives the processes keeps the addresses of dead ones, and a late process would
    # connect to these. torch reads the variable in every launcher; its own c10d rendezvous needs it
    # too.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return _create


def _create(parameters):
    # Late: it imports the torch module that loads plugins.
    from common.launching.rendezvous import create

    return create(parameters)
