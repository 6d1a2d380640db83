"""The Horovod API on torch.distributed: `import compat.horovod as hvd` in a script written for Horovod.

compat/aliases/ has the spellings `horovod.torch` and `perseus.torch.horovod`. Names have the
meaning that they have in `horovod.torch` 0.28.1. Nothing is started at import; `init()` does.
"""

import importlib
from typing import Any

from compat.horovod import compression, mpi_ops
from compat.horovod.compression import Compression
from compat.horovod.mpi_ops import *  # noqa: F403

# What training adds to the collectives is imported at its first use.
_LATER = {
    "DistributedOptimizer": "optimizer",
    "SyncBatchNorm": "sync_batch_norm",
    "allgather_object": "functions",
    "broadcast_object": "functions",
    "broadcast_optimizer_state": "functions",
    "broadcast_parameters": "functions",
}
_MODULES = ("elastic", "functions", "optimizer", "sync_batch_norm")

__all__ = [*mpi_ops.__all__, "Compression", "compression", "mpi_ops", *_LATER, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LATER:
        return vars(importlib.import_module(f"{__name__}.{_LATER[name]}"))[name]
    if name == "run":
        raise AttributeError(
            "hvd.run, horovod.run: scripts are started by accelerate launch, torchrun or mpirun, "
            "not by a function; hvd.elastic.run is there"
        )
    raise AttributeError(f"module {__name__} has no attribute {name}")
