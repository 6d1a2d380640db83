"""Best model: exports it to `best/`, and restores a damaged `best/` when a run starts.

It is first exported beside `best/`. The next checkpoint records sizes and hashes of its files, and
only then it replaces `best/`. So `best/` always belongs to the newest checkpoint, and a start can
verify it.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from common.checkpoints.state import TrainingState
from common.checkpoints.store import Checkpoint, Damaged, compare, compute_digests, verify
from common.config.origin import RUN_FILE, build_run_info
from common.durable import remove, replace_folder, sync_folder
from common.files import to_json
from common.run.progress import Progress, of_exported

_NOTHING: dict = {"results": {}, "files": {}}


class Best:
    """The folder `best/` of one run; used only by the main process.

    `export(model, results=..., folder=...)` exports a model into a folder; `say` logs a line.
    `run.json` has the fields `recorded` beside the run's identity.
    """

    def __init__(
        self,
        run: Path,
        state: TrainingState,
        export: Callable[..., None],
        say: Callable[[str], None],
        recorded: Sequence[str] = (),
    ):
        self._recorded = recorded
        self.path, self._old = run / "best", run / ".best.old"
        # Newly exported; chosen for the next checkpoint.
        self._new, self._draft = run / ".best.new", run / ".best.tmp"
        self._state, self._export, self._say = state, export, say
        self._results: dict | None = None  # of the newly exported model
        self._drafted = False
        self._record: dict = _NOTHING

    def export(
        self,
        model: torch.nn.Module,
        results: dict,
        record: dict,
        evaluation: Any = None,
    ) -> None:
        """Export the model beside `best/`. May be called while a checkpoint is being written.

        `record` is the record of a checkpoint of this step. If `evaluation` has predictions, they
        are written, too.
        """
        remove(self._new)
        try:
            self._export(model, results=to_json(of_exported(results)), folder=self._new)
            (self._new / RUN_FILE).write_text(
                json.dumps(build_run_info(record, self._recorded), indent=2) + "\n"
            )
            if hasattr(evaluation, "write_predictions"):
                evaluation.write_predictions(self._new)
        except BaseException:
            remove(self._new)
            raise
        self._results = results

    def take(self) -> None:
        """Let the next checkpoint record the newly exported model, if any. Not while a checkpoint
        is being written.
        """
        if self._results is not None:
            remove(self._draft)
            self._new.rename(self._draft)
            self._record, self._drafted, self._results = {"results": self._results}, True, None

    def seal(self) -> dict:
        """Sync a new draft; returns the checkpoint's entry about the best model."""
        if self._drafted:
            sync_folder(self._draft)
            self._record |= {"files": compute_digests(self._draft)}
        return self._record

    def place(self) -> None:
        """Replace `best/` by the sealed draft, if there is a new one. The checkpoint that records
        it has been saved.
        """
        if self._drafted:
            replace_folder(self.path, self._draft)
            self._drafted = False

    def mend(self, found: Checkpoint, progress: Progress) -> None:
        """At a start: make `best/` agree with the checkpoint `found`, or else correct `progress`.

        A damaged `best/` is exported again from the checkpoint of its step; the model then has
        these weights. If that checkpoint is gone, the best model is lost, and the next evaluation
        is the best.
        """
        self._record = found.record["best"]
        wrong = self._restore(found) if progress.best else ""
        for path in (self._new, self._draft, self._old):
            remove(path)
        if not wrong:
            return
        damage = f"{self.path} is damaged or of another checkpoint ({wrong})"
        checkpoint = found.path.with_name(f"step_{progress.best['step']:08d}")
        if self._export_again(checkpoint, self._record["results"]):
            self._say(f"{damage}: exported again from {checkpoint}")
            self.seal()
            self.place()
            return
        aside = self.path.with_suffix(".damaged")
        if self.path.exists() and not aside.exists():  # keep the first one
            self.path.rename(aside)
        self._say(
            f"{damage}, and {checkpoint}, from which it was exported, is gone: the best model, "
            f"{progress.headline(progress.best)}, is lost; best/ will be the best of the "
            "evaluations from now on"
        )
        self._record, progress.best = _NOTHING, {}

    def _restore(self, found: Checkpoint) -> str:
        """Put the recorded best model, found in or beside `best/`, there. Returns the damage, or ""."""
        wrongs = []
        # Of the run that this one may branch off from.
        of_origin = found.path.parent.parent / "best"
        for place in (self.path, self._draft, self._old, of_origin):
            try:
                compare(place, self._record["files"])
            except (Damaged, OSError) as error:
                wrongs.append(getattr(error, "strerror", None) or str(error))
                continue
            if place != self.path:
                if place != self._draft:
                    remove(self._draft)
                    shutil.copytree(place, self._draft)
                sync_folder(self._draft)
                replace_folder(self.path, self._draft)
            return ""
        return wrongs[0]

    def _export_again(self, checkpoint: Path, results: dict) -> bool:
        """Export the model of a checkpoint; False if that is missing or damaged."""
        try:
            found = verify(checkpoint)
            files = found.load_tensors()
        except Damaged:
            return False
        self.export(
            self._state.get_exported_model(files.get("ema", files["model"])), results, found.record
        )
        self.take()
        return True
