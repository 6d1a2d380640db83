"""Whatever fails in the dashboard, the run is bit for bit the run without it, and starts as soon.

More of this: tests/run/test_tracking.py, and runs that are killed and go on in tests/recipes/test_dashboards.py.
"""

import json
import os
import pickle
import threading
import time
from dataclasses import dataclass

import psutil
import pytest
import wandb

from common.run import Observer, tracking
from tests.harness.disks import disk, mount
from tests.harness.launching import free_port
from tests.harness.odd_files import Malicious
from tests.harness.resumed import STEPS, assert_same_run

WORDS = (
    *("--image_size", 16, "--global_batch_size", 8, "--workers", 1, "--max_steps", STEPS, "--log_every", 1),
    *("--checkpoint_every", 4, "--eval_every", 6, "--ema_decay", 0.9),
)


@dataclass
class LateDashboard(Observer):
    """W&B starts once the first step is made; with `kill`, its service dies after the fifth.

    Nothing but the library itself can be made to start late, so that a function of it is replaced.
    """

    environment: dict[str, str]
    kill: bool

    def on_prepare(self, model, train_set, compute_losses) -> None:
        os.environ.update(self.environment)
        tracking.INIT_TIMEOUT_S = 3.0  # in the thread: it would only make the end of this short run longer
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
            services = [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
            assert services
            for service in services:
                service.kill()


@pytest.fixture
def run(forks, data, tmp_path):
    """`run("name", tracker, environment, kill=False)` -> what it said, and its folder."""

    def train(name: str, tracker: str, environment: dict[str, str] | None = None, kill: bool = False):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        words = (*WORDS, "--data", data, "--output_dir", tmp_path, "--name", name, "--tracker", tracker)
        ended = forks(*words, observer=LateDashboard(environment or {}, kill))
        assert ended.code == 0, ended
        return ended.stdout, folder

    return train


def test_no_fault_of_wandb_and_no_forged_file_changes_a_loss_or_holds_up_the_start(run, tmp_path):
    whole = run("whole", "none")[1]
    nobody = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}"}
    (tmp_path / "read_only").mkdir()
    with disk(tmp_path / "read_only/wandb", "1m") as folder:
        mount("mount", "-o", "remount,ro", folder)
        faults = {
            "without_key": ({}, False, ""),
            "dead_address": (nobody, False, "be reached ("),
            "dead_service": ({}, True, "wandb failed"),
            "read_only": ({}, False, "wandb failed"),
        }
        for name, (environment, kill, says) in faults.items():
            said, folder = run(name, "wandb", environment, kill)
            assert_same_run(folder, whole)
            assert said.count(says or "wandb failed") == bool(says), (name, said)
    # What a stranger has put into the tracker's files executes nothing.
    payload, marker = pickle.dumps(Malicious(tmp_path / "executed")), tmp_path / "executed"
    for name, state in {"pickle": payload, "path": json.dumps({"id": f"../../{marker.name}"}).encode()}.items():
        folder = tmp_path / name
        (folder / "wandb").mkdir(parents=True)
        (folder / "tracker.json").write_bytes(state)
        (folder / "wandb/settings").write_bytes(b"[default]\nmode = !!python/object/apply:os.mkdir\n")
        (folder / "wandb/wandb-resume.json").write_bytes(payload)
        said, folder = run(name, "wandb")
        assert_same_run(folder, whole)
        assert said.count("wandb failed") <= 1, said
        assert not marker.exists() and not (tmp_path.parent / marker.name).exists(), name
