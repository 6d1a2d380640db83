"""Jobs of a real SLURM: the scripts of cluster/slurm/ train what one launch trains.

Its two machines are of tests/harness/machines.py, its programs from Debian's slurm-wlm and munge;
it takes root.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TextIO

import pytest
import yaml

from tests.harness.debian import require_package
from tests.harness.launching import ROOT, inherit_environment
from tests.harness.machines import Node, machines, require_namespaces
from tests.harness.outcomes import Outcome
from tests.harness.resumed import STEPS, assert_same_run
from tests.harness.waiting import Limit

SCRIPTS = ROOT / "cluster/slurm"
WORDS = (
    f"--max_steps {STEPS} --log_every 1 --checkpoint_every 4 --eval_every 6 --tracker none "
    "--global_batch_size 16 --augment rand-m9-mstd0.5 --mixup 0.2 --ema_decay 0.99 --workers 1"
).split()
CPU = ["--gpus-per-node=0", "--cpus-per-task=1"]  # instead of the sizes of the scripts
# Four CPUs a machine, whatever it has. A requeued job waits for `cred_expire`, of which 5 s is the
# least.
CONFIGURATION = """
ClusterName=recipes
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=60
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 State=UP
"""


class Slurm:
    """The commands of a cluster, given on its first machine."""

    def __init__(self, first: Node, folder: Path) -> None:
        self._first = first
        self._folder = folder

    def __call__(
        self, argv: list, env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """`argv`, as a person types it in the root of the checkout; recipes run on the CPU, with
        one thread a process.
        """
        environ = {
            "SLURM_CONF": f"{self._folder}/slurm.conf",
            "CUDA_VISIBLE_DEVICES": "-1",
            **(env or {}),
        }
        done = self._first.start_command(argv, env=environ).finish()
        assert not (check and done.returncode), (
            f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def submit(self, argv: list, output: Path, **options) -> "Job":
        """`sbatch <argv>`, with its output in the file `output`."""
        sbatch = ["sbatch", "--parsable", "--output", output]
        stdout = self(sbatch + argv, **options).stdout
        return Job(self, stdout.strip(), output)


class Job:
    """A batch job, or one task of an array."""

    def __init__(self, slurm: Slurm, number: str, output: Path) -> None:
        self.slurm = slurm
        self.number = number
        self.output = output

    def show(self) -> dict[str, str]:
        """What SLURM knows of it, such as JobState, Restarts, ExitCode."""
        stdout = self.slurm(["scontrol", "show", "job", "--oneliner", self.number]).stdout
        return dict(word.split("=", 1) for word in stdout.split() if "=" in word)

    def until(
        self, condition: Callable[[dict[str, str]], object], what: str, seconds: float = 120
    ) -> dict[str, str]:
        """Wait for it, at most `seconds` of an idle machine; what SLURM knows then."""
        for _ in Limit(seconds).turns(0.2):
            facts = self.show()
            if condition(facts):
                return facts
        raise AssertionError(f"not {what}: {facts}\n{self.text()}")

    def end(self, seconds: float = 120) -> dict[str, str]:
        """Wait for its end, also through requeues."""
        # While processes end it is COMPLETING.
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return self.until(lambda facts: facts["JobState"] in over, "at its end", seconds)

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    """SLURM with all its files in one folder. Afterwards all its processes and jobs are killed."""
    folder = tmp_path_factory.mktemp("slurm")
    for package in ("slurm-wlm", "munge"):
        require_package(package)
    if os.getuid():
        pytest.skip("a SLURM of this test's own takes root")
    require_namespaces(folder)
    with machines(2, folder, names_are_loopback=False) as nodes:
        rows = [f"NodeName={node.name} NodeAddr={node.address} CPUs=4" for node in nodes]
        text = CONFIGURATION.format(first=nodes[0], folder=folder, nodes="\n".join(rows))
        (folder / "slurm.conf").write_text(text)
        # Named, since slurmd would look for a version of cgroups, and there may be none; no plugin
        # here uses them.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (folder / "state").mkdir()
        for node in nodes:
            (folder / f"spool.{node.name}").mkdir()
        names = {"socket": "munge.socket", "key-file": key.name, "log-file": "munged.log"}
        names |= {"pid-file": "munged.pid", "seed-file": "munged.seed"}
        munged = ["munged", "--foreground", "--force"] + [
            f"--{flag}={folder / name}" for flag, name in names.items()
        ]
        environ = {**inherit_environment(), "SLURM_CONF": str(folder / "slurm.conf")}
        log = (folder / "daemons.log").open("w")

        def start(node: Node, argv: list[str]) -> subprocess.Popen:
            return subprocess.Popen(node.before + argv, env=environ, stdout=log, stderr=log)

        cluster = Slurm(nodes[0], folder)
        daemons = [start(nodes[0], munged)]
        try:
            _await(lambda: (folder / "munge.socket").exists(), log)
            daemons.append(start(nodes[0], ["slurmctld", "-D"]))
            daemons += [start(node, ["slurmd", "-D"]) for node in nodes]
            states = ["sinfo", "--noheader", "--format", "%T %D"]
            _await(lambda: cluster(states, check=False).stdout.split() == ["idle", "2"], log)
            yield cluster
        finally:
            for node in nodes:
                node.kill()
            for daemon in daemons:
                daemon.wait()
            log.close()


def _await(condition: Callable[[], bool], log: TextIO) -> None:
    for _ in Limit(60).turns(0.1):
        if condition():
            return
    pytest.fail(f"SLURM does not come up:\n{Path(log.name).read_text()}")


@pytest.fixture(scope="module")
def undisturbed(run_several) -> dict[str, Outcome]:
    """Runs of two processes that are not disturbed, by seed."""
    return run_several(2, {seed: WORDS + ["--seed", seed] for seed in ("1", "2")})


class Held:
    """A job whose first start waits at a step until it is asked to stop (tests/harness/held.py)."""

    def __init__(
        self, slurm: Slurm, folder: Path, *, script: str, config: str = "", flags: str = ""
    ) -> None:
        """`flags` are sbatch's. A script that uses accelerate launch also takes `config`."""
        self.run = folder / script
        self._signs = folder / f"{script}.held"
        self._signs.mkdir()
        argv = ["--config_file", f"accelerate_configs/{config}.yaml"] if config else []
        argv += ["tests/harness/held.py", "recipes/cls.py"] + WORDS + ["--seed", 1]
        argv += ["--output_dir", folder, "--name", script]
        env = {"HELD_AT": "5", "HELD_IN": str(self._signs), "PYTHONPATH": str(ROOT)}
        self.job = slurm.submit(
            CPU + flags.split() + [SCRIPTS / script] + argv,
            output=folder / f"{script}.out",
            env=env,
        )

    def waits(self) -> None:
        """Return when both processes wait."""
        self.job.until(
            lambda _: len(list(self._signs.iterdir())) == 2, "at the step where it waits"
        )

    def assert_resumed(self, by: str, layout: str, undisturbed: Outcome) -> None:
        """The run was stopped `by` one signal, resumed from the step it had come to, and ended as
        the undisturbed one.
        """
        facts = self.job.end()
        text = self.job.text()
        assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), text
        assert f"2 processes on {layout}" in text
        stop = re.search(rf"stopped by {by} at step (\d+)", text)
        assert stop and 0 <= int(stop[1]) - 5 <= 2, text
        assert re.findall(r"resuming from step (\d+)", text) == [stop[1]], text
        assert_same_run(self.run, undisturbed.folder)


