"""The names of `horovod.torch.mpi_ops`, for scripts that import from there: world, process sets and collectives."""

from compat.horovod import gradients, operations, process_sets, world
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.gradients import *  # noqa: F403
from compat.horovod.operations import *  # noqa: F403
from compat.horovod.process_sets import *  # noqa: F403
from compat.horovod.world import *  # noqa: F403

_MODULES = (world, process_sets, operations, gradients)

__all__ = ["HorovodInternalError", *(name for module in _MODULES for name in module.__all__)]
