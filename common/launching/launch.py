"""Launch: joins the processes that a launcher started into one run, after checks of the launch."""

import atexit
import contextlib
import ctypes
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)

from common.config.fields import RunConfig
from common.distributed import collectives, determinism, devices, sharding, watchdog
from common.distributed.collectives import gather_objects
from common.distributed.environment import count_cores, get_parent_command
from common.durable import replace_file
from common.errors import Refused, RestartNeeded, make_printable
from common.files import SMALL, read_text
from common.launching import launch_checks, launchers
from common.launching.exit_codes import (
    END,
    EXIT_FOLDER,
    MIN_MACHINES,
    RESTART,
    RESUMABLE,
    announce_exit,
    find_leavers,
    read_notice,
)
from common.launching.launch_checks import is_cpu_requested
from common.launching.launchers import EXPORTED, Launch, complete
from common.launching.meeting import meet
from common.patches.accelerate import skip_search_for_lomo
from common.process import guard_streams

# How long the other processes of a machine wait for the first one to print the refusal.
REFUSAL_DELAY_S = 20.0
# If set, a person has chosen.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
MARGIN = timedelta(minutes=1)  # of the timeout of collectives, beyond twice the watchdog's
NOTICE_S = 10.0  # how long a process waits until its launcher has read the announced exit code
_PARENT = os.getppid()  # read early, while the launcher is certainly alive
# notebook_launcher forks its processes from one that has imported this.
os.register_at_fork(after_in_child=lambda: globals().update(_PARENT=os.getppid()))


def start(config: RunConfig | None = None) -> Accelerator:
    """Join the processes that a launcher started (see launchers.py), and return the Accelerator.

    The processes compare code, package versions and, if given, the configuration. Then the watchdog starts.

    Must be called first: an Accelerator, a PartialState or an accelerate logger made earlier would
    form the group without these checks. The launch sets device and precision. Raises `Refused`.
    """
    launch = complete(os.environ)
    on_cpu = _prepare_devices(launch)
    settings = RunConfig() if config is None else config
    requested_sharding = launch_checks.read_sharding(os.environ)
    if requested_sharding and launch.world_size > 1:
        launch_checks.check_sharded_config(settings)
    determinism.set_deterministic(False if on_cpu else settings.deterministic)
    # For the initial weights of a custom module; all else draws from keys.
    torch.manual_seed(settings.seed)
    store = meet(os.environ, launch, config)
    accelerator = _build_accelerator(settings, on_cpu)
    if store:
        watchdog.start(
            store,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            timeout=settings.collective_timeout,
            program=Path(sys.argv[0]).name,
        )
    if accelerator.num_processes != launch.world_size:
        raise Refused(
            f"launched as {launch.world_size} processes, but accelerate formed a world of "
            f"{accelerator.num_processes} on {accelerator.device.type}: launch with a file of "
            "accelerate_configs/"
        )
    if launch.num_nodes is None:  # mpirun does not number the machines
        node_rank = collectives.node_rank()
        num_nodes = max(gather_objects(node_rank)) + 1
        os.environ["GROUP_RANK"] = str(node_rank)
        os.environ["GROUP_WORLD_SIZE"] = str(num_nodes)
    sharding.configure(requested_sharding, accelerator.device)
    if accelerator.device.type == "cuda":
        _refuse_shared_devices(accelerator.device)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    return accelerator


def _prepare_devices(launch: Launch) -> bool:
    """Check that the launch has its devices, and prepare their use. Returns True for the CPU.

    Raises `Refused`.
    """
    num_accelerators = 0
    if torch.accelerator.is_available():
        num_accelerators = torch.accelerator.device_count()
    requested = launch_checks.parse_requested_processes(get_parent_command())
    launch_checks.check_launch(os.environ, launch, num_accelerators, requested)
    if is_cpu_requested(os.environ):
        share_cores(os.environ, launch)
        return True
    if num_accelerators == 0:
        if launch.launcher in ("torchrun", EXPORTED):
            print_on_main("this machine shows no GPU: the run trains on the CPU")
        share_cores(os.environ, launch)
        return True
    use_expandable_segments(os.environ)
    return False


