"""A job of submitit that is asked to stop is started again, and ends as the undisturbed run."""

import signal

import psutil
import pytest

from tests.harness.launching import ROOT
from tests.harness.resumed import STEPS, assert_same_run
from tests.harness.waiting import Limit

pytest.importorskip("submitit")
WORDS = (
    *("--max_steps", STEPS, "--log_every", 1, "--checkpoint_every", 4, "--eval_every", 6, "--tracker", "none"),
    *("--global_batch_size", 16, "--augment", "rand-m9-mstd0.5", "--ema_decay", 0.99, "--workers", 1),
)


def test_a_local_job_of_two_processes_is_started_again_and_resumes(launch, run_several, tmp_path):
    words = ("--cluster", "local", "--folder", tmp_path / "jobs", "--tasks_per_node", 2, "--gpus_per_node", 0)
    words += ("tests/harness/held.py", "recipes/cls.py", *WORDS, "--output_dir", tmp_path, "--name", "held")
    signs = tmp_path / "signs"
    signs.mkdir()
    env = {"HELD_AT": "5", "HELD_IN": str(signs), "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1"}
    started = launch.start_python("cluster/slurm/submitit_cls.py", *words, env=env)
    for _ in Limit(120).turns():
        if len([*signs.iterdir()]) == 2 or started.process.poll() is not None:
            break
    (controller,) = psutil.Process(started.process.pid).children()
    for task in controller.children():
        task.send_signal(signal.SIGUSR1)  # as submitit does before a time limit
    done = started.finish()
    text = "".join(path.read_text() for path in (tmp_path / "jobs").glob("*_0_log.*"))
    assert done.returncode == 0, f"{done.stderr}\n{text}"
    assert "stopped by SIGUSR1" in text and text.count("resuming from step") == 1, text
    assert_same_run(tmp_path / "held", run_several(2, {"whole": WORDS})["whole"].folder)
