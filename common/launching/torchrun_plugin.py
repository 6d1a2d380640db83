"""Plugin of torchrun, also used by `accelerate launch`: registers the rendezvous backend `machines`."""

import os
import re
import sys
from collections.abc import Callable


def backend() -> Callable:
    """The entry point in pyproject.toml: returns the function that makes the rendezvous handler `machines`."""
    # A store that outlives the processes keeps the addresses of dead ones, and a late process would connect to these. torch
    # reads the variable in every launcher; its own c10d rendezvous needs it too.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    _name_a_busy_port()
    return _create


def _create(parameters):
    from common.launching.rendezvous import create  # late: it imports the torch module that loads plugins

    return create(parameters)


def _name_a_busy_port() -> None:
    """Let a launcher whose port is taken, with torchrun's own rendezvous, end with one line instead of a traceback."""
    otherwise = sys.excepthook

    def hook(kind, error, trace) -> None:
        port = re.search(r"port: (\d+)", str(error)) if "EADDRINUSE" in str(error) else None
        if port is None or not kind.__module__.startswith("torch"):
            otherwise(kind, error, trace)
        else:
            way_out = (
                "give another --master_port, or --rdzv_backend machines --rdzv_endpoint localhost:0 for any free one"
            )
            print(f"torchrun: port {port[1]} of this machine is taken: {way_out}", file=sys.stderr)

    sys.excepthook = hook
