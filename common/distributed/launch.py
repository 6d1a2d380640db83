"""Launch: joins the processes that a launcher started into one run, after checking that the launch is what was asked for."""

import atexit
import contextlib
import ctypes
import errno
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import InitProcessGroupKwargs, str_to_bool
from torch.distributed import Store, rendezvous

from common.config.fields import RunConfig
from common.distributed import determinism, watchdog
from common.distributed.agreement import agree, facts
from common.distributed.collectives import gather_objects, give_up_after, is_lost_peer, leave_process_group
from common.distributed.environment import cores
from common.distributed.exit_codes import AT_LEAST, EXIT_FOLDER, announce_exit, leaving, notice
from common.distributed.gradient_compression import data_parallel
from common.distributed.network import (
    LOOPBACK,
    address_towards,
    await_listener,
    interface_of,
    is_loopback,
    keep_store,
    trouble,
)
from common.errors import Again, Refused, printable

# Names of torchrun and of MPI implementations for the number of processes. Accelerate reads all of them for CPU processes,
# but for GPUs only if LOCAL_RANK is set.
WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
LAUNCHERS = (
    ["accelerate", "launch"],
    ["accelerate-launch"],
    ["accelerate.commands.launch"],
    ["accelerate.commands.accelerate_cli", "launch"],
)
PRECISION_NAMES = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}

REFUSAL_DELAY_S = 20.0  # how long the other processes of a machine wait for the first one to print the refusal
MEETING = timedelta(minutes=5)  # how much later than the first process the last one may arrive
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # if set, a person has chosen
_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
MARGIN = timedelta(minutes=1)  # see `last_resort`
NOTICE_S = 10.0  # how long a process waits until its launcher has read the announced exit code
_PARENT = os.getppid()  # read early, while the launcher is certainly alive


