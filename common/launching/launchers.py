"""Launchers: what each of them tells a process about its world, and completing what it leaves out.

accelerate launch and torchrun set all variables that PyTorch reads; mpirun and srun set only their
own. Without completion, their processes would each train alone and end without an error.
"""

import hashlib
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import psutil

from common.errors import Refused
from common.launching.network import LOOPBACK, is_loopback

# `accelerate launch` always sets it; people may set the precision themselves.
ACCELERATE = "ACCELERATE_DYNAMO_BACKEND"
EXPORTED = "exported variables"
DEFAULT_PORT = 29500  # torch's and accelerate's, for processes that no job number joins


class _Variables(NamedTuple):
    """Names of the variables by which an MPI numbers its processes."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


_OPEN_MPI = _Variables(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
# And of Intel MPI, started by Hydra.
_MPICH = _Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PORTS = range(20000, 30000)  # below the ports that systems give to outgoing connections
# Parents of MPICH's processes.
_STARTERS = ("hydra_pmi_proxy", "mpiexec.hydra", "mpirun", "mpiexec")


@dataclass(frozen=True)
class Launch:
    """The numbers of this process in the run.

    `node_rank` and `num_nodes` are None if the launcher does not number the machines. `address` and
    `port` lead to rank 0's store; "" and 0 for a single process.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int | None = 0
    num_nodes: int | None = 1
    address: str = ""
    port: int = 0

    @property
    def variables(self) -> dict[str, int | None]:
        """The numbers by the names of the variables that PyTorch and Accelerate read."""
        return {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
        }


def complete(environ: MutableMapping[str, str]) -> Launch:
    """Find this process's launcher, and write the variables that it left out for PyTorch and Accelerate.

    These are RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE (if
    known), MASTER_ADDR and MASTER_PORT. Nothing is written for a single process, which forms no
    group. A second call changes nothing. Raises `Refused` if variables are missing or contradict
    each other.
    """
    present = {name: value for name, value in environ.items() if value.strip()}
    launch = _read_launch(present)
    _check(launch, present)
    if launch.world_size == 1:
        return replace(launch, address="", port=0)
    address = present.get("MASTER_ADDR", launch.address)
    port = _read_int(present, "MASTER_PORT", launch.port)
    for name, value in launch.variables.items():
        if value is not None:
            environ[name] = str(value)
    environ["MASTER_ADDR"] = address
    environ["MASTER_PORT"] = str(port)
    return replace(launch, address=address, port=port)


def local_rank(environ: Mapping[str, str]) -> str | None:
    """The number of this process on its machine, also if `complete` has refused the variables.

    None without a launcher.
    """
    names = ["LOCAL_RANK", "SLURM_LOCALID"]
    if not is_started_by_agent(environ):
        names = [_OPEN_MPI.local_rank, _MPICH.local_rank] + names
    for name in names:
        if name in environ:
            return environ[name]
    return None


def is_started_by_agent(environ: Mapping[str, str]) -> bool:
    """True if torchrun's agent started this process.

    The agent is torchrun itself, accelerate launch or notebook_launcher.
    """
    return "TORCHELASTIC_RUN_ID" in environ


# --- one reader per launcher; None if the process is not of that launcher


def _read_launch(environ: Mapping[str, str]) -> Launch:
    """The launch as this process's launcher describes it."""
    for read in (_read_agent, _read_mpi, _read_srun, _read_by_hand):
        launch = read(environ)
        if launch:
            return launch
    return _read_single_process(environ)


def _read_agent(environ: Mapping[str, str]) -> Launch | None:
    """torchrun, and accelerate launch with several processes or machines, which runs torchrun's agent.

    It comes first: `srun torchrun` starts one agent per machine, whose processes inherit srun's
    variables too.
    """
    if not is_started_by_agent(environ):
        return None
    launcher = "accelerate launch" if ACCELERATE in environ else "torchrun"
    if "NPROC" in environ and "MIXED_PRECISION" in environ:
        launcher = "notebook_launcher"
        precision = environ["MIXED_PRECISION"]
        if precision not in ("no", environ.get("ACCELERATE_MIXED_PRECISION")):
            raise Refused(
                f"notebook_launcher(mixed_precision={precision!r}) has no effect in Accelerate: "
                "set os.environ['ACCELERATE_MIXED_PRECISION'] before the call instead"
            )
    return _read_exported(environ, launcher)