def _build_accelerator(settings: RunConfig, on_cpu: bool) -> Accelerator:
    """The Accelerator of data parallelism, whatever engine the launch names.

    Joins the process group, a collective.
    """
    # torch 2.14 recommends a replacement that 2.11 does not have.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    # Harmless: 1 x 1 convolutions, whose strides are ambiguous.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    # Collectives and torch's NCCL watchdog wait until long after our watchdog has named the
    # culprit: a process may note progress while its device still waits for an earlier step.
    timeout = timedelta(seconds=2 * settings.collective_timeout) + MARGIN
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{timeout.total_seconds():.0f}")
    collectives.set_timeout(timeout)
    skip_search_for_lomo()
    comm_hook = "no" if settings.comm_hook == "none" else settings.comm_hook
    ddp = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # the recipes synchronise running statistics themselves
        comm_hook=DDPCommunicationHookType(comm_hook),
    )
    with _hide_sharding(os.environ):
        return Accelerator(
            cpu=on_cpu,
            gradient_accumulation_steps=1,
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[ddp, InitProcessGroupKwargs(timeout=timeout)],
        )


def run(main: Callable[[], None]) -> None:
    """Run a recipe's `main`, and end the process with the right exit code and message.

    A refusal is printed in one line, by one process per machine, with exit code 2. After
    `RestartNeeded`, a single process restarts itself; several processes need a launcher that
    restarts them. A process that fails alone prints its traceback and rank; the other processes
    only print that they have lost one.
    """
    guard_streams()
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # Else classes would get the names of folders in another encoding.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    # torch.distributed.launch says it also in the environment, as torchrun does.
    local_rank = os.environ.get("LOCAL_RANK")
    flags = (f"--local-rank={local_rank}", f"--local_rank={local_rank}")
    sys.argv = [arg for arg in sys.argv if arg not in flags]
    program = Path(sys.argv[0]).name
    try:
        complete(os.environ)  # main may ask for LOCAL_RANK before it starts the run
        main()
    except Refused as refusal:
        _print_once_per_machine(f"{program}: {refusal}")
        announce_exit(2)
        sys.exit(2)
    except RestartNeeded as request:
        if os.environ.get("RANK", "0") != "0":  # the main process has printed it
            print(f"{program}: {_describe_rank()}: {request}", file=sys.stderr, flush=True)
        if not torch.distributed.is_initialized():
            atexit._run_exitfuncs()  # exec skips them, and a dashboard's service would stay
            sys.stdout.flush()
            os.execv(sys.executable, sys.orig_argv)
        sys.exit(1)
    except Exception as error:
        if not collectives.is_lost_peer(error):
            error.add_note(f"on {_describe_rank()}")
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            message = f"{program}: {_describe_rank()} lost another process: see its message"
            print(message, file=sys.stderr)
        sys.exit(1)
    finally:
        watchdog.stop()
    collectives.leave_process_group()


def print_on_main(text: str) -> None:
    """Print a line on the main process."""
    if os.environ.get("RANK", "0") == "0":
        print(make_printable(text), flush=True)


def is_orphaned() -> bool:
    """True if the launcher of this process is gone: killed, or ended by a signal that it does not forward.

    Such a process keeps its device and run folder from the next start.
    """
    if os.getppid() == _PARENT:
        return False
    return complete(os.environ).launcher != "python"


def get_machine_rank() -> int:
    """Number of this machine in the run; 0 if no launcher has numbered the machines."""
    return int(os.environ.get("GROUP_RANK", 0))


