"""Jobs of a real SLURM: the scripts of cluster/slurm/, as they are, train what one launch of as many processes trains.

They also do after a pre-emption, a requeue, a signal before the time limit; as an array, and side by side on one machine.
"""

import subprocess
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from tests.harness.debian import require_package
from tests.harness.launching import ROOT
from tests.harness.outcomes import Outcome
from tests.harness.resumed import STEPS, assert_same_run
from tests.harness.slurm import Job, Slurm, slurm_cluster

SCRIPTS = ROOT / "cluster/slurm"
WORDS = (
    *("--max_steps", STEPS, "--log_every", 1, "--checkpoint_every", 4, "--eval_every", 6, "--tracker", "none"),
    *("--global_batch_size", 16, "--augment", "rand-m9-mstd0.5", "--mixup", 0.2, "--ema_decay", 0.99, "--workers", 1),
)
CPU = ("--gpus-per-node=0", "--cpus-per-task=1")  # instead of the sizes of the scripts


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(run_several) -> dict[str, Outcome]:
    """Runs of two processes that are not disturbed, by seed."""
    return run_several(2, {seed: [*WORDS, "--seed", seed] for seed in ("1", "2")})


class Held:
    """A job whose starts wait at chosen steps until they are asked to stop (tests/harness/held.py)."""

    def __init__(self, slurm: Slurm, folder: Path, script: str, *flags: str, at: str, launcher: tuple[str, ...] = ()):
        self.run, self._signs = folder / script, folder / f"{script}.held"
        self._signs.mkdir()
        words = [*launcher, "tests/harness/held.py", "recipes/cls.py", *WORDS, "--seed", 1]
        words += ["--output_dir", folder, "--name", script]
        env = {"HELD_AT": at, "HELD_IN": str(self._signs), "PYTHONPATH": str(ROOT)}
        self.job: Job = slurm.submit(*CPU, *flags, SCRIPTS / script, *words, output=folder / f"{script}.out", env=env)

    def waits(self, start: int) -> None:
        """Return when both processes of this start wait."""
        signs = [self._signs / f"{start} {rank}" for rank in (0, 1)]
        self.job.until(lambda _: all(sign.exists() for sign in signs), f"waiting in start {start}")


def steps_of_starts(text: str) -> list[str]:
    return [line.split()[3] for line in text.splitlines() if line.startswith("resuming from step")]


def test_a_job_that_is_preempted_and_asked_to_stop_ends_as_the_undisturbed_run(slurm, undisturbed, tmp_path):
    """srun starts one process on each of two machines. SIGTERM by SLURM, SIGUSR1 as before a time limit."""
    held = Held(slurm, tmp_path, "train.sh", "--ntasks-per-node=1", at="5 9")
    held.waits(0)
    urgent = slurm.submit(
        *("--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true"), output=tmp_path / "urgent.out"
    )
    assert urgent.end()["JobState"] == "COMPLETED"
    held.waits(1)
    slurm("scancel", "--signal=USR1", held.job.number)
    known, text = held.job.end(), held.job.text()
    assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "2"), text
    assert "2 processes on 2 nodes" in text
    assert "stopped by SIGTERM at step 6" in text and "stopped by SIGUSR1 at step 10" in text, text
    assert steps_of_starts(text) == ["6", "10"]
    assert_same_run(held.run, undisturbed["1"].folder)


def test_scripts_with_accelerate_launch_resume_after_a_requeue_and_before_the_time_limit(slurm, undisturbed, tmp_path):
    """One launcher on each of two machines is requeued by hand; the script without srun is told in time by --signal=B:."""
    two = Held(slurm, tmp_path, "launch.sh", at="5", launcher=("--config_file", "accelerate_configs/2node_cpu.yaml"))
    launcher = ("--config_file", "accelerate_configs/multi_cpu.yaml")
    one = Held(slurm, tmp_path, "one_machine.sh", "--signal=B:USR1@60", at="7", launcher=launcher)
    one.waits(0)
    slurm("scontrol", "update", f"JobId={one.job.number}", "EndTime=now+90")  # SLURM looks at its clock twice a minute
    two.waits(0)
    slurm("scontrol", "requeue", two.job.number)
    one.job.until(lambda known: known["Restarts"] == "1", "requeued")
    slurm("scontrol", "update", f"JobId={one.job.number}", "TimeLimit=60")
    for held, step in ((two, "6"), (one, "8")):
        known, text = held.job.end(), held.job.text()
        assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "1"), text
        assert steps_of_starts(text) == [step], text
        assert_same_run(held.run, undisturbed["1"].folder)
    assert "2 processes on 2 nodes" in two.job.text() and "2 processes on 1 node" in one.job.text()


def test_an_array_trains_one_run_per_seed_side_by_side(slurm, undisturbed, tmp_path):
    """Both on the same machine, with two processes each: they meet at different ports."""
    words = [*WORDS, "--output_dir", tmp_path / "runs"]
    flags = ("--nodes=1", "--nodelist=node1", "--ntasks-per-node=2", "--array=1-2")
    array = slurm.submit(*CPU, *flags, SCRIPTS / "train.sh", "recipes/cls.py", *words, output=tmp_path / "%a.out")
    tasks = [Job(slurm, f"{array.number}_{seed}", tmp_path / f"{seed}.out") for seed in (1, 2)]
    known = [task.end() for task in tasks]
    for each, task in zip(known, tasks, strict=True):
        assert each["JobState"] == "COMPLETED" and "2 processes on 1 node" in task.text(), task.text()
    times = [[datetime.fromisoformat(each[name]) for name in ("StartTime", "EndTime")] for each in known]
    assert max(start for start, _ in times) < min(end for _, end in times), "one after the other"
    runs = {
        str(yaml.safe_load((run / "config.yaml").read_text())["seed"]): run for run in (tmp_path / "runs").iterdir()
    }
    for seed, run in runs.items():
        assert_same_run(run, undisturbed[seed].folder)
    assert runs.keys() == {"1", "2"}


def test_python_without_srun_is_refused_in_a_job_of_several_tasks(slurm, tmp_path):
    """It would train as one process, or wait for others that nobody starts."""
    line = f"python recipes/cls.py --output_dir {tmp_path}/runs"
    job = slurm.submit("--ntasks=2", "--wrap", line, output=tmp_path / "out")
    assert job.end()["ExitCode"] == "2:0", job.text()
    assert "put srun before python" in job.text() and job.text().count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.smoke
def test_the_scripts_pass_shellcheck():
    require_package("shellcheck")
    done = subprocess.run(["shellcheck", *SCRIPTS.glob("*.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
