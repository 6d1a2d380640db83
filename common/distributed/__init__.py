"""What trained code calls: collectives, agreement between processes, the watchdog, deterministic kernels."""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.distributed.collectives import (
        all_or_none,
        all_sum,
        broadcast_object,
        gather_objects,
        gather_to_main,
        is_main,
        rank,
        reduce_dict,
        world_size,
    )

__all__, __getattr__ = export_lazily(__name__)
