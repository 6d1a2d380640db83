"""Images in shards, tars or Parquet, local or at URLs: an index of where each image lies, and
ranges of bytes.
"""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.shards.entries import KeptColumns
    from common.shards.source import Shards, share_blocks
    from common.shards.splits import open_sources, open_splits, open_unlabelled

__all__, __getattr__ = export_lazily(__name__)
