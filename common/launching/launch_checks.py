"""Checks of a launch: what would silently train something else than was asked for is refused."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import str_to_bool

from common.config.fields import RunConfig
from common.distributed.sharding import Sharding
from common.errors import Refused
from common.launching.exit_codes import MIN_MACHINES
from common.launching.launchers import ACCELERATE, Launch, is_started_by_agent

FSDP = "ACCELERATE_USE_FSDP"
DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"
ENGINES = (FSDP, DEEPSPEED, MESH)


class _Setting(NamedTuple):
    """The values of a variable that a run can have, and what to do instead of others."""

    allowed: tuple[str, ...]
    way_out: str


_OFF = ("", "false")
# Of Accelerate's FSDP.
_FSDP_SETTINGS = {
    "FSDP_VERSION": _Setting(("2",), "FSDP1 is not supported: set fsdp_version: 2"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": _Setting(
        _OFF,
        "fsdp_cpu_ram_efficient_loading: each process builds the model, and rank 0 sends its "
        "weights; set it to false (Accelerate's default is true)",
    ),
    "FSDP_OFFLOAD_PARAMS": _Setting(
        _OFF,
        "fsdp_offload_params: optimizers step on the device; take more processes",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": _Setting(
        _OFF,
        "fsdp_activation_checkpointing: take the recipe's --grad_checkpointing",
    ),
    "FSDP_AUTO_WRAP_POLICY": _Setting(
        ("", "no_wrap"),
        "fsdp_auto_wrap_policy: the run finds the blocks of the model itself; leave it out",
    ),
}
_DEEPSPEED_SETTINGS = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file: give zero_stage in Accelerate's own file",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
        "offload_optimizer_device: optimizers step on the device"
    ),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device: optimizers step on the device",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping: take the recipe's --clip",
}
_ACCELERATE = (
    ["accelerate", "launch"],
    ["accelerate-launch"],
    ["accelerate.commands.launch"],
    ["accelerate.commands.accelerate_cli", "launch"],
)
PRECISION_NAMES = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


class RequestedProcesses(NamedTuple):
    """What the launcher's command line asks for; `num_processes` is None if it does not say."""

    num_processes: int | None
    num_machines: int


def check_launch(
    environ: Mapping[str, str],
    launch: Launch,
    num_accelerators: int,
    requested: RequestedProcesses | None = None,
) -> None:
    """Raise `Refused` if the launch asks for something that the recipes don't support.

    Also if it would silently train otherwise. `num_accelerators` is the number of devices that this
    process sees. `requested` is what the launcher's command line says (None if unknown); some of
    the machines may be missing.
    """
    read_sharding(environ)
    _check_settings(environ)
    _check_processes(environ, launch, requested or RequestedProcesses(None, 1))
    _check_devices(environ, launch, num_accelerators)


def _check_settings(environ: Mapping[str, str]) -> None:
    """Raise `Refused` for settings that would train otherwise, or never restart."""
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        raise Refused(
            f"dynamo_backend {environ['ACCELERATE_DYNAMO_BACKEND']} renames the model's weights: "
            "remove it from the launch and compile with the recipe's own flag"
        )
    accumulation = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation != "1":
        raise Refused(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={accumulation} would divide the loss a "
            "second time: unset it, --max_micro_batch_size decides the accumulation"
        )
    precision = _get_precision(environ)
    if precision not in PRECISION_NAMES:
        raise Refused(
            f"--mixed_precision {precision} is not one of {', '.join(PRECISION_NAMES)}: launch "
            "with one of them"
        )
    max_restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if max_restarts and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise Refused(
            "--max_restarts: new processes would look for the old ones in the launcher's store, "
            "and wait for ever; add --rdzv_backend machines, and several machines also "
            "--rdzv_endpoint with the first one's address:port"
        )


