"""Is a launch that would train something else than asked for refused, in one line, before a group is formed?"""

import pytest

from common.errors import Refused
from common.launch import check_launch, processes_asked, wants_cpu

pytestmark = pytest.mark.smoke

# What `accelerate launch` leaves in the environment of one process, and of rank 1 of 2.
ONE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "False"}
TWO = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}
HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "-1,-1"}
TWO_NODES = {**TWO, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}


@pytest.mark.parametrize(
    ("environ", "accelerators", "world_size"),
    [
        ({}, 0, 1),  # plain python
        ({}, 8, 1),
        (ONE, 1, 1),
        ({**ONE, "ACCELERATE_USE_CPU": "True"}, 0, 1),
        ({**ONE, "ACCELERATE_MIXED_PRECISION": "fp16"}, 1, 1),
        (TWO, 2, 2),
        ({**TWO, **HIDDEN_GPUS}, 0, 2),
        ({**TWO, "ACCELERATE_USE_CPU": "1"}, 0, 2),
        ({**TWO, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, 2, 2),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 0, 3),  # mpirun on a machine without GPUs
    ],
)
def test_a_launch_that_gets_its_world_passes(environ: dict[str, str], accelerators: int, world_size: int) -> None:
    assert check_launch(environ, accelerators, asked_for=world_size) == world_size


@pytest.mark.parametrize(
    ("environ", "accelerators", "said"),
    [
        (ONE, 0, "cpu.yaml"),
        (TWO, 0, "multi_cpu.yaml"),
        ({**TWO, "CUDA_VISIBLE_DEVICES": ""}, 0, "multi_cpu.yaml"),  # a job without GPUs on a GPU file
        ({**TWO, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 2, "8 processes on a machine with 2 GPUs"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2, "without LOCAL_RANK"),
        ({**ONE, "ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "fp16"}, 0, "fp16 on a CPU"),
        ({**TWO, **HIDDEN_GPUS, "ACCELERATE_MIXED_PRECISION": "fp16"}, 0, "fp16 on a CPU"),
        ({"ACCELERATE_USE_CPU": "1", "ACCELERATE_MIXED_PRECISION": "fp16"}, 8, "fp16 on a CPU"),
        ({**ONE, "ACCELERATE_MIXED_PRECISION": "fp8"}, 1, "fp8 is not one of no, fp16, bf16"),
        ({**ONE, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, 1, "INDUCTOR"),
        ({**TWO, "ACCELERATE_USE_FSDP": "true"}, 2, "FSDP"),
        ({**TWO, "ACCELERATE_USE_DEEPSPEED": "true"}, 2, "DeepSpeed"),
        ({**TWO, "ACCELERATE_USE_MEGATRON_LM": "true"}, 2, "Megatron"),
        ({**TWO, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, 2, "parallelism_config"),
        ({**TWO, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, 2, "max_micro_batch_size"),
    ],
)
def test_a_launch_that_would_train_something_else_is_refused(
    environ: dict[str, str], accelerators: int, said: str
) -> None:
    with pytest.raises(Refused, match=said) as refusal:
        check_launch(environ, accelerators)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("environ", "asked_for"),
    [
        (TWO_NODES, 3),  # 3 processes on 2 machines
        ({**ONE, "ACCELERATE_USE_CPU": "True"}, 2),  # MULTI_CPU without mpirun, or --cpu
    ],
)
def test_another_number_of_processes_than_asked_for_is_refused(environ: dict[str, str], asked_for: int) -> None:
    with pytest.raises(Refused, match=f"launched for {asked_for} processes"):
        check_launch(environ, accelerators=1, asked_for=asked_for, own_address="10.0.0.7")


def test_a_machine_that_the_others_cannot_reach_is_refused() -> None:
    with pytest.raises(Refused, match="GLOO_SOCKET_IFNAME"):
        check_launch(TWO_NODES, accelerators=1, own_address="127.0.1.1")
    assert check_launch(TWO_NODES, accelerators=1, own_address="10.0.0.7") == 2
    assert check_launch({**TWO_NODES, "GLOO_SOCKET_IFNAME": "eth0"}, accelerators=1, own_address="127.0.1.1") == 2
    assert check_launch({**TWO_NODES, "MASTER_ADDR": "127.0.0.1"}, accelerators=1, own_address="127.0.1.1") == 2


def test_the_cpu_is_chosen_only_by_those_who_ask_for_it() -> None:
    assert wants_cpu({"ACCELERATE_USE_CPU": "True"})
    assert wants_cpu({"CUDA_VISIBLE_DEVICES": "-1"})
    assert wants_cpu(HIDDEN_GPUS)
    assert not wants_cpu({})
    assert not wants_cpu({"ACCELERATE_USE_CPU": "False", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert not wants_cpu({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    "launcher",
    [
        "/opt/bin/python3 /opt/bin/accelerate launch",
        "/opt/bin/accelerate launch",
        "accelerate-launch",
        "python -m accelerate.commands.launch",
        "python -m accelerate.commands.accelerate_cli launch",
    ],
)
def test_the_number_of_processes_is_read_from_the_launcher_and_its_file(launcher: str) -> None:
    file = "--config_file accelerate_configs/multi_cpu.yaml"
    script = "recipes/cls.py --num_processes 9"
    assert processes_asked(f"{launcher} {file} {script}".split()) == 2
    assert processes_asked(f"{launcher} {file} --num_processes 3 {script}".split()) == 3


def test_nothing_is_read_from_other_commands() -> None:
    for command in ("", "bash", "torchrun --nproc-per-node 2 cls.py", "python recipes/cls.py accelerate launch"):
        assert processes_asked(command.split()) is None