def gather_leavers(is_requested: bool) -> list[int]:
    """The machines that leave a run whose processes have agreed to stop. A collective.

    `is_requested`: this machine was asked to stop. One process that was asked: [0]; two machines
    of which the second was asked: [1] or [0, 1]; neither: [].
    """
    num_machines = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    min_machines = int(os.environ.get(MIN_MACHINES, num_machines))
    requested = set()
    for machine, is_machine_requested in gather_objects((get_machine_rank(), is_requested)):
        if is_machine_requested:
            requested.add(machine)
    return find_leavers(requested, num_machines, min_machines)


def leave_now(is_requested: bool) -> NoReturn:
    """End this process at once as resumable. No communication.

    `is_requested`: this machine was asked to stop, so that it leaves the run.
    """
    announce_exit(RESUMABLE, [get_machine_rank()] if is_requested else [])
    sys.stdout.flush()
    os._exit(RESUMABLE)


def leave(code: int, leavers: Collection[int]) -> NoReturn:
    """End this process with `code`, once its launcher knows which machines leave the run.

    The launcher counts an unannounced end as a failure (`--max_restarts`).
    """
    if EXIT_FOLDER not in os.environ:
        with contextlib.suppress(RuntimeError):  # another process is lost, and its message printed
            # Mpirun and others kill all processes soon after the first has ended with an error
            # code.
            collectives.barrier()
        collectives.leave_process_group()  # `run` does it only after a `main` that returns
        sys.exit(code)
    announce_exit(code, leavers)
    deadline = time.monotonic() + NOTICE_S
    while read_notice() not in (RESTART, END) and not is_orphaned() and time.monotonic() < deadline:
        time.sleep(0.02)
    sys.stdout.flush()
    os._exit(code)  # all files are closed; in a normal exit of Python, threads of gloo may hang


def describe_launch(accelerator: Accelerator, dtype: str) -> str:
    """Processes, device and precision of a run with weights of type `dtype`, for the start table.

    One process: "1 process, cpu, fp32, started by python". Two ranks, on both: "2 processes on 1
    node, cpu (gloo), fp32, started by accelerate launch".
    """
    world = "1 process"
    device = devices.get_device_name(accelerator.device)
    if torch.distributed.is_initialized():
        num_processes = accelerator.num_processes
        num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        processes = "processes" if num_processes > 1 else "process"
        nodes = "nodes" if num_nodes > 1 else "node"
        world = f"{num_processes} {processes} on {num_nodes} {nodes}"
        device += f" ({torch.distributed.get_backend()})"
    precision = get_precision(accelerator, dtype)
    launcher = complete(os.environ).launcher
    return f"{world}, {device}, {precision}, started by {launcher}"


def get_precision(accelerator: Accelerator, dtype: str) -> str:
    """The precision of the computation with weights of type `dtype`.

    It is fp64, fp32, fp32 (TF32), fp16 or bf16.
    """
    if dtype == "float64":
        return "fp64"
    precision = launch_checks.PRECISION_NAMES[accelerator.mixed_precision]
    uses_cuda = accelerator.device.type == "cuda"
    if precision == "fp32" and uses_cuda and torch.backends.cuda.matmul.allow_tf32:
        return "fp32 (TF32)"
    return precision


def share_cores(environ: MutableMapping[str, str], launch: Launch) -> None:
    """Divide this machine's cores among its processes, unless a person or the launcher has done so.

    By default, `accelerate launch` and torchrun set OMP_NUM_THREADS to 1; a person's number is in
    their own environment or flags. mpirun and srun set nothing, but may bind each process to cores.
    Without the variable Accelerate would divide the cores itself, bound or not.
    """
    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process(os.getppid())
        if not _should_share_cores(environ, launch, launcher):
            return
        num_threads = min(psutil.cpu_count(logical=False) or 1, count_cores())
        if not _is_bound_to_cores(launcher):
            num_threads //= launch.local_world_size
        num_threads = max(1, num_threads)
        torch.set_num_threads(num_threads)
        environ.setdefault("OMP_NUM_THREADS", str(num_threads))


