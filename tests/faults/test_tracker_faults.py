"""Whatever fails in the dashboard, the run is bit for bit the run without it, and starts as soon.

More of this: tests/run/test_tracking.py, and runs that are killed and go on in tests/recipes/test_dashboards.py.
"""

import functools
import json
import os
import pickle
import threading
import time

import psutil
import pytest

from tests.harness.disks import disk, mount
from tests.harness.launching import free_port
from tests.harness.odd_files import Malicious
from tests.harness.resumed import STEPS, after_step, assert_same_run

WORDS = (
    *("--image_size", 16, "--global_batch_size", 8, "--workers", 1, "--max_steps", STEPS, "--log_every", 1),
    *("--checkpoint_every", 4, "--eval_every", 6, "--ema_decay", 0.9),
)


def dash_late(environment: dict[str, str], kill: bool, rank: int = 0) -> None:
    """In a fork: W&B starts once the first step is done; with `kill`, its service dies after the fifth."""
    from common.run import tracking

    os.environ.update(environment)
    tracking.INIT_TIMEOUT_S = 3.0  # in the thread: it would only make the end of this short run longer
    first_step, start = threading.Event(), tracking._WandB.__init__

    def start_late(*arguments) -> None:
        assert first_step.wait(60), "the first step waits for the dashboard"
        start(*arguments)

    def tell(run) -> None:
        first_step.set()
        if run.step == 5 and kill:
            while not run._records.log._tracker.where():  # it starts in a thread
                time.sleep(0.01)
            services = [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
            assert services
            for service in services:
                service.kill()

    tracking._WandB.__init__ = start_late
    after_step(tell, once_written=False)


@pytest.fixture
def run(forks, data, tmp_path):
    """`run("name", tracker, environment, kill=False)` -> what it said, and its folder."""

    def train(name: str, tracker: str, environment: dict[str, str] | None = None, kill: bool = False):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        words = (*WORDS, "--data", data, "--output_dir", tmp_path, "--name", name, "--tracker", tracker)
        ended = forks(*words, before=functools.partial(dash_late, environment or {}, kill))
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
