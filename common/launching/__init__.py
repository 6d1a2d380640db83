"""Starting and finding processes: launchers, meeting, rendezvous, exit codes, and the checks before a run."""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.launching import launch
    from common.launching.launch import run as run_main

__all__, __getattr__ = export_lazily(__name__)
