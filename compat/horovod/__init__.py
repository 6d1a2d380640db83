"""The Horovod API on torch.distributed: `import compat.horovod as hvd` in a script written for Horovod.

`import compat.horovod.torch as hvd` gives the same module. The names and their meaning are those of `horovod.torch` 0.28.1.
Nothing is started at import; `init()` does.
"""

from compat.horovod import compression, mpi_ops
from compat.horovod.compression import Compression
from compat.horovod.mpi_ops import *  # noqa: F403

__all__ = [*mpi_ops.__all__, "Compression", "compression", "mpi_ops"]

# TEMPORARY until the modules of the other branch are here; then plain imports.
_LATER = {
    "DistributedOptimizer": "optimizer",
    "SyncBatchNorm": "sync_batch_norm",
    "broadcast_parameters": "functions",
    "broadcast_optimizer_state": "functions",
    "broadcast_object": "functions",
    "allgather_object": "functions",
}


def __getattr__(name):
    import importlib

    if name in ("elastic", "functions", "optimizer", "sync_batch_norm"):
        return importlib.import_module(f"compat.horovod.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(f"compat.horovod.{_LATER[name]}"), name)
    raise AttributeError(name)