def _check_processes(
    environ: Mapping[str, str], launch: Launch, requested: RequestedProcesses
) -> None:
    """Raise `Refused` if other numbers of processes or machines have started than were requested."""
    num_processes, num_machines = requested
    num_started = launch.local_world_size
    if num_processes not in (None, num_started * num_machines):
        machines = "machines" if num_machines > 1 else "machine"
        raise Refused(
            f"launched for {num_processes} processes on {num_machines} {machines}, but on this "
            f"one {num_started} started: --num_processes is the total of all machines and a "
            "multiple of their number, and on the CPU several processes need multi_cpu.yaml"
        )
    min_machines = int(environ.get(MIN_MACHINES, num_machines))
    if launch.num_nodes is not None and launch.num_nodes < min_machines:
        raise Refused(
            f"launched for {min_machines} machines, but {launch.num_nodes} started this run: the "
            "machines did not find each other; start the command on all of them again, with "
            "--rdzv_backend machines, which says why one is missing"
        )


def _check_devices(environ: Mapping[str, str], launch: Launch, num_accelerators: int) -> None:
    """Raise `Refused` if this machine lacks devices, or the CPU would train in another precision."""
    num_processes = launch.local_world_size
    if is_cpu_requested(environ) or (num_accelerators == 0 and ACCELERATE not in environ):
        if _get_precision(environ) == "fp16":
            raise Refused(
                "fp16 on a CPU would silently train in fp32: use --mixed_precision no, or bf16"
            )
    elif num_accelerators == 0:
        is_multi_process = launch.world_size > 1
        gpus = "GPUs" if is_multi_process else "GPU"
        file = "multi_cpu.yaml" if is_multi_process else "cpu.yaml"
        raise Refused(
            f"launched for {launch.world_size} {gpus}, but this machine shows none: check the "
            "driver and CUDA_VISIBLE_DEVICES, or train on the CPU with --config_file "
            f"accelerate_configs/{file} before the recipe"
        )
    elif num_processes > num_accelerators and (
        # Mpirun and srun may show one GPU to each.
        num_accelerators > 1 or is_started_by_agent(environ)
    ):
        raise Refused(
            f"{num_processes} processes on a machine with {num_accelerators} GPUs: pass "
            f"--num_processes, {num_accelerators} for each machine"
        )