def test_a_pre_empted_job_ends_as_the_undisturbed_run(slurm, undisturbed, tmp_path):
    """srun starts one process on each of two machines. They save when SLURM takes the machines for
    an urgent job.
    """
    held = Held(slurm, tmp_path, script="train.sh", flags="--ntasks-per-node=1")
    held.waits()
    argv = "--partition=urgent --nodes=2 --exclusive --wrap true".split()
    urgent = slurm.submit(argv, output=tmp_path / "urgent.out").end()
    assert urgent["JobState"] == "COMPLETED"
    held.assert_resumed("SIGTERM", "2 nodes", undisturbed["1"])


def test_a_job_that_is_asked_to_stop_requeues_itself(slurm, undisturbed, tmp_path):
    """SIGUSR1 goes to the batch script alone, which passes it on to accelerate launch."""
    held = Held(slurm, tmp_path, script="one_machine.sh", config="multi_cpu")
    held.waits()
    slurm(["scancel", "--signal=USR1", "--batch", held.job.number])
    held.assert_resumed("SIGUSR1", "1 node", undisturbed["1"])


@pytest.mark.long
def test_jobs_resume_after_a_signal_and_after_scontrol_requeue(slurm, undisturbed, tmp_path):
    """Processes that srun started get the signal themselves; a launcher on each of two machines is
    ended by a requeue.
    """
    signalled = Held(slurm, tmp_path, script="train.sh", flags="--ntasks-per-node=1")
    requeued = Held(slurm, tmp_path, script="launch.sh", config="2node_cpu")
    signalled.waits()
    slurm(["scancel", "--signal=USR1", signalled.job.number])
    requeued.waits()
    slurm(["scontrol", "requeue", requeued.job.number])
    signalled.assert_resumed("SIGUSR1", "2 nodes", undisturbed["1"])
    requeued.assert_resumed("SIGTERM", "2 nodes", undisturbed["1"])


@pytest.mark.long
def test_a_cancelled_job_saves_and_is_not_requeued(slurm, tmp_path):
    held = Held(slurm, tmp_path, script="one_machine.sh", config="multi_cpu")
    held.waits()
    slurm(["scancel", held.job.number])
    facts = held.job.end()
    text = held.job.text()
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), text
    assert "stopped by SIGTERM" in text, text


@pytest.mark.long
def test_an_array_trains_one_run_per_seed_side_by_side(slurm, undisturbed, tmp_path):
    """Both on one machine, with two processes each, which have to find each other."""
    flags = "--nodes=1 --nodelist=node1 --ntasks-per-node=2 --array=1-2".split()
    argv = ["recipes/cls.py"] + WORDS + ["--output_dir", tmp_path / "runs"]
    array = slurm.submit(CPU + flags + [SCRIPTS / "train.sh"] + argv, output=tmp_path / "%a.out")
    tasks = [Job(slurm, f"{array.number}_{seed}", tmp_path / f"{seed}.out") for seed in (1, 2)]
    facts = [task.end() for task in tasks]
    for each, task in zip(facts, tasks, strict=True):
        assert each["JobState"] == "COMPLETED" and "2 processes on 1 node" in task.text(), (
            task.text()
        )
    times = [
        [datetime.fromisoformat(each[name]) for name in ("StartTime", "EndTime")] for each in facts
    ]
    assert max(start for start, _ in times) < min(end for _, end in times), "one after the other"
    runs = {
        yaml.safe_load((run / "config.yaml").read_text())["seed"]: run
        for run in (tmp_path / "runs").iterdir()
    }
    assert runs.keys() == {1, 2}
    for seed, run in runs.items():
        assert_same_run(run, undisturbed[str(seed)].folder)
