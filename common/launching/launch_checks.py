"""Checks of a launch: what would silently train something else than was asked for is refused."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import str_to_bool

from common.config.fields import RunConfig
from common.distributed.sharding import Sharding
from common.errors import Refused
from common.launching.exit_codes import AT_LEAST
from common.launching.launchers import ACCELERATE, Launch, is_agents

ENGINES = FSDP, DEEPSPEED, MESH = tuple(
    f"ACCELERATE_USE_{name}" for name in ("FSDP", "DEEPSPEED", "PARALLELISM_CONFIG")
)
# Settings of Accelerate's FSDP: the values that a run can have, and what takes the place of others.
_OFF = ("", "false")
_FSDP_SETTINGS = {
    "FSDP_VERSION": (("2",), "FSDP1 is not supported: set fsdp_version: 2"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": (
        _OFF,
        "fsdp_cpu_ram_efficient_loading: each process builds the model, and rank 0 sends its "
        "weights; set it to false (Accelerate's default is true)",
    ),
    "FSDP_OFFLOAD_PARAMS": (
        _OFF,
        "fsdp_offload_params: optimizers step on the device; take more processes",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        _OFF,
        "fsdp_activation_checkpointing: take the recipe's --grad_checkpointing",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
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


def check_launch(
    environ: Mapping[str, str],
    launch: Launch,
    accelerators: int,
    asked_for: tuple[int | None, int] | None = None,
) -> None:
    """Raise `Refused` if the launch asks for something that the recipes don't support, or would
    silently train otherwise.

    `accelerators` is the number of devices that this process sees. `asked_for` is the number of
    processes and of machines on the launcher's command line (None if unknown); some of the machines
    may be missing.
    """
    sharding_of(environ)
    _check_settings(environ)
    _check_numbers(environ, launch, asked_for)
    _check_devices(environ, launch, accelerators)


def _check_settings(environ: Mapping[str, str]) -> None:
    """Raise `Refused` for settings of Accelerate and torchrun that would train otherwise, or never
    restart.
    """
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
    precision = _precision_of(environ)
    if precision not in PRECISION_NAMES:
        raise Refused(
            f"--mixed_precision {precision} is not one of {', '.join(PRECISION_NAMES)}: launch "
            "with one of them"
        )
    if (
        int(environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
        and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    ):
        raise Refused(
            "--max_restarts: new processes would look for the old ones in the launcher's store, "
            "and wait for ever; add --rdzv_backend machines, and several machines also "
            "--rdzv_endpoint with the first one's address:port"
        )


def _check_numbers(
    environ: Mapping[str, str], launch: Launch, asked_for: tuple[int | None, int] | None
) -> None:
    """Raise `Refused` if other numbers of processes or machines have started than were asked for."""
    processes, machines = asked_for or (None, 1)
    here = launch.local_world_size
    if processes not in (None, here * machines):
        raise Refused(
            f"launched for {processes} processes on {machines} machine{'s' * (machines > 1)}, but "
            f"on this one {here} started: --num_processes is the total of all machines and a "
            "multiple of their number, and on the CPU several processes need multi_cpu.yaml"
        )
    least = int(environ.get(AT_LEAST, machines))
    if launch.nodes is not None and launch.nodes < least:
        raise Refused(
            f"launched for {least} machines, but {launch.nodes} started this run: the machines "
            "did not find each other; start the command on all of them again, with "
            "--rdzv_backend machines, which says why one is missing"
        )


def _check_devices(environ: Mapping[str, str], launch: Launch, accelerators: int) -> None:
    """Raise `Refused` if this machine lacks devices for its processes, or the CPU would train in
    another precision.
    """
    here = launch.local_world_size
    if wants_cpu(environ) or (accelerators == 0 and ACCELERATE not in environ):
        if _precision_of(environ) == "fp16":
            raise Refused(
                "fp16 on a CPU would silently train in fp32: use --mixed_precision no, or bf16"
            )
    elif accelerators == 0:
        name = "multi_cpu.yaml" if launch.world_size > 1 else "cpu.yaml"
        raise Refused(
            f"launched for {launch.world_size} GPU{'s' * (launch.world_size > 1)}, but this "
            "machine shows none: check the driver and CUDA_VISIBLE_DEVICES, or train on the CPU "
            f"with --config_file accelerate_configs/{name} before the recipe"
        )
    elif here > accelerators and (accelerators > 1 or is_agents(environ)):
        # Mpirun and srun may show one GPU to each.
        raise Refused(
            f"{here} processes on a machine with {accelerators} GPUs: pass --num_processes, "
            f"{accelerators} for each machine"
        )


def sharding_of(environ: Mapping[str, str]) -> Sharding | None:
    """How the launch asks to shard the model; None for plain data parallelism. Raises `Refused` for
    other engines and settings.

    DeepSpeed's files are understood: FSDP2 shards as its ZeRO does.
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
        return _sharding_of_deepspeed(environ)
    if not _is_on(environ, FSDP):
        if _is_on(environ, MESH):
            raise Refused(
                "parallelism_config: it goes with distributed_type: FSDP and fsdp_config: "
                "{fsdp_version: 2}"
            )
        return None
    for variable, (allowed, reason) in _FSDP_SETTINGS.items():
        if environ.get(variable, "").lower() not in allowed:
            raise Refused(reason)
    shards = _shards_of_mesh(environ) if _is_on(environ, MESH) else 0
    keeps_weights = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false"
    return Sharding(keeps_weights, shards)


