"""A run: its folder, progress, step reports, log, tracker, plots and shutdown."""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.run.observer import Observer
    from common.run.past_run import PastRun
    from common.run.run import Run

__all__, __getattr__ = export_lazily(__name__)
