"""Whatever fails in the dashboard, the run is bit for bit the run without it, and starts as soon.

More of this: tests/run/test_tracking.py, and a run with W&B that is killed and goes on in tests/recipes/test_cls_resume.py.
"""

import functools
import json
import os
import pickle
import time
from pathlib import Path

import psutil
import pytest

from tests.harness.disks import disk, mount
from tests.harness.drawings import draw_stripes
from tests.harness.launching import free_port
from tests.harness.outcomes import Outcome, identical

STEPS, LOST_S = 12, 2.0  # what a dashboard may cost a start
WORDS = (
    *("--image_size", 16, "--global_batch_size", 8, "--workers", 1, "--max_steps", STEPS, "--log_every", 1),
    *("--checkpoint_every", 4, "--eval_every", 6, "--ema_decay", 0.9),
)


def note_the_start(folder: Path, environment: dict[str, str], kill: bool, rank: int = 0) -> None:
    """In a fork: write down when the first step is done; with `kill`, W&B's service dies after the fifth."""
    from common.run import tracking
    from common.run.run import Run

    os.environ.update(environment)
    tracking.INIT_TIMEOUT_S = 3.0  # in the thread: it would only make the end of this short run longer
    began, end_step = time.perf_counter(), Run.end_step

    def end_and_note(run: Run, grad_norm) -> None:
        end_step(run, grad_norm)
        done = run.step
        if done == 1:
            (folder / "seconds").write_text(str(time.perf_counter() - began))
        if done == 5 and kill:
            while not run._log._tracker.where():  # it starts in a thread
                time.sleep(0.01)
            services = [child for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]
            assert services
            for service in services:
                service.kill()

    Run.end_step = end_and_note


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def run(forks, tmp_path):
    """`run("name", tracker, environment, kill=False)` -> what it said, seconds to the first step, its folder."""
    draw_stripes(tmp_path / "data/train", (12, 9, 6))
    draw_stripes(tmp_path / "data/val", (3, 3, 3), seed=1)

    def train(name: str, tracker: str, environment: dict[str, str] | None = None, kill: bool = False):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        words = (*WORDS, "--data", tmp_path / "data", "--output_dir", tmp_path, "--name", name, "--tracker", tracker)
        before = functools.partial(note_the_start, folder, environment or {}, kill)
        ended = forks(*words, before=before)
        assert ended.code == 0, ended
        return ended.stdout, float((folder / "seconds").read_text()), Outcome("ok", "", "", 0.0, folder)

    return train


def assert_same_run(one: Outcome, other: Outcome) -> None:
    assert [row["step"] for row in one.rows] == [*range(1, STEPS + 1)]
    for row, expected in zip(one.rows, other.rows, strict=True):
        assert row.keys() == expected.keys()
        assert all(row[key] == expected[key] for key in row if not key.startswith("perf/")), row
    assert all(identical(one.tensors(file), other.tensors(file)) for file in ("model", "optimizer", "ema"))


@pytest.mark.alone
def test_no_fault_of_wandb_changes_a_loss_or_holds_up_the_start(run, tmp_path):
    run("warm", "none")
    alone = [run(f"alone_{number}", "none") for number in range(3)]
    whole, seconds = alone[0][2], sorted(seconds for _, seconds, _ in alone)[1]
    nobody = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}"}
    lost = {}
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
            said, began, outcome = run(name, "wandb", environment, kill)
            assert_same_run(outcome, whole)
            assert said.count(says or "wandb failed") == bool(says), (name, said)
            lost[name] = began - seconds
    print({name: round(more, 2) for name, more in lost.items()}, "of", round(seconds, 2), "s")
    assert max(lost.values()) < LOST_S, lost


def test_a_payload_in_the_state_of_the_tracker_executes_nothing_and_costs_at_most_the_dashboard(run, tmp_path):
    whole, marker = run("whole", "none")[2], tmp_path / "executed"
    payload = pickle.dumps(Malicious(marker))
    states = {
        "pickle": payload,
        "list": b"[1]",
        "path": json.dumps({"id": f"../../{marker.name}"}).encode(),
        "object": json.dumps({"id": {"py/object": "os.mkdir"}}).encode(),
    }
    for name, state in states.items():
        folder = tmp_path / name
        (folder / "wandb").mkdir(parents=True)
        (folder / "tracker.json").write_bytes(state)
        (folder / "wandb/settings").write_bytes(b"[default]\nmode = !!python/object/apply:os.mkdir\n")
        (folder / "wandb/wandb-resume.json").write_bytes(payload)
        said, _, outcome = run(name, "wandb")
        assert_same_run(outcome, whole)
        assert said.count("wandb failed") <= 1, said
        assert not marker.exists() and not (tmp_path.parent / marker.name).exists(), name
