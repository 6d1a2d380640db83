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
from common.errors import get_os_reason
from common.files import to_json
from common.run.progress import Progress, of_exported

_NO_RECORD: dict = {"results": {}, "files": {}}


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
        self.path = run / "best"
        self._new = run / ".best.new"  # newly exported
        self._draft = run / ".best.tmp"  # staged for the next checkpoint
        self._old = run / ".best.old"  # where `replace_folder` moves best/
        self._state = state
        self._export = export
        self._say = say
        self._recorded = recorded
        self._results: dict | None = None  # of the newly exported model
        self._is_staged = False
        self._record: dict = _NO_RECORD

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
            run_info = build_run_info(record, self._recorded)
            (self._new / RUN_FILE).write_text(json.dumps(run_info, indent=2) + "\n")
            if hasattr(evaluation, "write_predictions"):
                evaluation.write_predictions(self._new)
        except BaseException:
            remove(self._new)
            raise
        self._results = results

    def stage(self) -> None:
        """Let the next checkpoint record the newly exported model, if any.

        Must not be called while a checkpoint is being written.
        """
        if self._results is not None:
            remove(self._draft)
            self._new.rename(self._draft)
            self._record = {"results": self._results}
            self._is_staged = True
            self._results = None

    def seal(self) -> dict:
        """Sync a staged draft; returns the checkpoint's entry about the best model."""
        if self._is_staged:
            sync_folder(self._draft)
            self._record |= {"files": compute_digests(self._draft)}
        return self._record

    def publish(self) -> None:
        """Replace `best/` by the sealed draft, if there is a new one.

        The checkpoint that records it has been saved.
        """
        if self._is_staged:
            replace_folder(self.path, self._draft)
            self._is_staged = False

    def repair(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """At a start: make `best/` agree with `checkpoint`, or else correct `progress`.

        A damaged `best/` is exported again from the checkpoint of its step; the model then has
        these weights. If that checkpoint is gone, the best model is lost, and the next evaluation
        is the best.
        """
        self._record = checkpoint.record["best"]
        error = self._restore(checkpoint) if progress.best else ""
        for path in (self._new, self._draft, self._old):
            remove(path)
        if not error:
            return
        damage = f"{self.path} is damaged or of another checkpoint ({error})"
        best_checkpoint = checkpoint.path.with_name(f"step_{progress.best['step']:08d}")
        if self._export_again(best_checkpoint, self._record["results"]):
            self._say(f"{damage}: exported again from {best_checkpoint}")
            self.seal()
            self.publish()
            return
        damaged_path = self.path.with_suffix(".damaged")
        if self.path.exists() and not damaged_path.exists():  # keep the first one
            self.path.rename(damaged_path)
        self._say(
            f"{damage}, and {best_checkpoint}, from which it was exported, is gone: the best "
            f"model, {progress.headline(progress.best)}, is lost; best/ will be the best of the "
            "evaluations from now on"
        )
        self._record = _NO_RECORD
        progress.best = {}

    def _restore(self, checkpoint: Checkpoint) -> str:
        """Move the recorded best model to `best/`, from there or beside it. Returns the damage, or ""."""
        errors = []
        # Of the run that this one may branch off from.
        origin_path = checkpoint.path.parent.parent / "best"
        for path in (self.path, self._draft, self._old, origin_path):
            try:
                compare(path, self._record["files"])
            except (Damaged, OSError) as error:
                errors.append(get_os_reason(error))
                continue
            if path != self.path:
                if path != self._draft:
                    remove(self._draft)
                    shutil.copytree(path, self._draft)
                sync_folder(self._draft)
                replace_folder(self.path, self._draft)
            return ""
        return errors[0]

    def _export_again(self, path: Path, results: dict) -> bool:
        """Export the model of a checkpoint; False if that is missing or damaged."""
        try:
            checkpoint = verify(path)
            files = checkpoint.load_tensors()
        except Damaged:
            return False
        model = self._state.get_exported_model(files.get("ema", files["model"]))
        self.export(model, results, checkpoint.record)
        self.stage()
        return True
