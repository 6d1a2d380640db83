"""A launch that would not do what was asked for is refused in one line, before a process group is formed."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest

from common.distributed.sharding import Sharding
from common.errors import Refused
from common.launching import launch, meeting, network
from common.launching.exit_codes import find_leavers
from common.launching.launch_checks import (
    check_launch,
    check_sharded_config,
    parse_requested_processes,
    read_sharding,
)
from common.launching.launchers import complete
from common.launching.meeting import choose_interface
from recipes import cls, det

pytestmark = pytest.mark.smoke

# What `accelerate launch` leaves in the environment of one process, and of rank 1 of 2.
ACCELERATED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
ONE = {**ACCELERATED, "ACCELERATE_USE_CPU": "False"}
WORLD = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
}
WORLD["MASTER_ADDR"] = "127.0.0.1"
TWO = ACCELERATED | WORLD
FSDP = {
    **TWO,
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
RESTARTS = {**TWO, "TORCHELASTIC_MAX_RESTARTS": "3"}
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
DEEPSPEED = {**TWO, "ACCELERATE_USE_DEEPSPEED": "true"}
HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "-1,-1"}
MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TWO_NODES = {
    **TWO,
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
}


@pytest.mark.parametrize(
    "environ, accelerators, world_size",
    [
        ({}, 0, 1),  # plain python
        (ONE, 1, 1),
        ({**ONE, "ACCELERATE_USE_CPU": "True"}, 0, 1),
        (TWO, 2, 2),
        ({**TWO, **HIDDEN_GPUS}, 0, 2),
        (MPI, 0, 2),  # mpirun on a machine without GPUs
        (WORLD, 0, 2),  # a person who exports variables there
        (MPI, 1, 2),  # each process may see another GPU
        ({**RESTARTS, "TORCHELASTIC_USE_AGENT_STORE": "False"}, 2, 2),
        (
            {**RESTARTS, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "0"},
            2,
            2,
        ),
    ],
)
def test_a_correct_launch_passes(
    environ: dict[str, str], accelerators: int, world_size: int
) -> None:
    launched = complete(environ := dict(environ))
    assert launched.world_size == world_size
    check_launch(
        environ,
        launched,
        accelerators,
        requested=None if environ.keys() >= MPI.keys() else (world_size, 1),
    )


@pytest.mark.parametrize(
    "environ, expected",
    [
        (TWO, None),
        ({**FSDP, "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, Sharding()),
        ({**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}, Sharding(reshard_after_forward=False)),
        ({**FSDP, **MESH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, Sharding(num_shards=2)),
        (
            {**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none"},
            Sharding(reshard_after_forward=False, engine="DeepSpeed ZeRO-2"),
        ),
        (
            {**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            Sharding(engine="DeepSpeed ZeRO-3"),
        ),
    ],
)
def test_a_launch_says_how_the_model_is_sharded(
    environ: dict[str, str], expected: Sharding | None
) -> None:
    check_launch(environ, complete(dict(environ)), 2)
    assert read_sharding(environ) == expected


def test_what_a_sharded_run_cannot_meet_is_refused() -> None:
    for config, message in (
        (cls.Config(comm_hook="bf16"), "--comm_hook bf16 compresses the gradients of DDP"),
        (
            cls.Config(channels_last=True),
            "--channels_last: weights in shards have no memory format; leave it out, or",
        ),
        (
            det.Config(compile=True),
            "--compile: in shards, no detector has been compiled yet; leave it out, or launch "
            "without",
        ),
    ):
        with pytest.raises(Refused, match=message):
            check_sharded_config(config)
    check_sharded_config(cls.Config(compile=True))


@pytest.mark.parametrize(
    "environ, accelerators, message",
    [
        (ONE, 0, "cpu.yaml"),
        (TWO, 0, "multi_cpu.yaml"),
        # a job without GPUs on a GPU file
        ({**TWO, "CUDA_VISIBLE_DEVICES": ""}, 0, "multi_cpu.yaml"),
        (
            {**TWO, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"},
            2,
            "8 processes on a machine with 2 GPUs",
        ),
        ({**TWO, "TORCHELASTIC_RUN_ID": "1"}, 1, "2 processes on a machine with 1 GPUs"),
        (
            {**ONE, "ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "fp16"},
            0,
            "fp16 on a CPU",
        ),
        ({**TWO, **HIDDEN_GPUS, "ACCELERATE_MIXED_PRECISION": "fp16"}, 0, "fp16 on a CPU"),
        ({**ONE, "ACCELERATE_MIXED_PRECISION": "fp8"}, 1, "fp8 is not one of no, fp16, bf16"),
        (
            {**ONE, "ACCELERATE_USE_CPU": "maybe"},
            1,
            "ACCELERATE_USE_CPU=maybe: must be true or false",
        ),
        ({**ONE, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, 1, "INDUCTOR"),
        ({**TWO, "ACCELERATE_USE_FSDP": "true"}, 2, "fsdp_version: 2"),
        ({**FSDP, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, 2, "set it to false"),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, 2, "fsdp_offload_params"),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, 2, "--grad_checkpointing"),
        ({**FSDP, "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}, 2, "fsdp_auto_wrap_policy"),
        (
            {**FSDP, **MESH, "PARALLELISM_CONFIG_TP_SIZE": "2"},
            2,
            "tp_size: tensor parallelism needs a plan",
        ),
        ({**FSDP, **MESH, "PARALLELISM_CONFIG_CP_SIZE": "2"}, 2, "cp_size: context parallelism"),
        (
            {**FSDP, **MESH, "PARALLELISM_CONFIG_DP_SHARD_SIZE": "3"},
            2,
            "dp_shard_size 3, 2 processes",
        ),
        ({**FSDP, **MESH}, 2, "dp_shard_size 1, 2 processes"),
        ({**TWO, **MESH}, 2, "distributed_type: FSDP"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, 2, "zero_stage 0 shards nothing"),
        (
            {**DEEPSPEED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"},
            2,
            "offload_optimizer_device",
        ),
        (
            {**DEEPSPEED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"},
            2,
            "give zero_stage in Accelerate's own file",
        ),
        ({**TWO, "ACCELERATE_USE_MEGATRON_LM": "true"}, 2, "Megatron"),
        ({**TWO, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, 2, "max_micro_batch_size"),
        ({**RESTARTS, "TORCHELASTIC_USE_AGENT_STORE": "True"}, 2, "--rdzv_backend machines"),
    ],
)
def test_a_launch_that_would_train_something_else_is_refused(
    environ: dict[str, str], accelerators: int, message: str
) -> None:
    with pytest.raises(Refused, match=message) as refusal:
        check_launch(environ, complete(dict(environ)), accelerators)
    assert "\n" not in str(refusal.value)


def test_other_processes_or_machines_than_asked_for_are_refused() -> None:
    """Machines may be missing only with at_least: c10d would let fewer start where clocks differ."""
    single_process = {**ONE, "ACCELERATE_USE_CPU": "True"}  # MULTI_CPU without mpirun, or --cpu
    with pytest.raises(
        Refused, match="launched for 2 processes on 1 machine, but on this one 1 started"
    ):
        check_launch(
            single_process, complete(dict(single_process)), num_accelerators=1, requested=(2, 1)
        )
    left = {**TWO, "GROUP_WORLD_SIZE": "1"}  # of two machines with two processes each
    check_launch(
        left | {"RECIPES_AT_LEAST": "1"}, complete(dict(left)), num_accelerators=2, requested=(4, 2)
    )
    for requested in (
        (4, 2),
        parse_requested_processes(
            "torchrun --nnodes 2:3 --nproc_per_node 2 recipes/cls.py --lr 1".split()
        ),
    ):
        with pytest.raises(Refused, match="launched for 2 machines, but 1 started this run"):
            check_launch(left, complete(dict(left)), num_accelerators=2, requested=requested)


def test_machines_use_the_interface_towards_the_main_machine(monkeypatch) -> None:
    local_addresses = {"10.0.0.1": "10.0.0.7", "first": "127.0.1.1"}
    monkeypatch.setattr(network, "find_address_towards", local_addresses.__getitem__)
    monkeypatch.setattr(network, "find_interface", {"10.0.0.7": "eth1", "127.0.0.1": "lo"}.get)

    def choose(**variables: str) -> dict[str, str]:
        environ = {**TWO_NODES, "MASTER_PORT": "29500", **variables}
        choose_interface(environ)
        return {
            name: environ[name]
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            if name in environ
        }

    assert choose(MASTER_ADDR="10.0.0.1") == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }
    assert choose(MASTER_ADDR="10.0.0.1", NCCL_SOCKET_IFNAME="ib0")["NCCL_SOCKET_IFNAME"] == "ib0"
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert choose(MASTER_ADDR="127.0.0.1") == loopback, "a rehearsal on one machine"
    assert choose(MASTER_ADDR="first", LOCAL_WORLD_SIZE="2") == loopback, "one machine"
    assert (
        choose(MASTER_ADDR="first", LOCAL_WORLD_SIZE="2", NCCL_SOCKET_IFNAME="ib0")[
            "NCCL_SOCKET_IFNAME"
        ]
        == "ib0"
    )
    with pytest.raises(Refused, match=r"knows the main machine first as 127.0.1.1"):
        choose(MASTER_ADDR="first")
    assert choose(MASTER_ADDR="first", GLOO_SOCKET_IFNAME="eth1") == {"GLOO_SOCKET_IFNAME": "eth1"}

    # The processes of one machine meet on its loopback, at the address of their job, unless their
    # launcher keeps the store.
    for address, more, main in (
        ("10.0.0.1", {}, "127.0.0.1"),
        ("127.1.2.3", {}, "127.1.2.3"),
        ("10.0.0.1", {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "10.0.0.1"),
    ):
        environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address, **more}
        choose_interface(environ)
        assert environ["MASTER_ADDR"] == main


def test_a_store_listens_on_all_interfaces_only_if_it_has_to(monkeypatch, capsys) -> None:
    """As behind a name that on its own machine is a loopback, or an address that a router translates."""
    stores = []
    monkeypatch.setattr(
        network, "find_address_towards", {"10.0.0.1": "10.0.0.1", "first": "127.0.1.1"}.get
    )
    monkeypatch.setattr(network, "host_store", lambda *address: stores.append(address[:2]))
    for host in ("127.0.0.1", "10.0.0.1", "first"):
        meeting._listen(host, 1)
    assert stores == [("127.0.0.1", 1), ("10.0.0.1", 1)]
    assert capsys.readouterr().out.startswith(
        "first is no address of this machine's own: what listens on port 1 does so on all"
    )
    for number, message in (
        (errno.EADDRNOTAVAIL, ""),
        (errno.EADDRINUSE, "port 5 of 10.0.0.1 is taken: export MASTER_PORT"),
    ):
        monkeypatch.setattr(network, "host_store", mock.Mock(side_effect=OSError(number, "")))
        with pytest.raises(Refused, match=message) if message else contextlib.nullcontext():
            meeting._listen("10.0.0.1", 5)
    assert "on all interfaces" in capsys.readouterr().out


def test_machines_leave_alone_if_the_others_can_continue() -> None:
    assert find_leavers({1}, 3, 1) == [1] and find_leavers({2, 1}, 3, 1) == [1, 2]
    assert find_leavers({1}, 3, 3) == find_leavers({0}, 3, 1) == [0, 1, 2], (
        "two are too few; the first has the address"
    )
    assert find_leavers(set(), 3, 3) == [], "machines are joining"


def test_the_launcher_and_its_file_say_how_many_processes() -> None:
    file = "--config_file accelerate_configs"
    script = "recipes/cls.py --num_processes 9"
    for command, expected in (
        (f"/opt/bin/python3 /opt/bin/accelerate launch {file}/multi_cpu.yaml {script}", (2, 1)),
        (f"accelerate-launch {file}/multi_cpu.yaml --num_processes 3 {script}", (3, 1)),
        (
            f"python -m accelerate.commands.accelerate_cli launch {file}/2node_cpu.yaml "
            f"--num_processes 4 {script}",
            (4, 2),
        ),
        (f"accelerate launch {file}/multi_gpu.yaml {script}", None),
        (f"accelerate launch {file}/multi_gpu.yaml --num_processes 4 {script}", (4, 1)),
    ):
        assert parse_requested_processes(command.split()) == expected
    assert parse_requested_processes("python recipes/cls.py accelerate launch".split()) is None


def test_a_refusal_is_one_line_whatever_the_names_in_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["cls.py"])

    def main() -> None:
        raise Refused("a\nb \x1b[2J \udcff.png: é 足")

    with pytest.raises(SystemExit, match="2"):
        launch.run(main)
    launch.print_on_main("a\nb\x1b")
    captured = capsys.readouterr()
    assert (
        captured.err == "cls.py: a\\nb \\x1b[2J \\udcff.png: é 足\n"
        and captured.out == "a\\nb\\x1b\n"
    )


@pytest.mark.parametrize("flag", ["--local-rank=0", "--local_rank=0"])
def test_the_flag_of_torch_distributed_launch_is_known(monkeypatch, flag) -> None:
    monkeypatch.setattr(
        os,
        "environ",
        dict.fromkeys(["LOCAL_RANK", "RANK"], "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    )
    monkeypatch.setattr("sys.argv", ["cls.py", flag, "--lr", "0.5", "--local_rank=1"])
    left = []
    launch.run(lambda: left.extend(sys.argv))
    assert left == ["cls.py", "--lr", "0.5", "--local_rank=1"]


def test_a_refusal_is_printed_once_and_waits_for_no_fifo(tmp_path, monkeypatch, capsys) -> None:
    """Neither where its note lies now nor in the shared temporary folder, where the name could be
    laid by anybody.
    """
    notes = tmp_path / f".cache/recipes/refusal-{socket.gethostname()}"
    notes.parent.mkdir(parents=True)
    for path in (notes, tmp_path / f"recipes-refusal-{os.getuid()}"):
        os.mkfifo(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "REFUSAL_DELAY_S", 2.0)
    for local_rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        printer = threading.Thread(target=launch._print_once_per_machine, args=("no",), daemon=True)
        printer.start()
        printer.join(30)
        assert not printer.is_alive(), "it waits for a reader"
    assert capsys.readouterr().err == "no\n"


def test_threads_of_collectives_do_not_abort_who_leaves(tmp_path) -> None:
    """Of a launcher that is not ours: it would take the abort of one rank for a failure of the run."""
    script = Path(__file__).with_name("leave_in_flight.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "75 75\n" * 2, done.stdout + done.stderr