def start(config: RunConfig | None = None, *, fixed_shapes: bool = False) -> Accelerator:
    """Join the processes that `accelerate launch` (or torchrun, mpirun, plain python) started, and return the Accelerator.

    The processes compare code, package versions and, if given, the configuration before they form a group. Then the
    watchdog starts: a process without progress for `config.collective_timeout` seconds ends the run.

    Must be called first: an Accelerator, a PartialState or an accelerate logger made earlier would form the group without
    these checks. Device and precision are those of the launch.

    `fixed_shapes`: convolutions have few different shapes, so cuDNN may search for the fastest algorithm for each.
    Raises `Refused`; if the environment shows the reason, before a process group is formed.
    """
    # torch 2.14 recommends a replacement that 2.11 does not have.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    # Harmless: 1 x 1 convolutions, whose strides are ambiguous.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    world_size = check_launch(os.environ, accelerators, processes_asked(_parent_command()))
    if on_cpu := wants_cpu(os.environ) or accelerators == 0:
        share_cores(os.environ)
    else:
        let_segments_grow(os.environ)
    settings = config or RunConfig()
    determinism.choose(settings.deterministic and not on_cpu, fixed_shapes)
    torch.manual_seed(settings.seed)  # for the initial weights of a custom module; all else draws from keys
    parallel = data_parallel(settings, os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
    patience, store = settings.collective_timeout, _meet(os.environ, config)
    timeout = last_resort(patience, os.environ)
    give_up_after(timeout)
    # Accelerate looks on disk for this package twice in each step, which takes about a millisecond.
    sys.modules.setdefault("lomo_optim", None)  # type: ignore[arg-type]
    accelerator = Accelerator(
        cpu=on_cpu,
        gradient_accumulation_steps=1,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[parallel, InitProcessGroupKwargs(timeout=timeout)],
    )
    if store:
        watchdog.begin(store, accelerator.process_index, accelerator.num_processes, patience, Path(sys.argv[0]).name)
    if accelerator.num_processes != world_size:
        raise Refused(
            f"launched as {world_size} processes, but accelerate formed a world of {accelerator.num_processes} on "
            f"{accelerator.device.type}: launch with a file of accelerate_configs/"
        )
    if accelerator.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    return accelerator


def last_resort(patience: float, environ: MutableMapping[str, str]) -> timedelta:
    """The timeout of collectives themselves and of torch's NCCL watchdog, long after our watchdog has named the culprit.

    It has to be much longer than `patience`: a process may still note progress while its device waits in a collective of an
    earlier step. The NCCL watchdog ends a process whose driver does not answer.
    """
    timeout = timedelta(seconds=2 * patience) + MARGIN
    environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{timeout.total_seconds():.0f}")
    return timeout


def run(main: Callable[[], None]) -> None:
    """Run a recipe's `main`, and end the process with the right exit code and message.

    A refusal is printed in one line, by one process per machine, with exit code 2. After `Again`, a single process restarts
    itself; several processes need a launcher that restarts them. A process that fails alone prints its traceback and rank;
    the other processes only print that they have lost one.
    """
    try:
        main()
    except Refused as refusal:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The first process prints the refusal, and its end ends this one. If this one ended earlier, the launcher would
            # end the first process before it has printed.
            time.sleep(REFUSAL_DELAY_S)
        print(f"{Path(sys.argv[0]).name}: {refusal}", file=sys.stderr, flush=True)
        announce_exit(2)
        sys.exit(2)
    except Again as again:
        if os.environ.get("RANK", "0") != "0":  # the main process has printed it
            print(f"{Path(sys.argv[0]).name}: {_whereabouts()}: {again}", file=sys.stderr, flush=True)
        if not torch.distributed.is_initialized():
            atexit._run_exitfuncs()  # exec skips them, and a dashboard's service would stay
            sys.stdout.flush()
            os.execv(sys.executable, sys.orig_argv)
        sys.exit(1)
    except Exception as error:
        if not is_lost_peer(error):
            error.add_note(f"on {_whereabouts()}")
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {_whereabouts()} lost another process: see its message", file=sys.stderr)
        sys.exit(1)
    finally:
        watchdog.end()
    leave_process_group()


def say(text: str) -> None:
    """Print a line on the main process."""
    if os.environ.get("RANK", "0") == "0":
        print(printable(text), flush=True)


def orphaned() -> bool:
    """Whether the launcher of this process is gone: killed, or ended by a signal that it does not forward.

    Nobody waits for such a process any more, and it keeps its device and run folder from the next start.
    """
    return os.getppid() != _PARENT and _launched(os.environ)


def machine() -> int:
    """Number of this machine in the run; 0 if no launcher has numbered the machines."""
    return int(os.environ.get("GROUP_RANK", 0))


def leavers(asked: bool) -> list[int]:
    """The machines that leave a run whose processes have agreed to stop; `asked`: this one was asked to. A collective.

    Those that were asked, if the others may continue without them (`--rdzv_conf at_least`), else all.
    One process that was asked: [0]; two machines of which the second was asked: [1] or [0, 1]; neither was asked: [].
    """
    machines = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    are_asked = {number for number, is_asked in gather_objects((machine(), asked)) if is_asked}
    return leaving(are_asked, machines, int(os.environ.get(AT_LEAST, machines)))


def leave(code: int, leavers: Collection[int]) -> NoReturn:
    """End this process with `code`, once its launcher knows which machines leave the run.

    The launcher counts an unannounced end as a failure (`--max_restarts`).
    """
    if EXIT_FOLDER not in os.environ:
        sys.exit(code)
    announce_exit(code, leavers)
    until = time.monotonic() + NOTICE_S
    while not notice() and not orphaned() and time.monotonic() < until:
        time.sleep(0.02)
    sys.stdout.flush()
    os._exit(code)  # all files are closed; in a normal exit of Python, threads of gloo may hang


def describe(accelerator: Accelerator, dtype: str) -> str:
    """Processes, device and precision of a run with weights of type `dtype`, for the start table.

    One process: "1 process, cpu, fp32". Two ranks, on both: "2 processes on 1 node, cpu (gloo), fp32".
    """
    device = accelerator.device.type
    name = torch.cuda.get_device_name(accelerator.device) if device == "cuda" else device
    if not torch.distributed.is_initialized():
        return f"1 process, {name}, {precision(accelerator, dtype)}"
    processes = accelerator.num_processes
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    return (
        f"{processes} process{'es' * (processes > 1)} on {nodes} node{'s' * (nodes > 1)}, "
        f"{name} ({torch.distributed.get_backend()}), {precision(accelerator, dtype)}"
    )


def precision(accelerator: Accelerator, dtype: str) -> str:
    """The precision of the computation with weights of type `dtype`: fp64, fp32, fp32 (TF32), fp16 or bf16."""
    name = "fp64" if dtype == "float64" else PRECISION_NAMES[accelerator.mixed_precision]
    tf32 = name == "fp32" and accelerator.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    return f"{name} (TF32)" if tf32 else name


def share_cores(environ: Mapping[str, str]) -> None:
    """Divide this machine's cores among its processes, if the launcher gave each process one core by default.

    `accelerate launch` and torchrun then set OMP_NUM_THREADS to 1. A number that a person has set is in the launcher's own
    environment or flags. With use_cpu, Accelerate divides the cores itself (and prints advice at each start).
    """
    with contextlib.suppress(psutil.Error):
        said = "OMP_NUM_THREADS" in psutil.Process(os.getppid()).environ()
        said |= any(word.startswith("--num_cpu_threads") for word in _parent_command())
        if environ.get("OMP_NUM_THREADS") == "1" and _launched(environ) and not said:
            count = min(psutil.cpu_count(logical=False) or 1, cores())
            torch.set_num_threads(max(1, count // int(environ.get("LOCAL_WORLD_SIZE", 1))))


def let_segments_grow(environ: MutableMapping[str, str]) -> None:
    """Make torch allocate GPU memory in expandable segments, unless a person has chosen otherwise or the driver can't.

    Varying shapes, such as a detector's canvases, leave holes between segments of fixed size. torch 2.14 with expandable
    segments crashes without NVML, so that is checked too.
    """
    if any(name in environ for name in ALLOCATOR):
        return
    with contextlib.suppress(OSError):
        cuda, can = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        ctypes.CDLL("libnvidia-ml.so.1")
        cuda.cuInit(0)
        cuda.cuDeviceGetAttribute(ctypes.byref(can), _VIRTUAL_MEMORY, 0)
        if can.value:
            environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def wants_cpu(environ: Mapping[str, str]) -> bool:
    """Whether the launch asked for the CPU: by use_cpu with one process, or by hiding the GPUs as -1.

    `accelerate launch` does not pass use_cpu on to several ranks. So the CPU files of accelerate_configs/ hide the GPUs by
    gpu_ids, which it does pass on. An empty CUDA_VISIBLE_DEVICES does not ask for the CPU: a scheduler sets it for a job
    that got no GPU.
    """
    return _is_on(environ, "ACCELERATE_USE_CPU") or environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] == "-1"


def check_launch(environ: Mapping[str, str], accelerators: int, asked_for: tuple[int, int] | None = None) -> int:
    """The number of processes in the world that `environ` describes, after checking that world.

    `accelerators` is the number of devices of this machine. `asked_for` is the number of processes and of machines on the
    launcher's command line (None if unknown); some of the machines may be missing.
    Raises `Refused` if the launch asks for something that the recipes don't support, or would silently train otherwise.
    """
    for variable, engine in OTHER_ENGINES.items():
        if _is_on(environ, variable):
            raise Refused(f"{engine} is not supported yet: launch with a file of accelerate_configs/, which use DDP")
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        raise Refused(
            f"dynamo_backend {environ['ACCELERATE_DYNAMO_BACKEND']} renames the model's weights: remove it from the "
            "launch and compile with the recipe's own flag"
        )
    accumulation = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation != "1":
        raise Refused(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={accumulation} would divide the loss a second time: unset it, "
            "--max_micro_batch_size decides the accumulation"
        )
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in PRECISION_NAMES:
        raise Refused(
            f"--mixed_precision {precision} is not one of {', '.join(PRECISION_NAMES)}: launch with one of them"
        )

    if int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise Refused(
            "--max_restarts: new processes would look for the old ones in the launcher's store, and wait for ever; add "
            "--rdzv_backend machines, and several machines also --rdzv_endpoint with the first one's address:port"
        )

    world_size = next((int(environ[variable]) for variable in WORLD_SIZE_VARIABLES if variable in environ), 1)
    processes, machines = asked_for or (None, 1)
    here = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    if processes not in (None, here * machines):
        raise Refused(
            f"launched for {processes} processes on {machines} machine{'s' * (machines > 1)}, but on this one "
            f"{here} started: --num_processes is the total of all machines and a multiple of their number, and on the CPU "
            "several processes need multi_cpu.yaml"
        )

    if wants_cpu(environ) or (accelerators == 0 and not _launched(environ)):
        if precision == "fp16":
            raise Refused("fp16 on a CPU would silently train in fp32: use --mixed_precision no, or bf16")
    elif accelerators == 0:
        name = "multi_cpu.yaml" if world_size > 1 else "cpu.yaml"
        raise Refused(
            f"launched for {world_size} GPU{'s' * (world_size > 1)}, but this machine shows none: check the driver and "
            f"CUDA_VISIBLE_DEVICES, or train on the CPU with --config_file accelerate_configs/{name} before the recipe"
        )
    else:
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", 1))
        if world_size > 1 and "LOCAL_RANK" not in environ:
            raise Refused(
                f"{world_size} processes without LOCAL_RANK would each train alone on the first GPU: start them with "
                "accelerate launch, or export RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE for each"
            )
        if local_world_size > accelerators:
            raise Refused(
                f"{local_world_size} processes on a machine with {accelerators} GPUs: pass --num_processes, "
                f"{accelerators} for each machine"
            )
    return world_size


def choose_interface(environ: MutableMapping[str, str]) -> None:
    """Make gloo, NCCL and rank 0's store use one network interface: the loopback of a single machine, else the one that leads
    to the main machine.

    Interfaces that `environ` names are kept. By default, gloo announces the address to which this machine's name resolves,
    often a loopback that others can't reach; NCCL picks any interface; and the store listens on all.
    Raises `Refused` if there is no route to the main machine.
    """
    main, here = environ.get("MASTER_ADDR", "localhost"), environ.get("LOCAL_WORLD_SIZE")
    if here == environ["WORLD_SIZE"] or is_loopback(main):
        address = LOOPBACK
        if here == environ["WORLD_SIZE"] and _keeps_store(environ):
            environ["MASTER_ADDR"] = LOOPBACK
    elif here is None:  # unknown whether it is one machine or several
        return
    else:
        try:
            address = address_towards(main)
        except OSError as error:
            raise Refused(trouble(main, int(environ["MASTER_PORT"]), error)) from None
        if is_loopback(address) and "GLOO_SOCKET_IFNAME" not in environ:
            raise Refused(
                f"this machine knows the main machine {main} as {address}, where the others can't reach it: give its address "
                "as a number, or export GLOO_SOCKET_IFNAME with the name of its network interface"
            )
    if interface := interface_of(address):
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # = means the exact name, not a prefix


def processes_asked(command: Sequence[str]) -> tuple[int, int] | None:
    """num_processes and num_machines on the command line of `accelerate launch`; None if it is another command.

    The launcher rounds 3 processes on 2 machines down to 2, and with MULTI_CPU or --cpu starts one process instead of
    several. The environment of its ranks does not show this, so they read the command line.
    """
    # The program comes first, after its interpreter, or after the interpreter's -m.
    behind_interpreter = list(command[1:]) if command and Path(command[0]).name.startswith("python") else list(command)
    program = behind_interpreter[1:] if behind_interpreter[:1] == ["-m"] else behind_interpreter
    names = [Path(word).name for word in program[:2]]
    launcher = next((launcher for launcher in LAUNCHERS if names[: len(launcher)] == launcher), None)
    if launcher is None:
        return None
    arguments = launch_command_parser().parse_args(program[len(launcher) :])
    processes, machines = arguments.num_processes, arguments.num_machines
    if arguments.config_file is not None or (os.path.isfile(default_config_file) and not arguments.cpu):
        file = load_config_from_file(arguments.config_file)
        processes, machines = processes or file.num_processes, machines or file.num_machines
    return (processes, machines or 1) if processes else None


def _whereabouts() -> str:
    return f"rank {os.environ.get('RANK', 0)} ({socket.gethostname()})"


def _parent_command() -> list[str]:
    """The command line of the parent process; empty if the system does not show it."""
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []


def _meet(environ: MutableMapping[str, str], config) -> Store | None:
    """Wait until all processes have arrived and agree. Returns their store; None for one process, or if a group exists."""
    if int(environ.get("WORLD_SIZE", 1)) == 1 or "RANK" not in environ or torch.distributed.is_initialized():
        return None
    choose_interface(environ)
    device = "cpu" if wants_cpu(environ) or not torch.accelerator.is_available() else "accelerator"
    computing = {"device": device, "precision": environ.get("ACCELERATE_MIXED_PRECISION", "no")}
    main, port, store = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), None
    if environ["RANK"] == "0" and _keeps_store(environ):
        store = _listen(main, port)  # torch finds it by its port when it forms the process group
    else:
        await_listener(main, port, MEETING.total_seconds())
    store = store or next(rendezvous("env://", timeout=MEETING))[0]
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    agree(store, rank, world_size, facts(config) | computing, MEETING)
    return store


def _keeps_store(environ: Mapping[str, str]) -> bool:
    """Whether rank 0 keeps the store, not the launcher."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _listen(main: str, port: int) -> Store | None:
    """The store of rank 0, listening at the address `main`; None if that may not be an address of this machine."""
    try:
        if is_loopback(main) or not is_loopback(address_towards(main)):
            return keep_store(main, port, MEETING)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    print(
        f"{main} is no address of this machine's own: what listens on port {port} does so on all interfaces", flush=True
    )
    return None


def _launched(environ: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` or torchrun started this process, not plain python or mpirun."""
    return "ACCELERATE_MIXED_PRECISION" in environ or "LOCAL_RANK" in environ


def _is_on(environ: Mapping[str, str], variable: str) -> bool:
    return bool(str_to_bool(environ.get(variable, "false") or "false"))
