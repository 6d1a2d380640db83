"""Tracking: sends rows, results and plots to a dashboard (W&B or TensorBoard), without affecting the run.

The record of the run is `metrics.jsonl`; the dashboard only shows it. So everything that a tracker
does (import, login, network, disk) happens in a daemon thread behind a queue. Training only puts
rows into the queue. A failing tracker is logged once, and training continues.
"""

import importlib.util
import json
import math
import os
import queue
import re
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import TensorBoardTracker, WandBTracker

from common.errors import Refused, get_line
from common.patches.wandb import drop_exit_hook

PACKAGES = {"wandb": ("wandb",), "tensorboard": ("tensorboard", "tensorboardX"), "none": ()}
# Calls that wait while a tracker starts or hangs: a few MB, hours at a usual `log_every`.
MAX_WAITING = 10_000
# Then W&B works offline; shorter than the next, so that a short run keeps its rows.
INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0
UPLOAD_TIMEOUT_S = 240  # of a model; less than the 300 s that torchrun waits for other machines
LOG_HEADER_BYTES = 7  # at the beginning of W&B's files
# Rows are written to the disk so often; by default W&B does after 15 s, TensorBoard after 120 s.
FLUSH_S = 1


def require(kind: str) -> None:
    """Raise `Refused` if the package of the tracker `kind` is missing."""
    if PACKAGES[kind] and not any(importlib.util.find_spec(package) for package in PACKAGES[kind]):
        raise Refused(
            f"tracker {kind} isn't installed: pip install {PACKAGES[kind][0]}, or choose "
            "--tracker none"
        )


