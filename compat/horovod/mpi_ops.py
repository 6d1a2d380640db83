"""The names of `horovod.torch.mpi_ops`, for scripts that import from there."""

from compat.horovod import operations, process_sets, world
from compat.horovod.exceptions import HorovodInternalError
from compat.horovod.operations import *  # noqa: F403
from compat.horovod.process_sets import *  # noqa: F403
from compat.horovod.world import *  # noqa: F403

__all__ = ["HorovodInternalError"]
__all__ += world.__all__
__all__ += process_sets.__all__
__all__ += operations.__all__
