"""Checkpoints: state of a training run, saved durably and resumed."""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.checkpoints.store import Checkpoints, Damaged, compare, verify

__all__, __getattr__ = export_lazily(__name__)