class Tracker:
    """Sends rows, results and plots to a tracker, without waiting for it or failing with it.

    Only the main process has one. Values are plain numbers and texts. The thread starts with
    `begin` or with the first thing to send, since its imports would slow down the first step. Call
    `finish` in a `finally` block: W&B's own exit hook can wait minutes for a missing network.

    Args:
        kind: "wandb", "tensorboard" or "none".
        folder: The run folder; the tracker's files go below it, and its name is the run's.
        config: The run's complete config; W&B's `project`, `tags`, `wandb_entity` and so on are
            taken from it.
        run_id: The attribute of that name of an earlier start, whose W&B run is continued.
        rows: Rows of metrics.jsonl, `{"step": 1, ...}`, that the run resumes after; those that the
            tracker lacks are sent.
        say: Logs one line; also called from the tracker's thread.
    """

    def __init__(
        self,
        kind: str,
        *,
        folder: Path,
        config: Mapping[str, Any],
        run_id: str | None = None,
        rows: Sequence[Mapping[str, Any]] = (),
        say: Callable[[str], None] = print,
    ):
        is_id = isinstance(run_id, str) and re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII)
        self.run_id = run_id if is_id else secrets.token_hex(4)
        self._kind = kind
        self._say = say
        self._step = 0
        self._where = ""
        self._failed = False
        self._calls: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if kind != "none":
            backend = {"wandb": _WandB, "tensorboard": _TensorBoard}[kind]
            resumed_at = rows[-1]["step"] if rows else 0
            arguments = (folder, dict(config), self.run_id, resumed_at, say)
            self._thread = threading.Thread(
                target=self._serve, args=(backend, arguments, rows), name="tracker", daemon=True
            )

    def begin(self) -> None:
        """Start the tracker, unless it has started. Takes microseconds."""
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one row. Takes microseconds, whatever state the tracker is in."""
        self._step = step
        row = dict(metrics)
        self._put(lambda backend: backend.log(step, row), step)

    def summary(self, values: Mapping[str, float | int | str]) -> None:
        """Queue the run's results, for the table of runs."""
        results = dict(values)
        self._put(lambda backend: backend.summary(results))

    def images(self, step: int, pictures: Mapping[str, Path | Callable]) -> None:
        """Queue image files of `step`, and functions that make tables; TensorBoard has none.

        They are called in the thread, and give the names of columns, then rows that begin with an
        image.
        """
        files = dict(pictures)
        self._put(lambda backend: backend.images(step, files), step)

    def where(self) -> str:
        """The URL, or a folder and the command that shows or uploads it; "" if there is none yet."""
        return self._where

    def finish(
        self,
        exit_code: int = 0,
        timeout_s: float = FINISH_TIMEOUT_S,
        model: Path | None = None,
    ) -> None:
        """Send everything in the queue and close the run; gives up after `timeout_s` seconds.

        An `exit_code` other than 0 marks a W&B run as failed. `model` is the folder of the best
        model, to be uploaded to W&B. That may take `UPLOAD_TIMEOUT_S` more; if it fails, a line
        says so.
        """
        self.begin()
        uploads: list[None] = []
        if self._kind != "wandb":
            model = None
        if model:
            timeout_s += UPLOAD_TIMEOUT_S
            self._calls.put(lambda backend: uploads.append(backend.upload(model)))
        self._calls.put(lambda backend: backend.finish(exit_code))
        self._calls.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._fail(f"not done {timeout_s:g} s after the end")
        if model and not uploads:
            self._say(
                f"{model} was not uploaded to W&B: `wandb artifact put --type model {model}` does"
            )

    def _put(self, call: Callable[["_Backend"], None], step: float = math.inf) -> None:
        """Queue a call; one about a `step` that the tracker has from a killed start is left out."""
        self.begin()
        if self._thread is None or not self._thread.is_alive():
            return
        if self._calls.qsize() >= MAX_WAITING:
            self._fail(f"it hangs, rows from step {self._step} on are left out")
            return

        def call_if_new(backend: "_Backend") -> None:
            if step > backend.last_step:
                call(backend)

        self._calls.put(call_if_new)

    def _serve(
        self, start: Callable[..., "_Backend"], arguments: tuple, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        try:
            backend = start(*arguments)
            for row in rows:  # a start that was killed may not have sent them
                if row["step"] > backend.last_step:
                    metrics = {key: value for key, value in row.items() if key != "step"}
                    backend.log(row["step"], metrics)
        except Exception as error:  # no failure of a tracker may reach the training
            return self._fail(get_line(error))
        self._where = backend.where
        while call := self._calls.get():
            try:
                call(backend)
            except Exception as error:
                self._fail(get_line(error))

    def _fail(self, reason: str) -> None:
        if self._kind == "wandb":
            drop_exit_hook()
        if not self._failed:
            self._failed = True
            self._say(
                f"{self._kind} failed ({reason:.200}): training continues, metrics.jsonl has every row"
            )


class _WandB:
    """W&B by Accelerate's tracker: online with credentials and a server, else offline.

    Making one starts it, in the thread. `last_step` is the last step that the dashboard has whole
    from earlier starts.
    """

    def __init__(self, folder, config, run_id, resumed_at, say):
        files = _make_writable_folder(folder / "wandb")
        previous_starts = _list_previous_starts(files, run_id)
        os.environ.setdefault("WANDB_SILENT", "true")
        # Else pictures of tables would pile up in the home folder.
        os.environ.setdefault("WANDB_DATA_DIR", str(files))
        import wandb

        mode = wandb.setup().settings.mode  # from WANDB_MODE or a settings file
        is_online = mode in ("online", "shared")
        try:
            lacks_key = is_online and not wandb.login(prompt=False, verify=False)
            self.tracker = self._start("offline" if lacks_key else mode, folder, config, run_id)
        except Exception as error:
            if not is_online:
                raise
            say(f"W&B can't be reached ({get_line(error):.200}): its rows are written offline")
            wandb.teardown()  # its service still holds the run id
            self.tracker = self._start("offline", folder, config, run_id)
        self.run = self.tracker.tracker
        # The server says which step comes next; offline, only the files of the earlier start know.
        self.last_step = self.run.starting_step - 1
        if self.run.offline and previous_starts:
            self.last_step = _read_last_step(previous_starts[-1])
        self.run.define_metric("*", step_metric="step")
        self.tracker.store_init_configuration(config)
        self.where = self.run.url
        if not self.where:
            self.where = f"{files} (to upload: wandb sync {files}/offline-run-*-{run_id})"
            if self.run.disabled:
                self.where = ""

    @staticmethod
    def _start(mode: str, folder: Path, config: Mapping[str, Any], run_id: str) -> WandBTracker:
        import wandb

        settings = wandb.Settings(
            # capturing prints would slow down training, and the run folder has its own log
            console="off",
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S - 5,
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=FLUSH_S,
        )
        tags = [tag.strip() for tag in config.get("tags", "").split(",") if tag.strip()]
        labels = {
            "group": config.get("group"),
            "notes": config.get("notes"),
            "tags": tags,
            "entity": config.get("wandb_entity"),
        }
        tracker = WandBTracker(
            config["project"],
            name=folder.name,
            id=run_id,
            resume="allow",
            dir=folder,
            mode=mode,
            settings=settings,
            **{key: value for key, value in labels.items() if value},
        )
        tracker.start()
        return tracker

    def log(self, step, metrics):
        # W&B's own step is set to the run's: left to count rows, it would start again from 0 in an
        # offline resume, and `wandb sync` would give the rows of both starts the same steps.
        self.tracker.log({"step": step, **metrics}, step=step)

    def summary(self, values):
        self.run.summary.update(values)

    def images(self, step, pictures):
        import wandb

        media = {}
        for key, picture in pictures.items():
            if callable(picture):
                columns, *rows = picture()
                rows = [[wandb.Image(image), *values] for image, *values in rows]
                media[key] = wandb.Table(list(columns), rows)
            else:
                media[key] = wandb.Image(str(picture))
        self.log(step, media)

    def upload(self, model):
        import wandb

        name = re.sub(r"[^\w.-]", "-", model.parent.name, flags=re.ASCII)
        artifact = wandb.Artifact(name, type="model")
        artifact.add_dir(str(model), skip_cache=True)  # else a copy would stay in the home folder
        self.run.log_artifact(artifact, aliases=["best", f"step-{self.run.summary['best/step']}"])
        if not self.run.offline:
            artifact.wait(UPLOAD_TIMEOUT_S)

    def finish(self, exit_code):
        self.run.finish(exit_code=exit_code)


class _TensorBoard:
    """The same for TensorBoard."""

    def __init__(self, folder, config, run_id, resumed_at, say):
        files = _make_writable_folder(folder / "tensorboard")
        # purge_step hides rows of a killed run after `resumed_at`, since some may be missing.
        self.last_step = resumed_at
        self.tracker = TensorBoardTracker(
            files.name, files.parent, purge_step=resumed_at + 1, flush_secs=FLUSH_S
        )
        self.tracker.start()
        lines = [f"    {key}: {value}" for key, value in config.items()]
        self.tracker.tracker.add_text("config", "\n".join(lines))
        self.where = f"{files} (to look: tensorboard --logdir {files})"

    def log(self, step, metrics):
        self.tracker.log(metrics, step=step)

    def summary(self, values):
        results = {f"summary/{key}": value for key, value in values.items()}
        self.log(values.get("last/step"), results)

    def images(self, step, pictures):
        import numpy
        from PIL import Image

        for key, path in pictures.items():
            if callable(path):
                continue
            pixels = numpy.asarray(Image.open(path).convert("RGB"))[None]  # [1, height, width, 3]
            self.tracker.log_images({key: pixels}, step=step, dataformats="NHWC")

    def finish(self, exit_code):
        self.tracker.finish()


_Backend = _WandB | _TensorBoard


def _make_writable_folder(folder: Path) -> Path:
    """Make the folder and check that it is writable: else W&B would silently use the temporary one."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} is read-only")
    return folder


def _list_previous_starts(files: Path, run_id: str) -> list[Path]:
    """W&B's folders of the run's previous starts, oldest first.

    One that was killed before its first record is removed: `wandb sync` would refuse all of them
    because of it.
    """
    folders = []
    for folder in list(files.glob(f"*run-*-{run_id}")):
        log = folder / f"run-{run_id}.wandb"
        if log.exists() and log.stat().st_size > LOG_HEADER_BYTES:
            folders.append(folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return sorted(folders, key=lambda path: path.name.removeprefix("offline-"))


def _read_last_step(folder: Path) -> int:
    """Read the last step in the files of a previous start; 0 if they can't be read."""
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
    try:
        return json.loads(subprocess.run(inspect, capture_output=True, timeout=60).stdout)["step"]
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return 0
