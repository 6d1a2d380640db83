"""Launchers: what each of them tells a process about its world, and completing what it leaves out.

accelerate launch and torchrun set all variables that PyTorch reads; mpirun and srun set only their
own. Without completion, their processes would each train alone and end without an error.
"""

import hashlib
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace

import psutil

from common.errors import Refused
from common.launching.network import LOOPBACK, is_loopback

# `accelerate launch` always sets it; people may set the precision themselves.
ACCELERATE = "ACCELERATE_DYNAMO_BACKEND"
EXPORTED = "exported variables"
DEFAULT_PORT = 29500  # torch's and accelerate's, for processes that no job number joins
_MPI = {  # the variables of rank, number of processes, and the same on this machine
    "Open MPI": [
        f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ],
    # and Intel MPI, started by Hydra
    "MPICH": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
}
_PORTS = range(20000, 30000)  # below the ports that systems give to outgoing connections
# Parents of MPICH's processes.
_STARTERS = ("hydra_pmi_proxy", "mpiexec.hydra", "mpirun", "mpiexec")


@dataclass(frozen=True)
class Launch:
    """This process's place in the run. `node_rank` and `nodes` are None if the launcher does not
    number the machines.

    `address` and `port` lead to rank 0's store; "" and 0 for a single process.
    """

    launcher: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int | None = 0
    nodes: int | None = 1
    address: str = ""
    port: int = 0

    @property
    def numbers(self) -> dict[str, int | None]:
        """The numbers by the names under which PyTorch and Accelerate read them."""
        return {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.nodes,
        }


def complete(environ: MutableMapping[str, str]) -> Launch:
    """Find the launcher of this process, and write what it left out of the variables that PyTorch
    and Accelerate read.

    These are RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE (if
    known), MASTER_ADDR and MASTER_PORT. Nothing is written for a single process, which forms no
    group. A second call changes nothing. Raises `Refused` if variables are missing or contradict
    each other.
    """
    given = {name: value for name, value in environ.items() if value.strip()}
    launch = next(filter(None, (read(given) for read in _READERS)))
    _check(launch, given)
    if launch.world_size == 1:
        return replace(launch, address="", port=0)
    address, port = (
        given.get("MASTER_ADDR", launch.address),
        _int(given, "MASTER_PORT", launch.port),
    )
    known = launch.numbers | {"MASTER_ADDR": address, "MASTER_PORT": port}
    environ.update({name: str(value) for name, value in known.items() if value is not None})
    return replace(launch, address=address, port=port)


def local_rank(environ: Mapping[str, str]) -> str | None:
    """The number of this process on its machine, also if `complete` has refused the variables; None
    without a launcher.
    """
    names = [] if is_started_by_agent(environ) else [variables[2] for variables in _MPI.values()]
    return next(
        (environ[name] for name in (*names, "LOCAL_RANK", "SLURM_LOCALID") if name in environ), None
    )


def is_started_by_agent(environ: Mapping[str, str]) -> bool:
    """True if torchrun's agent started this process: torchrun itself, accelerate launch or
    notebook_launcher.
    """
    return "TORCHELASTIC_RUN_ID" in environ


# --- one reader per launcher; None if the process is not of that launcher


def _agent(environ: Mapping[str, str]) -> Launch | None:
    """torchrun, and accelerate launch with several processes or machines, which runs torchrun's agent.

    It comes first: `srun torchrun` starts one agent per machine, whose processes inherit srun's
    variables too.
    """
    if not is_started_by_agent(environ):
        return None
    is_notebook = {"NPROC", "MIXED_PRECISION"} <= environ.keys()
    if is_notebook and environ["MIXED_PRECISION"] not in (
        "no",
        environ.get("ACCELERATE_MIXED_PRECISION"),
    ):
        raise Refused(
            f"notebook_launcher(mixed_precision={environ['MIXED_PRECISION']!r}) has no effect in "
            "Accelerate: set os.environ['ACCELERATE_MIXED_PRECISION'] before the call instead"
        )
    name = "accelerate launch" if ACCELERATE in environ else "torchrun"
    return _exported(environ, "notebook_launcher" if is_notebook else name)