def read_sharding(environ: Mapping[str, str]) -> Sharding | None:
    """How the launch asks to shard the model; None for plain data parallelism.

    DeepSpeed's files are understood: FSDP2 shards as its ZeRO does. Raises `Refused` for other
    engines and settings.
    """
    if _is_on(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise Refused(
            "Megatron-LM rewrites language models: take accelerate_configs/fsdp_bf16.yaml, which "
            "shards any model"
        )
    if environ.get("PJRT_DEVICE") == "TPU":
        raise Refused(
            "XLA: a TPU has no process group for what the processes agree on; launch on GPUs or "
            "CPUs"
        )
    if _is_on(environ, DEEPSPEED):
        return _read_deepspeed_sharding(environ)
    if not _is_on(environ, FSDP):
        if _is_on(environ, MESH):
            raise Refused(
                "parallelism_config: it goes with distributed_type: FSDP and fsdp_config: "
                "{fsdp_version: 2}"
            )
        return None
    for variable, setting in _FSDP_SETTINGS.items():
        if environ.get(variable, "").lower() not in setting.allowed:
            raise Refused(setting.way_out)
    num_shards = _read_mesh(environ) if _is_on(environ, MESH) else 0
    reshards = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    return Sharding(reshard_after_forward=reshards, num_shards=num_shards)


def _read_deepspeed_sharding(environ: Mapping[str, str]) -> Sharding:
    """How a file for DeepSpeed asks to shard the model. Raises `Refused`."""
    for variable, reason in _DEEPSPEED_SETTINGS.items():
        if environ.get(variable, "none") not in ("none", "None", ""):
            raise Refused(
                f"{reason}, and leave it out; accelerate_configs/fsdp_bf16.yaml shards like ZeRO-3"
            )
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("1", "2", "3"):
        raise Refused(
            f"zero_stage {stage} shards nothing: take accelerate_configs/multi_gpu_bf16.yaml, or "
            "zero_stage 3"
        )
    return Sharding(reshard_after_forward=stage == "3", engine=f"DeepSpeed ZeRO-{stage}")


def _read_mesh(environ: Mapping[str, str]) -> int:
    """The number of processes that hold a whole model together, from `parallelism_config`.

    Raises `Refused`.
    """
    for kind in ("tensor", "context", "sequence"):
        letter = kind[0]
        if int(environ.get(f"PARALLELISM_CONFIG_{letter.upper()}P_SIZE", "1")) > 1:
            raise Refused(
                f"parallelism_config_{letter}p_size: {kind} parallelism needs a plan for each "
                "model; set parallelism_config_dp_shard_size, which shards any"
            )
    num_shards = int(environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1"))
    world_size = int(environ.get("WORLD_SIZE", "1"))
    # The number of replicas follows, also after a machine has left the run.
    if num_shards < 2 or world_size % num_shards:
        raise Refused(
            f"parallelism_config_dp_shard_size {num_shards}, {world_size} processes: it must be at "
            "least 2 and divide their number"
        )
    return num_shards


def check_sharded_config(config: RunConfig) -> None:
    """Raise `Refused` for flags of a recipe that a sharded run can't meet."""
    if config.comm_hook != "none":
        raise Refused(
            f"--comm_hook {config.comm_hook} compresses the gradients of DDP; a sharded run sends "
            "them unchanged: leave it out"
        )
    for field in dataclasses.fields(config):
        reason = field.metadata.get("not_in_shards")
        if reason and getattr(config, field.name) != field.default:
            raise Refused(f"--{field.name}: {reason}; leave it out, or launch without FSDP")


def is_cpu_requested(environ: Mapping[str, str]) -> bool:
    """True if the launch asked for the CPU: by use_cpu with one process, or by hiding the GPUs as -1.

    `accelerate launch` passes gpu_ids on to several ranks, but not use_cpu, so the CPU files have
    gpu_ids. An empty CUDA_VISIBLE_DEVICES does not ask for the CPU: a scheduler sets it for a job
    that got no GPU.
    """
    if _is_on(environ, "ACCELERATE_USE_CPU"):
        return True
    return environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] == "-1"


def parse_requested_processes(command: Sequence[str]) -> RequestedProcesses | None:
    """Processes and machines on the command line of `accelerate launch` or torchrun.

    Of torchrun it is the lowest number of machines only. None if it is another command, or one that
    counts the GPUs itself.

    The launcher rounds 3 processes on 2 machines down to 2, and with MULTI_CPU or --cpu starts one
    process instead of several. The environment of its ranks does not show this, so they read the
    command line.
    """
    # The program comes first, after its interpreter, or after the interpreter's -m.
    args = list(command)
    if args and Path(args[0]).name.startswith("python"):
        del args[0]
    if args[:1] == ["-m"]:
        del args[0]
    names = [Path(arg).name for arg in args[:2]]
    if names[:1] in (["torchrun"], ["torch.distributed.run"]):
        return _parse_torchrun(args[1:])
    for launcher in _ACCELERATE:
        if names[: len(launcher)] == launcher:
            return _parse_accelerate(args[len(launcher) :])
    return None


def _parse_torchrun(argv: list[str]) -> RequestedProcesses:
    from torch.distributed.run import get_args_parser  # also reads PET_*

    args, _ = get_args_parser().parse_known_args(argv)
    min_machines, _, _ = args.nnodes.partition(":")
    return RequestedProcesses(None, int(min_machines))


def _parse_accelerate(argv: list[str]) -> RequestedProcesses | None:
    args = launch_command_parser().parse_args(argv)
    num_processes = args.num_processes
    num_machines = args.num_machines
    if args.config_file is not None or (os.path.isfile(default_config_file) and not args.cpu):
        file = load_config_from_file(args.config_file)
        if not num_processes:
            num_processes = file.num_processes
        if not num_machines:
            num_machines = file.num_machines
    # multi_gpu.yaml says "auto": as many as the machine has.
    if not isinstance(num_processes, int):
        return None
    return RequestedProcesses(num_processes, num_machines or 1)


def _get_precision(environ: Mapping[str, str]) -> str:
    return environ.get("ACCELERATE_MIXED_PRECISION", "no")


def _is_on(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable) or "false"
    try:
        return bool(str_to_bool(value))
    except ValueError:
        raise Refused(f"{variable}={value}: must be true or false") from None
