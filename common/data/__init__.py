"""From image files to batches on the device, for any task."""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.data.batch_plan import BatchPlan
    from common.data.images import BrokenImage
    from common.data.loader import DeviceBatch, create_eval_loader
    from common.data.source import Source
    from common.data.stream import Stream

__all__, __getattr__ = export_lazily(__name__)