def _should_share_cores(
    environ: Mapping[str, str], launch: Launch, launcher: psutil.Process
) -> bool:
    """True if OMP_NUM_THREADS is the launcher's default, or missing with several processes."""
    is_set_by_person = "OMP_NUM_THREADS" in launcher.environ()
    for arg in get_parent_command():
        is_set_by_person |= arg.startswith("--num_cpu_threads")
    # By the launcher's name: a script that exports ACCELERATE_MIXED_PRECISION before srun may
    # export this number, too.
    sets_one = launch.launcher in ("accelerate launch", "torchrun")
    if sets_one and not is_set_by_person and environ.get("OMP_NUM_THREADS") == "1":
        return True
    if launch.world_size == 1:
        return False
    return "OMP_NUM_THREADS" not in environ


def _is_bound_to_cores(launcher: psutil.Process) -> bool:
    """True if this process has other cores than its launcher, so that no other process uses them."""
    if not hasattr(launcher, "cpu_affinity"):
        return False
    return launcher.cpu_affinity() != psutil.Process().cpu_affinity()


def use_expandable_segments(environ: MutableMapping[str, str]) -> None:
    """Make torch allocate GPU memory in expandable segments.

    Unless a person has chosen otherwise or the driver can't. Batches of varying shapes leave holes
    between segments of fixed size. torch 2.14 with expandable segments crashes without NVML, so
    that is checked too.
    """
    if any(name in environ for name in ALLOCATOR):
        return
    with contextlib.suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
        is_supported = ctypes.c_int()
        ctypes.CDLL("libnvidia-ml.so.1")
        cuda.cuInit(0)
        cuda.cuDeviceGetAttribute(ctypes.byref(is_supported), _VIRTUAL_MEMORY, 0)
        if is_supported.value:
            environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@contextlib.contextmanager
def _hide_sharding(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Hide from Accelerate that the model is sharded, which `common.distributed.sharding` does.

    Accelerate forgets FSDP on CPUs without a word, casts weights and gradients under bf16, and
    starts DeepSpeed's engine.
    """
    hidden = {name: environ.pop(name) for name in launch_checks.ENGINES if name in environ}
    try:
        yield
    finally:
        environ.update(hidden)  # a process that restarts itself reads it again


def _refuse_shared_devices(device: torch.device) -> None:
    """Raise `Refused` if two processes have the same GPU.

    They do when srun or a script shows each of them the first one.
    """
    uuid = str(devices.get_device_properties(device).uuid)
    gpus = gather_objects((socket.gethostname(), uuid))
    for rank, gpu in enumerate(gpus):
        first_rank = gpus.index(gpu)
        if first_rank < rank:
            host, _ = gpu
            raise Refused(
                f"rank {rank} has the same GPU as rank {first_rank} on {host}: show each process "
                "all GPUs of its machine, or another one (srun --gpus-per-task=1)"
            )


def _print_once_per_machine(text: str) -> None:
    """Print `text`, unless the first process of this machine prints the same in time.

    Until then, this process waits, since most launchers end all processes as soon as one has ended.
    The first one tells the others by a file, since MPICH and srun do not. It is in no folder that
    users share: there, its name could be another user's FIFO.
    """
    folder = Path(os.path.expanduser("~"), ".cache", "recipes")
    file = folder / f"refusal-{socket.gethostname()}"
    content = f"{os.getppid()} {text}"
    local_rank = launchers.local_rank(os.environ)
    deadline = time.monotonic() + REFUSAL_DELAY_S
    while local_rank not in (None, "0") and time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if read_text(file, SMALL) == content:
                return
        time.sleep(0.1)
    print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):
        if local_rank == "0":
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(file, content.encode())


def _describe_rank() -> str:
    return f"rank {os.environ.get('RANK', 0)} ({socket.gethostname()})"
