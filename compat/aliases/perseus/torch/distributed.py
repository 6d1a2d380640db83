"""`perseus.torch.distributed`: torch.distributed, and the local rank."""

from typing import Any

import torch.distributed as dist
from torch.distributed import *  # noqa: F403
from torch.distributed import get_node_local_rank as get_local_rank  # noqa: F401


def __getattr__(name: str) -> Any:
    return getattr(dist, name)


def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:  # type: ignore[no-redef]
    """torch's; the backend "perseus" is NCCL and gloo."""
    dist.init_process_group(None if backend == "perseus" else backend, *args, **options)
