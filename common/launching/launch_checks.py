"""Checks of a launch: what would silently train something else than was asked for is refused."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import str_to_bool

from common.errors import Refused
from common.launching.exit_codes import AT_LEAST
from common.launching.launchers import ACCELERATE, Launch, is_agents

OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}
_ACCELERATE = (
    ["accelerate", "launch"],
    ["accelerate-launch"],
    ["accelerate.commands.launch"],
    ["accelerate.commands.accelerate_cli", "launch"],
)
PRECISION_NAMES = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


def check_launch(
    environ: Mapping[str, str], launch: Launch, accelerators: int, asked_for: tuple[int | None, int] | None = None
) -> None:
    """Raise `Refused` if the launch asks for something that the recipes don't support, or would silently train otherwise.

    `accelerators` is the number of devices that this process sees. `asked_for` is the number of processes and of machines on
    the launcher's command line (None if unknown); some of the machines may be missing.
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

    processes, machines = asked_for or (None, 1)
    here = launch.local_world_size
    if processes not in (None, here * machines):
        raise Refused(
            f"launched for {processes} processes on {machines} machine{'s' * (machines > 1)}, but on this one "
            f"{here} started: --num_processes is the total of all machines and a multiple of their number, and on the CPU "
            "several processes need multi_cpu.yaml"
        )

    least = int(environ.get(AT_LEAST, machines))
    if launch.nodes is not None and launch.nodes < least:
        raise Refused(
            f"launched for {least} machines, but {launch.nodes} started this run: the machines did not find each other; start "
            "the command on all of them again, with --rdzv_backend machines, which says why one is missing"
        )

    if wants_cpu(environ) or (accelerators == 0 and ACCELERATE not in environ):
        if precision == "fp16":
            raise Refused("fp16 on a CPU would silently train in fp32: use --mixed_precision no, or bf16")
    elif accelerators == 0:
        name = "multi_cpu.yaml" if launch.world_size > 1 else "cpu.yaml"
        raise Refused(
            f"launched for {launch.world_size} GPU{'s' * (launch.world_size > 1)}, but this machine shows none: check the "
            "driver and CUDA_VISIBLE_DEVICES, or train on the CPU with --config_file "
            f"accelerate_configs/{name} before the recipe"
        )
    elif here > accelerators and (accelerators > 1 or is_agents(environ)):  # mpirun and srun may show one GPU to each
        raise Refused(
            f"{here} processes on a machine with {accelerators} GPUs: pass --num_processes, {accelerators} for each machine"
        )


def wants_cpu(environ: Mapping[str, str]) -> bool:
    """Whether the launch asked for the CPU: by use_cpu with one process, or by hiding the GPUs as -1.

    `accelerate launch` does not pass use_cpu on to several ranks. So the CPU files of accelerate_configs/ hide the GPUs by
    gpu_ids, which it does pass on. An empty CUDA_VISIBLE_DEVICES does not ask for the CPU: a scheduler sets it for a job
    that got no GPU.
    """
    return _is_on(environ, "ACCELERATE_USE_CPU") or environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] == "-1"


def processes_asked(command: Sequence[str]) -> tuple[int | None, int] | None:
    """num_processes and num_machines on the command line of `accelerate launch`; of torchrun None and the least machines.

    None if it is another command.

    The launcher rounds 3 processes on 2 machines down to 2, and with MULTI_CPU or --cpu starts one process instead of
    several. The environment of its ranks does not show this, so they read the command line.
    """
    # The program comes first, after its interpreter, or after the interpreter's -m.
    behind_interpreter = list(command[1:]) if command and Path(command[0]).name.startswith("python") else list(command)
    program = behind_interpreter[1:] if behind_interpreter[:1] == ["-m"] else behind_interpreter
    names = [Path(word).name for word in program[:2]]
    launcher = next((launcher for launcher in _ACCELERATE if names[: len(launcher)] == launcher), None)
    if names[:1] in (["torchrun"], ["torch.distributed.run"]):
        from torch.distributed.run import get_args_parser  # its variables PET_* are those of this process, too

        return None, int(get_args_parser().parse_known_args(program[1:])[0].nnodes.partition(":")[0])
    if launcher is None:
        return None
    arguments = launch_command_parser().parse_args(program[len(launcher) :])
    processes, machines = arguments.num_processes, arguments.num_machines
    if arguments.config_file is not None or (os.path.isfile(default_config_file) and not arguments.cpu):
        file = load_config_from_file(arguments.config_file)
        processes, machines = processes or file.num_processes, machines or file.num_machines
    return (processes, machines or 1) if processes else None


def parent_command() -> list[str]:
    """The command line of the parent process; empty if the system does not show it."""
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:
        return []


def _is_on(environ: Mapping[str, str], variable: str) -> bool:
    return bool(str_to_bool(environ.get(variable, "false") or "false"))
