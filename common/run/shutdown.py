"""Shutdown: status, results and report at the end of a start, and the micro-batch for the next."""

import contextlib
import shutil
from pathlib import Path

import torch

from common.checkpoints.writer import Writer
from common.config.fields import RunConfig
from common.data.batch_plan import BatchPlan
from common.distributed.collectives import gather_objects, is_lost_peer, is_main, rank
from common.errors import Refused, RestartNeeded, get_line
from common.run import micro_batch, plots, report
from common.run.folder import RunFolder, read_json, write_status, writing
from common.run.progress import Progress
from common.run.records import Records


class Shutdown:
    """The end of one start in the run folder `path`. Only the main process has a `folder`."""

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        folder: RunFolder | None,
        records: Records,
        writer: Writer,
    ):
        self._config = config
        self._path = path
        self._folder = folder
        self._records = records
        self._log = records.log
        self._writer = writer
        self._in_order = False  # whether this start ended without an error
        self.has_audit = True  # whether tools.audit can look for wrong labels in the data

    def leave_no_trace(self) -> None:
        """Remove the run folder after a refused start, if this start has created it."""
        if self._folder and self._folder.fresh and not self._folder.lost:
            shutil.rmtree(self._path, ignore_errors=True)

    def take_less(self, plan: BatchPlan, device: torch.device) -> Exception:
        """Save half the micro-batch for the next start, as this rank is out of memory.

        Returns the exception to raise.
        """
        try:
            smaller = micro_batch.halve(plan)
            with writing(self._path):  # without it, every next start would fail in the same way
                micro_batch.save_limit(self._path, smaller, device)
        except Refused as refusal:
            return refusal
        text = (
            f"out of memory with {plan.micro_batch_sizes[0]} samples at once, from now on at most "
            f"{smaller.max_micro_batch_size}"
        )
        if getattr(self._config, "batch_norm", "") == "local":
            text += " (with --batch_norm local this changes the result)"
        return RestartNeeded(text)

    def decide_outcome(
        self, stopped: bool, requested_by: str, error: BaseException | None
    ) -> tuple[str, str]:
        """Status and cause for status.json.

        `requested_by` is what asked this process to stop, "" if nothing did. A collective if
        `stopped`, which is the same on all ranks.
        """
        progress = self._records.progress
        self._in_order = stopped or error is None
        if stopped:
            causes = dict.fromkeys(cause for cause in gather_objects(requested_by) if cause)
            return "resumable", ", ".join(causes)
        if error is None:
            return "finished", progress.ended_by
        cause = get_line(error)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            if requested_by:
                cause = requested_by
            if not is_main():  # so that the main process knows, see `is_left`
                with contextlib.suppress(OSError):
                    write_status(self._path, "resumable", progress.step, cause)
            return "resumable", cause
        if is_lost_peer(error):
            cause = "the loss of another process"
            # The main one may be lost.
            if not is_main() and not read_json(self._path / "status.json").get("cause"):
                with contextlib.suppress(OSError):
                    write_status(self._path, "resumable", progress.step, cause)
            return "resumable", cause
        status = "resumable" if isinstance(error, RestartNeeded) else "failed"
        # The others only learn that this process is gone.
        if not is_main() and not isinstance(error, Refused):
            kind = "" if isinstance(error, RestartNeeded) else f"{type(error).__name__}: "
            with contextlib.suppress(OSError):
                write_status(self._path, status, progress.step, f"rank {rank()}: {kind}{cause}")
        return status, cause

    def is_left(self) -> bool:
        """Whether another process has left the run by itself, and was not killed."""
        return read_json(self._path / "status.json").get("status") == "resumable"

    def finish(self, status: str, cause: str, goes_on: bool) -> None:
        """Finish on the main process: the last checkpoint, log, status, results and report.

        Does nothing except on the main process. `goes_on`: the launcher starts this process again.
        """
        if not self._folder:
            return
        say = self._log.say
        progress = self._records.progress
        dashboard = ""
        page = None
        try:
            self._writer.wait()
        except Exception as error:  # not in a run that ends well: all ranks have waited already
            if not self._folder.lost:
                say(f"the last checkpoint could not be written: {error}")
        if self._folder.lost:  # an error, however the run would have ended
            self._log.close(1, patience=5.0)
            self._folder.check()
        try:
            self._log.flush()
            self._log.summary(self._records.summary())
            # At once: launchers kill a process 30 s after they have asked it to stop.
            if status == "resumable":
                self._write_status(self._folder, status, cause)
            if self._in_order:
                self._records.draw("curves", plots.curves, self._path)
            patience = 30.0 if status == "finished" else 5.0
            is_uploaded = self._config.wandb_artifact and status == "finished" and progress.best
            model = self._path / "best" if is_uploaded else None
            dashboard = self._log.close(int(status == "failed"), patience, model)
            if status != "resumable":
                self._write_status(self._folder, status, cause)
            page = None if self._config.dry_run else self._report()
        except OSError as error:
            say(f"{self._path}: status and results could not be written: {error}")
        if status == "resumable":
            what = (
                "the run resumes from there"
                if goes_on
                else "the same command resumes from the last checkpoint"
            )
            say(f"stopped by {cause} at step {progress.step}: {what}")
        elif self._config.dry_run and status == "finished":
            say(
                "dry run: steps, an evaluation, and a checkpoint written, verified and loaded; "
                "nothing was kept"
            )
        elif status == "finished":
            self._say_results(progress, dashboard, page)

    def _write_status(self, folder: RunFolder, status: str, cause: str) -> None:
        step = self._records.progress.step
        # By a rank that was lost.
        is_explained = bool(read_json(self._path / "status.json").get("cause"))
        if status != "resumable" or not is_explained:
            folder.status(status, step, cause)
        if status == "failed":
            folder.log(f"failed at step {step}: {cause}")

    def _report(self) -> Path | None:
        try:
            return report.write(self._path)
        except Exception as error:  # a page is not worth a run
            self._log.say(
                f"{self._path / report.FILE} could not be written: {type(error).__name__}: {error}"
            )
            return None

    def _say_results(self, progress: Progress, dashboard: str, page: Path | None) -> None:
        config = self._config
        path = self._path
        rows = {"finished": f"{progress.step:,} steps in {progress.seconds:.0f} s of training"}
        if progress.ended_by:
            rows["finished"] += f", ended by {progress.ended_by}"
        if progress.best:
            rows["best"] = (
                f"{progress.headline(progress.best)} at step {progress.best['step']}: "
                f"{path / 'best'}"
            )
            rows["last"] = f"{progress.headline(progress.last)} at step {progress.last['step']}"
            num_images = progress.last.get("eval/count")  # a recipe's own results need not have it
            if num_images is not None:
                rows["last"] += f", on {num_images:,} images"
        if page:
            rows["report"] = str(page)
        if dashboard:
            rows[config.tracker] = dashboard
        flag = progress.ended_by_flag
        if not flag:
            flag = "max_steps" if config.max_steps else "epochs"
        rows["longer"] = (
            f"the same command with --{flag} {2 * getattr(config, flag):g} continues this run"
        )
        if self.has_audit:
            rows["audit"] = f"python -m tools.audit {path} looks for wrong labels"
        self._log.table(rows)