def _mpi(environ: Mapping[str, str]) -> Launch | None:
    # srun may set PMI_SIZE, too.
    names = (
        name
        for name, (_, size, _, here) in _MPI.items()
        if (here if name == "MPICH" else size) in environ
    )
    if not (name := next(names, "")):
        return None
    rank, size, local_rank, here = (_int(environ, variable) for variable in _MPI[name])
    if name == "MPICH" and any(variable.startswith("I_MPI_") for variable in environ):
        name = "Intel MPI"
    node, nodes = (0, 1) if here == size else (None, None)
    launch = Launch(name, rank, local_rank, size, here, node, nodes)
    return _open_mpi(launch, environ) if name == "Open MPI" else _without_address(launch, environ)


def _open_mpi(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """Versions 4 and 5. The main machine runs mpirun, and rank 0 unless a host file says otherwise."""
    hnp, job = environ.get("OMPI_MCA_orte_hnp_uri", ""), environ.get("PMIX_NAMESPACE", "")
    if launch.nodes == 1:
        return _on_one_machine(launch, hnp, job)
    address, away = "", False
    # Version 4: all addresses of mpirun's machine.
    if found := re.search(r";tcp://([^,:;]+)|;tcp6://\[([^],]+)", hnp):
        address = found[1] or found[2]
        away = environ.get("OMPI_MCA_orte_local_daemon_uri", hnp) != hnp
    elif found := re.match(r"prterun-(.+)-\d+@", job):  # version 5: its name
        address, away = found[1], environ.get("PMIX_HOSTNAME", found[1]) != found[1]
    if "MASTER_ADDR" not in environ and (not address or (launch.rank == 0 and away)):
        raise Refused(
            "rank 0 does not run on mpirun's own machine, the only one whose address the others "
            "know: export MASTER_ADDR, the address of rank 0's machine, and start with mpirun -x "
            "MASTER_ADDR"
        )
    return replace(launch, address=address, port=_port(hnp, job))


def _srun(environ: Mapping[str, str]) -> Launch | None:
    """A task of a SLURM job step. SLURM_NTASKS is not read: batch scripts, which are one process,
    have it too.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    node = _int(environ, "SLURM_NODEID", 0)
    sizes = [
        int(size)
        for size, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")
        )
        for _ in range(int(times or 1))
    ]
    world_size = _int(environ, "SLURM_STEP_NUM_TASKS")
    if not node < len(sizes) or sum(sizes) != world_size:
        raise Refused(
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE', '')} does not "
            f"fit to SLURM_STEP_NUM_TASKS={world_size} and SLURM_NODEID={node}: start the recipe "
            "with srun, once per job step"
        )
    rank, local_rank = _int(environ, "SLURM_PROCID"), _int(environ, "SLURM_LOCALID")
    launch = Launch("srun", rank, local_rank, world_size, sizes[node], node, len(sizes))
    job = (
        environ.get("SLURM_JOB_ID", ""),
        environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "")),
    )
    if launch.nodes == 1:
        return _on_one_machine(launch, *job)
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if "MASTER_ADDR" not in environ and (not hosts or (rank == 0 and node > 0)):
        raise Refused(
            "rank 0 is not on the first machine of SLURM_STEP_NODELIST, so the others don't know "
            "where to meet it: export MASTER_ADDR, the address of its machine, before srun"
        )
    return replace(launch, address=get_first_host(hosts), port=_port(*job))


def _by_hand(environ: Mapping[str, str]) -> Launch | None:
    """Variables that a person or another program exported for each process."""
    for name in ("PET_NNODES", "PET_NPROC_PER_NODE"):  # of a Kubernetes operator
        if environ.get(name, "1") != "1":
            raise Refused(
                f"{name}={environ[name]} is for torchrun, but python started this process: start "
                "the recipe with torchrun, which reads it"
            )
    if _int(environ, "WORLD_SIZE", 1) == 1 and "LOCAL_RANK" not in environ:
        return None
    return _exported(environ, EXPORTED)


def _alone(environ: Mapping[str, str]) -> Launch:
    """One process: accelerate launch without several processes, or plain python."""
    if ACCELERATE in environ:
        return Launch("accelerate launch")
    if _int(environ, "PMI_SIZE", 1) > 1:
        raise Refused(
            f"PMI_SIZE={environ['PMI_SIZE']} is the number of all processes, but this machine's "
            "number is not known: export RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for each process"
        )
    if (
        tasks := max(_int(environ, name, 1) for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"))
    ) > 1:
        raise Refused(
            f"this SLURM job has {tasks} tasks, but python started only this process: put srun "
            "before python, or srun -n 1 for one process"
        )
    return Launch("python")


_READERS: tuple[Callable[[Mapping[str, str]], Launch | None], ...]
_READERS = (_agent, _mpi, _srun, _by_hand, _alone)


# --- parts of readers


def _exported(environ: Mapping[str, str], name: str) -> Launch:
    """The world that torch's own variables describe."""
    world_size, rank, address = (
        _int(environ, "WORLD_SIZE"),
        _int(environ, "RANK"),
        environ.get("MASTER_ADDR", ""),
    )
    on_one = (
        world_size == 1
        or (address and is_loopback(address))
        or environ.get("GROUP_WORLD_SIZE") == "1"
    )
    local_rank = _int(environ, "LOCAL_RANK", rank if on_one else None)
    here = _int(environ, "LOCAL_WORLD_SIZE", world_size if on_one else None)
    node, nodes = (0, 1) if here == world_size else (None, None)
    node = _int(environ, "GROUP_RANK", node) if "GROUP_RANK" in environ else node
    nodes = _int(environ, "GROUP_WORLD_SIZE", nodes) if "GROUP_WORLD_SIZE" in environ else nodes
    port = _int(environ, "MASTER_PORT", DEFAULT_PORT)
    launch = Launch(
        name, rank, local_rank, world_size, here, node, nodes, address or LOOPBACK, port
    )
    return launch if address or here == world_size else _without_address(launch, environ)


def _without_address(launch: Launch, environ: Mapping[str, str]) -> Launch:
    """For launchers whose processes know neither the first machine nor a number of their job."""
    if launch.nodes == 1:
        parents = psutil.Process().parents()
        # Not a shell script between.
        starters = [parent for parent in parents if parent.name() in _STARTERS] or parents
        return _on_one_machine(
            launch, *(f"{starter.pid} {starter.create_time()}" for starter in starters[:1])
        )
    if "MASTER_ADDR" not in environ:
        raise Refused(
            f"{launch.launcher} does not tell the processes of several machines where to meet: "
            "export MASTER_ADDR, the address of rank 0's machine, before the command"
        )
    return replace(launch, port=DEFAULT_PORT)


def _on_one_machine(launch: Launch, *job: str) -> Launch:
    """Meet on the loopback. On Linux each job has a loopback address of its own, so that two jobs
    never share a port.
    """
    first, second, third = hashlib.sha256(repr(job).encode()).digest()[:3]
    own = f"127.{first}.{second}.{1 + third % 254}"
    return replace(launch, address=own if sys.platform == "linux" else LOOPBACK, port=_port(*job))


def _port(*job: str) -> int:
    """A port that all processes of a job compute alike."""
    return _PORTS[
        int.from_bytes(hashlib.sha256(repr(job).encode()).digest()[-4:], "big") % len(_PORTS)
    ]


def get_first_host(hosts: str) -> str:
    """The first name in a SLURM node list: first_host("gpu[007-009,12],cpu1") -> "gpu007"."""
    found = re.match(r"(?:[^,\[]|\[[^]]*\])*", hosts)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", found[0]) if found else ""


def _int(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable as a number; a missing one is refused if there is no default."""
    text = environ.get(name, default)
    if text is None:
        of = (
            f"WORLD_SIZE={environ['WORLD_SIZE']} is exported, but "
            if "WORLD_SIZE" in environ
            else ""
        )
        raise Refused(
            f"{of}{name} is not set, so this process doesn't know its place among the others: "
            + "unset WORLD_SIZE to train with one process, " * bool(of)
            + "start the recipe with accelerate launch, or export RANK, LOCAL_RANK, WORLD_SIZE, "
            "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"
        )
    try:
        return int(text)
    except ValueError:
        raise Refused(f"{name}={text} is not a whole number") from None


def _check(launch: Launch, environ: Mapping[str, str]) -> None:
    """Raise `Refused` if the numbers can't be right, or if other variables contradict them."""
    here, everywhere = launch.local_world_size, launch.world_size
    if not (0 <= launch.rank < everywhere and 0 <= launch.local_rank < here <= everywhere):
        raise Refused(
            f"{launch.launcher} says that this is rank {launch.rank} of {everywhere} and local "
            f"rank {launch.local_rank} of {here}, which can't be: look at its variables"
        )
    for name, found in launch.numbers.items():
        if name in environ and found is not None and environ[name] != str(found):
            raise Refused(
                f"{name}={environ[name]} contradicts {launch.launcher}, which says {found} (rank "
                f"{launch.rank} of {launch.world_size}): unset {name}, or start the processes "
                "with one launcher only"
            )
