"""Checkpoints: state of a training run, saved durably and resumed."""

from typing import TYPE_CHECKING

from common.imports import face

if TYPE_CHECKING:
    from common.checkpoints.store import Checkpoints, Damaged, compare, verify

__all__, __getattr__ = face(__name__)