def _read_mpi(environ: Mapping[str, str]) -> Launch | None:
    if _OPEN_MPI.world_size in environ:
        launcher = "Open MPI"
        names = _OPEN_MPI
    elif _MPICH.local_world_size in environ:  # srun may set PMI_SIZE, too
        is_intel = any(name.startswith("I_MPI_") for name in environ)
        launcher = "Intel MPI" if is_intel else "MPICH"
        names = _MPICH
    else:
        return None
    rank = _read_int(environ, names.rank)
    world_size = _read_int(environ, names.world_size)
    local_rank = _read_int(environ, names.local_rank)
    local_world_size = _read_int(environ, names.local_world_size)
    is_one_machine = local_world_size == world_size
    launch = Launch(
        launcher,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=0 if is_one_machine else None,
        num_nodes=1 if is_one_machine else None,
    )
    if launcher == "Open MPI":
        return _add_open_mpi_address(launch, environ)
    return _add_address(launch, environ)


def _add_open_mpi_address(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """Versions 4 and 5. The main machine runs mpirun, and rank 0 unless a host file says otherwise."""
    hnp_uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    namespace = environ.get("PMIX_NAMESPACE", "")
    if launch.num_nodes == 1:
        return _meet_on_loopback(launch, hnp_uri, namespace)
    address = ""
    is_main_machine = True
    # Version 4: all addresses of mpirun's machine.
    version_4 = re.search(r";tcp://([^,:;]+)|;tcp6://\[([^],]+)", hnp_uri)
    version_5 = re.match(r"prterun-(.+)-\d+@", namespace)  # its name
    if version_4:
        address = version_4[1] or version_4[2]
        is_main_machine = environ.get("OMPI_MCA_orte_local_daemon_uri", hnp_uri) == hnp_uri
    elif version_5:
        address = version_5[1]
        is_main_machine = environ.get("PMIX_HOSTNAME", address) == address
    if "MASTER_ADDR" not in environ and (not address or (launch.rank == 0 and not is_main_machine)):
        raise Refused(
            "rank 0 does not run on mpirun's own machine, the only one whose address the others "
            "know: export MASTER_ADDR, the address of rank 0's machine, and start with mpirun -x "
            "MASTER_ADDR"
        )
    return replace(launch, address=address, port=_choose_port(hnp_uri, namespace))


def _read_srun(environ: Mapping[str, str]) -> Launch | None:
    """A task of a SLURM job step.

    SLURM_NTASKS is not read: batch scripts, which are one process, have it too.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    node_rank = _read_int(environ, "SLURM_NODEID", 0)
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    local_world_sizes = _parse_tasks_per_node(tasks_per_node)
    num_nodes = len(local_world_sizes)
    world_size = _read_int(environ, "SLURM_STEP_NUM_TASKS")
    if node_rank >= num_nodes or sum(local_world_sizes) != world_size:
        raise Refused(
            f"SLURM_STEP_TASKS_PER_NODE={tasks_per_node} does not fit to "
            f"SLURM_STEP_NUM_TASKS={world_size} and SLURM_NODEID={node_rank}: start the recipe "
            "with srun, once per job step"
        )
    launch = Launch(
        "srun",
        rank=_read_int(environ, "SLURM_PROCID"),
        local_rank=_read_int(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=local_world_sizes[node_rank],
        node_rank=node_rank,
        num_nodes=num_nodes,
    )
    job = environ.get("SLURM_JOB_ID", "")
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if num_nodes == 1:
        return _meet_on_loopback(launch, job, step)
    hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    if "MASTER_ADDR" not in environ and (not hosts or (launch.rank == 0 and node_rank > 0)):
        raise Refused(
            "rank 0 is not on the first machine of SLURM_STEP_NODELIST, so the others don't know "
            "where to meet it: export MASTER_ADDR, the address of its machine, before srun"
        )
    return replace(launch, address=get_first_host(hosts), port=_choose_port(job, step))


def _parse_tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node: "2(x2),1" -> [2, 2, 1]."""
    num_tasks = []
    for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        num_tasks += [int(size)] * int(times or 1)
    return num_tasks


def _read_by_hand(environ: Mapping[str, str]) -> Launch | None:
    """Variables that a person or another program exported for each process."""
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):  # of a Kubernetes operator
        if environ.get(name, "1") != "1":
            raise Refused(
                f"{name}={environ[name]} is for torchrun, but python started this process: start "
                "the recipe with torchrun, which reads it"
            )
    if _read_int(environ, "WORLD_SIZE", 1) == 1 and "LOCAL_RANK" not in environ:
        return None
    return _read_exported(environ, EXPORTED)


def _read_single_process(environ: Mapping[str, str]) -> Launch:
    """One process: accelerate launch without several processes, or plain python."""
    if ACCELERATE in environ:
        return Launch("accelerate launch")
    if _read_int(environ, "PMI_SIZE", 1) > 1:
        raise Refused(
            f"PMI_SIZE={environ['PMI_SIZE']} is the number of all processes, but this machine's "
            "number is not known: export RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for each process"
        )
    num_tasks = max(
        _read_int(environ, "SLURM_NTASKS", 1), _read_int(environ, "SLURM_JOB_NUM_NODES", 1)
    )
    if num_tasks > 1:
        raise Refused(
            f"this SLURM job has {num_tasks} tasks, but python started only this process: put srun "
            "before python, or srun -n 1 for one process"
        )
    return Launch("python")


