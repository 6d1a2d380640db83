"""Every file of accelerate_configs/ starts the processes that it promises."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.run import determine_local_world_size

from common.distributed.sharding import Sharding
from common.launching.launch_checks import read_sharding
from common.launching.network import await_listener
from tests.harness.launching import find_free_port

FOLDER = Path(__file__).parent.parent / "accelerate_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
GPU_LAYOUTS = ("single_gpu", "multi_gpu", "2node")
SHARDED = {"fsdp_cpu", "fsdp_bf16", "2node_fsdp_bf16", "2node_hsdp_bf16"}
COUNTED = "auto"  # number of processes: torch counts the GPUs
PRECISIONS = {"": "no", "_fp16": "fp16", "_bf16": "bf16"}


def count_processes(name: str) -> int:
    """Of a file, on a machine with 8 GPUs."""
    number = list_keys(name).get("num_processes", 1)
    return 8 if number == COUNTED else number


def list_keys(name: str) -> dict[str, object]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


# Every rank writes the world that it got, and a sum over ranks that only ranks which hear each
# other can know.
PROBE = """
import json, sys, torch
from common.launching.launch import describe_launch, run, start

def main():
    accelerator = start()
    rank = accelerator.process_index
    total = accelerator.reduce(torch.tensor(rank + 1.0), "sum").item()
    with open(f"{sys.argv[1]}/rank{rank}.json", "w") as file:
        json.dump([accelerator.num_processes, total, describe_launch(accelerator, "float32")], file)

run(main)
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("probe") / "probe.py"
    script.write_text(PROBE)
    return script


@pytest.mark.smoke
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_begins_with_the_command_for_every_machine(path: Path) -> None:
    comment = re.match(r"(#.*\n)+", path.read_text()).group()
    [command] = [shlex.split(line) for line in re.findall(r"#   (accelerate launch .*)", comment)]
    arguments = launch_command_parser().parse_args(command[2:])
    assert arguments.config_file == f"accelerate_configs/{path.name}"
    assert arguments.training_script == "recipes/cls.py"
    assert arguments.machine_rank is None, "the address says which machine is the first"
    config = load_config_from_file(str(path))
    assert (arguments.main_process_ip is not None) == (config.num_machines > 1)
    if config.num_processes != COUNTED:
        assert config.num_processes % config.num_machines == 0


@pytest.mark.smoke
@pytest.mark.parametrize("path", [path for path in FILES if count_processes(path.stem) > 1])
def test_processes_meet_where_they_can_be_replaced(path: Path) -> None:
    """Accelerate takes the flag from the section that no other part of it reads; a flag on the
    command line wins.
    """
    command = ["--config_file", str(path), "recipes/cls.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert arguments.rdzv_backend == "machines"
    assert getattr(arguments, "rdzv_endpoint", "") == (
        "" if arguments.num_machines > 1 else "localhost:0"
    )
    command[:0] = ["--rdzv_backend", "static"]
    assert (
        _validate_launch_command(launch_command_parser().parse_args(command))[0].rdzv_backend
        == "static"
    )


@pytest.mark.smoke
def test_files_differ_only_in_precision_machines_and_devices() -> None:
    for layout in GPU_LAYOUTS:
        for suffix, precision in PRECISIONS.items():
            assert list_keys(layout + suffix) == {**list_keys(layout), "mixed_precision": precision}
    two = list_keys("2node")
    assert two["num_processes"] / 2 == count_processes("multi_gpu")
    command = ["--config_file", str(FOLDER / "2node.yaml"), "--main_process_ip", "10.0.0.1"]
    # As docs/layouts.md says.
    command += ["--num_machines", "4", "--num_processes", "32", "recipes/cls.py"]
    four, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert (four.num_machines, four.num_processes) == (4, 32)
    assert list_keys("2node_cpu") == two | {
        "gpu_ids": "-1,-1",
        "num_processes": 2,
        "mixed_precision": "no",
    }


@pytest.mark.smoke
def test_files_that_shard_differ_only_in_the_sharding() -> None:
    allowed = {"distributed_type", "fsdp_config", "parallelism_config"}
    for name, base in {"fsdp_cpu": "multi_cpu", "fsdp_bf16": "multi_gpu_bf16"}.items() | {
        (f"2node_{kind}_bf16", "2node_bf16") for kind in ("fsdp", "hsdp")
    }:
        actual, expected = (
            {key: value for key, value in list_keys(file).items() if key not in allowed}
            for file in (name, base)
        )
        assert actual == expected, name
        command = launch_command_parser().parse_args(
            ["--config_file", str(FOLDER / f"{name}.yaml"), "recipes/cls.py"]
        )
        command.main_process_ip = "127.0.0.1"
        environ = prepare_multi_gpu_env(_validate_launch_command(command)[0])
        sharding = read_sharding(environ | {"WORLD_SIZE": str(count_processes(name))})
        assert sharding == Sharding(num_shards=8 if "hsdp" in name else 0), name


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["multi_gpu", "multi_gpu_bf16", "multi_gpu_fp16", "fsdp_bf16"])
def test_a_file_of_one_machine_counts_its_gpus(name: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    counts = []
    for flags in ([], ["--num_processes", "2"]):
        command = flags + ["--config_file", str(FOLDER / f"{name}.yaml"), "recipes/cls.py"]
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
        prepare_multi_gpu_env(arguments)
        counts.append(determine_local_world_size(arguments.nproc_per_node))
    assert counts == [3, 2]


def read_worlds(folder: Path) -> dict[str, list]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("rank*.json")}


@pytest.mark.parametrize("config, precision", [("multi_cpu", "bf16"), ("fsdp_cpu", "fp32")])
def test_a_cpu_file_starts_ranks_that_hear_each_other(
    launch, probe, tmp_path, config: str, precision: str
) -> None:
    done = launch(
        config,
        [probe, tmp_path],
        flags=["--mixed_precision", {"fp32": "no"}.get(precision, precision)],
    )
    assert done.returncode == 0, done.stderr
    layout = [2, 3, f"2 processes on 1 node, cpu (gloo), {precision}, started by accelerate launch"]
    assert read_worlds(tmp_path) == {"rank0.json": layout, "rank1.json": layout}


def test_two_machines_make_one_world_and_name_a_missing_address(launch, probe, tmp_path) -> None:
    forgotten = launch.start("2node_cpu", [probe, tmp_path])
    port = find_free_port()
    flags = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    first = launch.start("2node_cpu", [probe, tmp_path], flags=flags)
    await_listener("127.0.0.1", port, timeout=60)  # before that it looks whether the port is free
    # Which does not look.
    second = launch.start("2node_cpu", [probe, tmp_path], flags=flags + ["--machine_rank", 1])
    nodes = [node.finish() for node in (first, second)]
    assert [node.returncode for node in nodes] == [0, 0], nodes
    layout = [2, 3, "2 processes on 2 nodes, cpu (gloo), fp32, started by accelerate launch"]
    assert read_worlds(tmp_path) == {"rank0.json": layout, "rank1.json": layout}
    done = forgotten.finish()
    way_out = "pass --main_process_ip or export MASTER_ADDR, the address of the first machine"
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith(way_out)
