"""A real SLURM of two machines (tests/harness/machines.py), from Debian's slurm-wlm and munge; it takes root."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

import pytest

from tests.harness.debian import require_package
from tests.harness.launching import inherited
from tests.harness.machines import Node, machines, require_namespaces
from tests.harness.waiting import Limit

# Four CPUs a machine, whatever it has. A requeued job waits for `cred_expire`, of which 5 s is the least.
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
        self._first, self._folder = first, folder

    def __call__(
        self, *words: object, env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """`words`, as a person types them in the root of the checkout; recipes run on the CPU, with one thread a process."""
        environ = {"SLURM_CONF": f"{self._folder}/slurm.conf", "CUDA_VISIBLE_DEVICES": "-1", **(env or {})}
        done = self._first.start_command(*words, env=environ).finish()
        assert not (check and done.returncode), f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def submit(self, *words: object, output: Path, **options) -> "Job":
        """`sbatch <words>`, with its output in the file `output`."""
        shown = self("sbatch", "--parsable", "--output", output, *words, **options).stdout
        return Job(self, shown.strip(), output)


class Job:
    """A batch job, or one task of an array."""

    def __init__(self, slurm: Slurm, number: str, output: Path) -> None:
        self.slurm, self.number, self.output = slurm, number, output

    def show(self) -> dict[str, str]:
        """What SLURM knows of it, such as JobState, Restarts, ExitCode."""
        shown = self.slurm("scontrol", "show", "job", "--oneliner", self.number).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def until(self, condition: Callable[[dict[str, str]], object], what: str, seconds: float = 120) -> dict[str, str]:
        """Wait for it, at most `seconds` of an idle machine; what SLURM knows then."""
        for _ in Limit(seconds).turns(0.2):
            if condition(known := self.show()):
                return known
        raise AssertionError(f"not {what}: {known}\n{self.text()}")

    def end(self, seconds: float = 120) -> dict[str, str]:
        """Wait for its end, also through requeues."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")  # while processes end it is COMPLETING
        return self.until(lambda known: known["JobState"] in over, "at its end", seconds)

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """SLURM with all its files in `folder`. Afterwards all its processes and jobs are killed."""
    for package in ("slurm-wlm", "munge"):
        require_package(package)
    if os.getuid():
        pytest.skip("a SLURM of this test's own takes root")
    require_namespaces(folder)
    with machines(2, folder, names_are_loopback=False) as nodes:
        rows = [f"NodeName={node.name} NodeAddr={node.address} CPUs=4" for node in nodes]
        text = CONFIGURATION.format(first=nodes[0], folder=folder, nodes="\n".join(rows))
        (folder / "slurm.conf").write_text(text)
        # Named, since slurmd would look for a version of cgroups, and there may be none; no plugin here uses them.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        for name in ("state", *(f"spool.{node.name}" for node in nodes)):
            (folder / name).mkdir()
        names = {"socket": "munge.socket", "key-file": key.name, "log-file": "munged.log"}
        names |= {"pid-file": "munged.pid", "seed-file": "munged.seed"}
        munged = ["munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in names.items())]
        environ = {**inherited(), "SLURM_CONF": str(folder / "slurm.conf")}
        log = (folder / "daemons.log").open("w")

        def start(node: Node, *words: str) -> subprocess.Popen:
            return subprocess.Popen([*node.before, *words], env=environ, stdout=log, stderr=log)

        slurm = Slurm(nodes[0], folder)
        daemons = [start(nodes[0], *munged)]
        try:
            _await(lambda: (folder / "munge.socket").exists(), log)
            daemons += [start(nodes[0], "slurmctld", "-D"), *(start(node, "slurmd", "-D") for node in nodes)]
            states = ("sinfo", "--noheader", "--format", "%T %D")
            _await(lambda: slurm(*states, check=False).stdout.split() == ["idle", "2"], log)
            yield slurm
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