# --- shared by readers


def _read_exported(environ: Mapping[str, str], launcher: str) -> Launch:
    """The world that torch's own variables describe."""
    world_size = _read_int(environ, "WORLD_SIZE")
    rank = _read_int(environ, "RANK")
    address = environ.get("MASTER_ADDR", "")
    default_local_rank = None
    default_local_world_size = None
    if (
        world_size == 1
        or (address and is_loopback(address))
        or environ.get("GROUP_WORLD_SIZE") == "1"
    ):
        default_local_rank = rank
        default_local_world_size = world_size
    local_rank = _read_int(environ, "LOCAL_RANK", default_local_rank)
    local_world_size = _read_int(environ, "LOCAL_WORLD_SIZE", default_local_world_size)
    is_one_machine = local_world_size == world_size
    node_rank = 0 if is_one_machine else None
    num_nodes = 1 if is_one_machine else None
    if "GROUP_RANK" in environ:
        node_rank = _read_int(environ, "GROUP_RANK")
    if "GROUP_WORLD_SIZE" in environ:
        num_nodes = _read_int(environ, "GROUP_WORLD_SIZE")
    launch = Launch(
        launcher,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        address=address or LOOPBACK,
        port=_read_int(environ, "MASTER_PORT", DEFAULT_PORT),
    )
    if address or is_one_machine:
        return launch
    return _add_address(launch, environ)


def _add_address(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """For launchers whose processes know neither the first machine nor a number of their job."""
    if launch.num_nodes == 1:
        parents = psutil.Process().parents()
        # Not a shell script between.
        starters = [parent for parent in parents if parent.name() in _STARTERS]
        if not starters:
            starters = parents
        jobs = [f"{starter.pid} {starter.create_time()}" for starter in starters[:1]]
        return _meet_on_loopback(launch, *jobs)
    if "MASTER_ADDR" not in environ:
        raise Refused(
            f"{launch.launcher} does not tell the processes of several machines where to meet: "
            "export MASTER_ADDR, the address of rank 0's machine, before the command"
        )
    return replace(launch, port=DEFAULT_PORT)


def _meet_on_loopback(launch: Launch, *job: str) -> Launch:
    """The launch with a loopback address, on Linux one that only this job has.

    So two jobs never share a port.
    """
    address = LOOPBACK
    if sys.platform == "linux":
        first, second, third = _hash(job)[:3]
        address = f"127.{first}.{second}.{1 + third % 254}"
    return replace(launch, address=address, port=_choose_port(*job))


def _choose_port(*job: str) -> int:
    """A port that all processes of a job compute alike."""
    index = int.from_bytes(_hash(job)[-4:], "big") % len(_PORTS)
    return _PORTS[index]


def _hash(job: tuple[str, ...]) -> bytes:
    return hashlib.sha256(repr(job).encode()).digest()


def get_first_host(hosts: str) -> str:
    """The first name in a SLURM node list: get_first_host("gpu[007-009,12],cpu1") -> "gpu007"."""
    first_entry = re.match(r"(?:[^,\[]|\[[^]]*\])*", hosts)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first_entry[0]) if first_entry else ""


def _read_int(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable as a number; a missing one is refused if there is no default."""
    text = environ.get(name, default)
    if text is None:
        exported = ""
        way_out = ""
        if "WORLD_SIZE" in environ:
            exported = f"WORLD_SIZE={environ['WORLD_SIZE']} is exported, but "
            way_out = "unset WORLD_SIZE to train with one process, "
        raise Refused(
            f"{exported}{name} is not set, so this process doesn't know its place among the "
            f"others: {way_out}start the recipe with accelerate launch, or export RANK, "
            "LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"
        )
    try:
        return int(text)
    except ValueError:
        raise Refused(f"{name}={text} is not a whole number") from None


def _check(launch: Launch, environ: Mapping[str, str]) -> None:
    """Raise `Refused` if the numbers can't be right, or if other variables contradict them."""
    world_size = launch.world_size
    local_world_size = launch.local_world_size
    has_valid_rank = 0 <= launch.rank < world_size
    has_valid_local_rank = 0 <= launch.local_rank < local_world_size <= world_size
    if not has_valid_rank or not has_valid_local_rank:
        raise Refused(
            f"{launch.launcher} says that this is rank {launch.rank} of {world_size} and local "
            f"rank {launch.local_rank} of {local_world_size}, which can't be: look at its variables"
        )
    for name, expected in launch.variables.items():
        if name in environ and expected is not None and environ[name] != str(expected):
            raise Refused(
                f"{name}={environ[name]} contradicts {launch.launcher}, which says {expected} "
                f"(rank {launch.rank} of {launch.world_size}): unset {name}, or start the "
                "processes with one launcher only"
            )
