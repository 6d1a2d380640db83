"""Whatever fails in the dashboard, the run is bit for bit the run without it, and starts as soon.

More of this: tests/run/test_tracking.py, and runs that are killed and go on in
tests/recipes/test_dashboards.py.
"""

import contextlib
import json
import os
import pickle
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from common.run import Observer, tracking
from tests.harness.disks import disk, mount
from tests.harness.launching import find_free_port
from tests.harness.odd_files import Malicious
from tests.harness.resumed import STEPS, assert_same_run

WORDS = (
    f"--image_size 16 --global_batch_size 8 --workers 1 --max_steps {STEPS} --log_every 1 "
    "--checkpoint_every 4 --eval_every 6 --ema_decay 0.9"
).split()


@dataclass
class LateDashboard(Observer):
    """W&B starts once the first step is made; with `kill`, its service dies after the fifth.

    Nothing but the library itself can be made to start late, so that a function of it is replaced.
    """

    environment: dict[str, str]
    kill: bool

    def on_prepare(self, model, train_set, compute_losses) -> None:
        os.environ.update(self.environment)
        # In the thread: it would only make the end of this short run longer.
        tracking.INIT_TIMEOUT_S = 3.0
        import wandb

        self.first_step = threading.Event()
        self.setup = wandb.setup
        wandb.setup = self.set_up_late

    def set_up_late(self, *args, **kwargs):
        assert self.first_step.wait(60), "the first step waits for the dashboard"
        return self.setup(*args, **kwargs)

    def on_end_step(self, run, step) -> None:
        self.first_step.set()
        if step == 5 and self.kill:
            while not run._records.log._tracker.where():  # it starts in a thread
                time.sleep(0.01)
            services = [
                child
                for child in psutil.Process().children(recursive=True)
                if "wandb" in child.name()
            ]
            assert services
            for service in services:
                service.kill()


@pytest.fixture(scope="module")
def run(forks, data):
    """`run(folder, tracker, environment, kill=False)` -> what it said."""

    def train(folder: Path, tracker: str = "wandb", environment=None, kill: bool = False) -> str:
        argv = WORDS + ["--data", data, "--output_dir", folder.parent, "--name", folder.name]
        argv += ["--tracker", tracker]
        ended = forks(argv, observer=LateDashboard(environment or {}, kill))
        assert ended.code == 0, ended
        return ended.stdout

    return train


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> Path:
    """The folder of the run without a dashboard."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder, "none")
    return folder


FAULTS = {  # what the run says about each, once
    "no key": "",
    "a dead address": "be reached (",
    "a dead service": "wandb failed",
    "a read-only folder": "wandb failed",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_wandb_changes_a_loss_or_holds_up_the_start(run, whole, tmp_path, fault):
    folder = tmp_path / "run"
    environment = {}
    folder.mkdir()
    if fault == "a dead address":
        environment = {
            "WANDB_API_KEY": "a" * 40,
            "WANDB_BASE_URL": f"http://127.0.0.1:{find_free_port()}",
        }
    with (
        disk(folder / "wandb", "1m") if fault == "a read-only folder" else contextlib.nullcontext()
    ):
        if fault == "a read-only folder":
            mount("mount", "-o", "remount,ro", folder / "wandb")
        stderr = run(folder, environment=environment, kill=fault == "a dead service")
        assert_same_run(folder, whole)
    assert stderr.count(FAULTS[fault] or "wandb failed") == bool(FAULTS[fault]), stderr


@pytest.mark.parametrize("forged", ["pickle", "path"])
def test_what_a_stranger_put_into_its_files_executes_nothing(run, whole, tmp_path, forged):
    marker = tmp_path / "executed"
    folder = tmp_path / "run"
    payload = pickle.dumps(Malicious(marker))
    (folder / "wandb").mkdir(parents=True)
    state = payload if forged == "pickle" else json.dumps({"id": f"../../{marker.name}"}).encode()
    (folder / "tracker.json").write_bytes(state)
    (folder / "wandb/settings").write_bytes(b"[default]\nmode = !!python/object/apply:os.mkdir\n")
    (folder / "wandb/wandb-resume.json").write_bytes(payload)
    stderr = run(folder)
    assert_same_run(folder, whole)
    assert stderr.count("wandb failed") <= 1, stderr
    assert not marker.exists() and not (tmp_path.parent / marker.name).exists()
