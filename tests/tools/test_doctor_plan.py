"""The doctor's plan: it tries each layout, names the fastest with its command, and none from figures that can't be true."""

import dataclasses
import json
import shlex
import signal
from pathlib import Path

import pytest
import torch

from tools.doctor import plan, trial
from tools.doctor.trial import Layout
from tools.doctor.world import World

RECIPE = Path("recipes/cls.py")


def test_layouts_that_are_tried() -> None:
    def counts(here: int) -> list[int]:
        world = World(world_size=here, local_world_size=here, hosts=["a"] * here)
        return [layout.processes for layout in plan.layouts_of(world)]

    assert [counts(most) for most in (3, 8, 12)] == [[1, 2, 3], [1, 2, 3, 4, 8], [1, 2, 3, 4, 8, 12]]
    world = World(rank=5, world_size=6, local_rank=2, local_world_size=3, node=1)
    found = [(layout.processes, layout.machines) for layout in plan.layouts_of(world)]
    assert found == [(1, 1), (2, 1), (3, 1), (6, 2)]


def test_a_process_of_a_layout_gets_a_launchers_variables() -> None:
    given = {"OMP_NUM_THREADS": "3", "RANK": "7", "SLURM_PROCID": "7", "MASTER_ADDR": "far", "HOME": "/home"}
    one = trial.launch_variables(Layout(1), 0, True, given)
    added = {"ACCELERATE_MIXED_PRECISION": "no", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONUNBUFFERED": "1"}
    assert one == {"OMP_NUM_THREADS": "3", "HOME": "/home", "PYTHONPATH": str(trial.ROOT)} | added
    last = trial.launch_variables(Layout(6, 2, 1, "10.0.0.1", 2000), 2, False, given)
    numbers = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    assert [last[name] for name in numbers] == ["5", "2", "6", "3", "1", "2", "10.0.0.1", "2000"]


def test_the_cause_of_a_failed_layout_is_one_line() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py"\nRuntimeError: no kernel\non rank 0 (host)\n'
    assert trial.cause_of(1, trace) == "RuntimeError: no kernel"
    assert trial.cause_of(2, "warning: x\ncls.py: --lr 7: too much\n") == "cls.py: --lr 7: too much"
    assert trial.cause_of(-signal.SIGKILL, "") == "killed by SIGKILL: was it killed for want of memory?"
    assert trial.cause_of(3, "") == "exit code 3"


def test_the_command_starts_the_layout(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    launch = "accelerate launch --config_file accelerate_configs"
    world, own = World(recipe=RECIPE, words=["--lr", "1"]), "recipes/cls.py --lr 1"
    assert plan.command(world, Layout(1)) == f"{launch}/cpu.yaml {own}"
    assert plan.command(world, Layout(2)) == f"{launch}/multi_cpu.yaml {own}"
    assert plan.command(world, Layout(3)) == f"{launch}/multi_cpu.yaml --num_processes 3 {own}"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    cuda = dataclasses.replace(world, device=torch.device("cuda", 0))
    assert plan.command(cuda, Layout(1)) == f"{launch}/single_gpu_bf16.yaml {own}"
    assert plan.command(cuda, Layout(4)) == f"{launch}/multi_gpu_bf16.yaml --num_processes 4 {own}"
    flags = "--num_machines 2 --num_processes 8 --main_process_ip 10.0.0.1"
    assert plan.command(cuda, Layout(8, 2)) == f"{launch}/2node_bf16.yaml {flags} {own}"


@pytest.mark.parametrize(
    "speeds, others, said",
    [
        ({1: 100, 2: 180}, 0.0, "2 processes, 180 images/s, 1.8 times as many as 1 process"),
        ({1: 178, 2: 180}, 0.1, "1 process, 178 images/s"),
        ({1: 10, 2: 130}, 0.0, "none is named: 2 processes made 13 times the images of 1 process, which is impossible"),
        ({1: 100, 2: 180}, 0.9, "none is named: other programs use 90% of the cores"),
    ],
)
def test_the_fastest_layout_is_named_from_figures_that_can_be_true(speeds: dict, others: float, said: str) -> None:
    tried = [(Layout(count), {"images_per_second": speed, "others": others}) for count, speed in speeds.items()]
    row = plan.fastest(World(recipe=RECIPE), tried)
    assert row.measured.startswith(said)
    assert (row.status, "command" in row.figures) == (("warning", False) if "none" in said else ("ok", True))


@pytest.mark.alone
def test_the_plan_tries_each_layout_as_it_then_runs(launch, tmp_path, monkeypatch, capsys) -> None:
    """Within a factor of 2, for machines on which others work."""
    monkeypatch.setattr(plan, "cores", lambda: 2)
    monkeypatch.setattr(trial, "used_by_others", lambda: 0.0)
    monkeypatch.setattr(plan, "_IMPOSSIBLE", 10)
    words = ["--workers", "0", "--batch_norm", "group", "--output_dir", str(tmp_path)]
    rows = plan.plan(World(recipe=RECIPE, words=words, is_met=True))
    assert "2 layouts, usually" in capsys.readouterr().err
    assert [row.check for row in rows] == ["plan: 1 process", "plan: 2 processes", "plan: fastest", "plan: results"]
    assert {row.status for row in rows} == {"ok"} and not any(tmp_path.iterdir())
    speeds = {row.figures["processes"]: row.figures["images_per_second"] for row in rows[:2]}
    command = shlex.split(rows[2].figures["command"])
    assert speeds[1 if any(word.endswith("/cpu.yaml") for word in command) else 2] > 0.95 * max(speeds.values())
    assert all(row.figures["memory"] > 2**28 for row in rows[:2])
    quiet = ["--max_steps", 60, "--tracker", "none", "--eval_every", 10**6, "--name", "real", "--log_every", 5]
    done = launch("multi_cpu", RECIPE, *words, *quiet)
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line) for line in (tmp_path / "real/metrics.jsonl").read_text().splitlines()]
    real = sorted(row["perf/images_per_second"] for row in logged[2:] if "perf/images_per_second" in row)
    assert 0.5 < speeds[2] / real[len(real) // 2] < 2