def _sharding_of_deepspeed(environ: Mapping[str, str]) -> Sharding:
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
    return Sharding(keeps_weights=stage != "3", asked_as=f"DeepSpeed ZeRO-{stage}")


def _shards_of_mesh(environ: Mapping[str, str]) -> int:
    """The number of processes that hold a whole model together, as `parallelism_config` says.
    Raises `Refused`.
    """
    for kind in ("tensor", "context", "sequence"):
        if int(environ.get(f"PARALLELISM_CONFIG_{kind[0].upper()}P_SIZE", "1")) > 1:
            raise Refused(
                f"parallelism_config_{kind[0]}p_size: {kind} parallelism needs a plan for each "
                "model; set parallelism_config_dp_shard_size, which shards any"
            )
    shards = int(environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1"))
    world = int(environ.get("WORLD_SIZE", "1"))
    # The number of replicas follows, also after a machine has left the run.
    if shards < 2 or world % shards:
        raise Refused(
            f"parallelism_config_dp_shard_size {shards}, {world} processes: it must be at least 2 "
            "and divide their number"
        )
    return shards


def check_sharded(config: RunConfig) -> None:
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


def wants_cpu(environ: Mapping[str, str]) -> bool:
    """True if the launch asked for the CPU: by use_cpu with one process, or by hiding the GPUs as -1.

    `accelerate launch` passes gpu_ids on to several ranks, but not use_cpu, so the CPU files have
    gpu_ids. An empty CUDA_VISIBLE_DEVICES does not ask for the CPU: a scheduler sets it for a job
    that got no GPU.
    """
    return (
        _is_on(environ, "ACCELERATE_USE_CPU")
        or environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] == "-1"
    )


def processes_asked(command: Sequence[str]) -> tuple[int | None, int] | None:
    """Processes and machines on the command line of `accelerate launch`; of torchrun None and the
    lowest number of machines.

    None if it is another command, or one that counts the GPUs itself.

    The launcher rounds 3 processes on 2 machines down to 2, and with MULTI_CPU or --cpu starts one
    process instead of several. The environment of its ranks does not show this, so they read the
    command line.
    """
    # The program comes first, after its interpreter, or after the interpreter's -m.
    program = list(
        command[1:] if command and Path(command[0]).name.startswith("python") else command
    )
    program = program[1:] if program[:1] == ["-m"] else program
    names = [Path(word).name for word in program[:2]]
    launcher = next(
        (launcher for launcher in _ACCELERATE if names[: len(launcher)] == launcher), None
    )
    if names[:1] in (["torchrun"], ["torch.distributed.run"]):
        from torch.distributed.run import get_args_parser  # also reads PET_*

        return None, int(
            get_args_parser().parse_known_args(program[1:])[0].nnodes.partition(":")[0]
        )
    if launcher is None:
        return None
    arguments = launch_command_parser().parse_args(program[len(launcher) :])
    processes, machines = arguments.num_processes, arguments.num_machines
    if arguments.config_file is not None or (
        os.path.isfile(default_config_file) and not arguments.cpu
    ):
        file = load_config_from_file(arguments.config_file)
        processes, machines = processes or file.num_processes, machines or file.num_machines
    # multi_gpu.yaml says "auto": as many as the machine has.
    return (processes, machines or 1) if isinstance(processes, int) else None


def _precision_of(environ: Mapping[str, str]) -> str:
    return environ.get("ACCELERATE_MIXED_PRECISION", "no")


def _is_on(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable) or "false"
    try:
        return bool(str_to_bool(value))
    except ValueError:
        raise Refused(f"{variable}={value}: must be true or false") from None
