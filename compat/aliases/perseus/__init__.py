"""`perseus`, a vendor's edition of Horovod (AIACC), under its own names: PYTHONPATH=compat/aliases.

`perseus.torch.horovod` is compat.horovod; `perseus.torch.distributed` and `perseus.torch.nn` are
torch's own.
"""

import os
import sys
from typing import Any

if os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0" and (
    names := sorted(name for name in os.environ if name.startswith("PERSEUS_"))
):
    print(f"{', '.join(names)}: no effect here; NCCL's own variables (NCCL_*) tune it", file=sys.stderr)


def __getattr__(name: str) -> Any:
    if name == "use_perseus":
        raise AttributeError(
            "perseus.use_perseus is not needed: import perseus.torch.horovod, or DistributedDataParallel from torch"
        )
    raise AttributeError(f"module perseus has no attribute {name}")
