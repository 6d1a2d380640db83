"""Jobs of a real SLURM: the scripts of cluster/slurm/ train what one launch trains."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import yaml

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
    """A job whose first start waits at a step until it is asked to stop (tests/harness/held.py)."""

    def __init__(self, slurm: Slurm, folder: Path, *flags: object, script: str, config: str = "") -> None:
        """`flags` are sbatch's. A script that uses accelerate launch also takes `config`."""
        self.run, self._signs = folder / script, folder / f"{script}.held"
        self._signs.mkdir()
        words = ["--config_file", f"accelerate_configs/{config}.yaml"] if config else []
        words += ["tests/harness/held.py", "recipes/cls.py", *WORDS, "--seed", 1]
        words += ["--output_dir", folder, "--name", script]
        env = {"HELD_AT": "5", "HELD_IN": str(self._signs), "PYTHONPATH": str(ROOT)}
        self.job = slurm.submit(*CPU, *flags, SCRIPTS / script, *words, output=folder / f"{script}.out", env=env)

    def waits(self) -> None:
        """Return when both processes wait."""
        self.job.until(lambda _: len([*self._signs.iterdir()]) == 2, "at the step where it waits")

    def assert_resumed(self, by: str, layout: str, undisturbed: Outcome) -> None:
        """The run was stopped `by` one signal, resumed from the step it had come to, and ended as the undisturbed one."""
        known, text = self.job.end(), self.job.text()
        assert (known["JobState"], known["Restarts"]) == ("COMPLETED", "1"), text
        assert f"2 processes on {layout}" in text
        stop = re.search(rf"stopped by {by} at step (\d+)", text)
        assert stop and 0 <= int(stop[1]) - 5 <= 2, text
        assert re.findall(r"resuming from step (\d+)", text) == [stop[1]], text
        assert_same_run(self.run, undisturbed.folder)


def test_a_pre_empted_job_ends_as_the_undisturbed_run(slurm, undisturbed, tmp_path):
    """srun starts one process on each of two machines. They save when SLURM takes the machines for an urgent job."""
    held = Held(slurm, tmp_path, "--ntasks-per-node=1", script="train.sh")
    held.waits()
    flags = ("--partition=urgent", "--nodes=2", "--exclusive")
    assert slurm.submit(*flags, "--wrap", "true", output=tmp_path / "urgent.out").end()["JobState"] == "COMPLETED"
    held.assert_resumed("SIGTERM", "2 nodes", undisturbed["1"])


def test_a_job_that_is_asked_to_stop_requeues_itself(slurm, undisturbed, tmp_path):
    """SIGUSR1 goes to the batch script alone, which passes it on to accelerate launch."""
    held = Held(slurm, tmp_path, script="one_machine.sh", config="multi_cpu")
    held.waits()
    slurm("scancel", "--signal=USR1", "--batch", held.job.number)
    held.assert_resumed("SIGUSR1", "1 node", undisturbed["1"])


@pytest.mark.long
def test_jobs_resume_after_a_signal_to_all_their_processes_and_after_scontrol_requeue(slurm, undisturbed, tmp_path):
    """Processes that srun started get the signal themselves; a launcher on each of two machines is ended by a requeue."""
    signalled = Held(slurm, tmp_path, "--ntasks-per-node=1", script="train.sh")
    requeued = Held(slurm, tmp_path, script="launch.sh", config="2node_cpu")
    signalled.waits()
    slurm("scancel", "--signal=USR1", signalled.job.number)
    requeued.waits()
    slurm("scontrol", "requeue", requeued.job.number)
    signalled.assert_resumed("SIGUSR1", "2 nodes", undisturbed["1"])
    requeued.assert_resumed("SIGTERM", "2 nodes", undisturbed["1"])


@pytest.mark.long
def test_a_cancelled_job_saves_and_is_not_requeued(slurm, tmp_path):
    held = Held(slurm, tmp_path, script="one_machine.sh", config="multi_cpu")
    held.waits()
    slurm("scancel", held.job.number)
    known, text = held.job.end(), held.job.text()
    assert (known["JobState"], known["Restarts"]) == ("CANCELLED", "0") and "stopped by SIGTERM" in text, text


@pytest.mark.long
def test_an_array_trains_one_run_per_seed_side_by_side(slurm, undisturbed, tmp_path):
    """Both on one machine, with two processes each, which have to find each other."""
    flags = ("--nodes=1", "--nodelist=node1", "--ntasks-per-node=2", "--array=1-2")
    words = ("recipes/cls.py", *WORDS, "--output_dir", tmp_path / "runs")
    array = slurm.submit(*CPU, *flags, SCRIPTS / "train.sh", *words, output=tmp_path / "%a.out")
    tasks = [Job(slurm, f"{array.number}_{seed}", tmp_path / f"{seed}.out") for seed in (1, 2)]
    known = [task.end() for task in tasks]
    for each, task in zip(known, tasks, strict=True):
        assert each["JobState"] == "COMPLETED" and "2 processes on 1 node" in task.text(), task.text()
    times = [[datetime.fromisoformat(each[name]) for name in ("StartTime", "EndTime")] for each in known]
    assert max(start for start, _ in times) < min(end for _, end in times), "one after the other"
    runs = {yaml.safe_load((run / "config.yaml").read_text())["seed"]: run for run in (tmp_path / "runs").iterdir()}
    assert runs.keys() == {1, 2}
    for seed, run in runs.items():
        assert_same_run(run, undisturbed[str(seed)].folder)
