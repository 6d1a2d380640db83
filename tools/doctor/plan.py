"""Plan: predicts images per second and memory of each layout of the hardware there is, and names the fastest.

For each number of processes, these really make some steps of the recipe at the same time, so that they share cores, memory
and network as they will in a run. `plan_model` says what follows for every cut of the global batch into micro-batches.
"""

import dataclasses
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from common.config.parsing import parse
from common.data.batch_plan import BatchPlan
from common.distributed.environment import cores
from common.errors import Refused
from tools.doctor.finding import Finding
from tools.doctor.plan_layouts import Layout, counts, folder_for, precision, try_layout
from tools.doctor.plan_model import Pace, Prediction
from tools.doctor.world import World
from tools.trained import load_recipe

LIMIT_S = 3600.0  # of the whole plan
_LAYOUT_S = 600.0  # of one layout
_USUAL_S = 25.0  # that a layout takes if its data are soon opened
_PHASE_S, _ROUNDS, _CUTS = 1.0, 2, 3
_SAME = 1.03  # layouts whose speeds differ by less are equally fast: fewer processes and micro-steps are simpler
_GIB = 2**30


def predict(world: World) -> list[Finding]:
    """A row for each number of processes, and the fastest layout with its command; on rank 0. Raises `Refused`."""
    if world.recipe is None:
        raise Refused("--plan needs a recipe and its flags: --plan recipes/cls.py --data FOLDER")
    output_dir = output_dir_of(world.recipe, world.words)
    layouts = layouts_of(world)
    if world.is_main:
        print(
            f"{len(layouts)} layouts will be tried, usually {_USUAL_S:.0f} s each: about {len(layouts) * _USUAL_S:.0f} s. "
            "Other work on these machines makes the numbers wrong.",
            file=sys.stderr,
            flush=True,
        )
    rows, predictions, inexact = [], [], {}
    for layout in layouts:
        found = try_everywhere(world, layout, output_dir, _LAYOUT_S, seconds=_PHASE_S, phases=_CUTS, rounds=_ROUNDS)
        name = f"plan: {layout}"
        if failed := [result for result in found if "failed" in result]:
            rows.append(Finding(name, "warning", "can't be had", failed[0]["failed"]))
            continue
        pace, inexact = Pace(found), found[0]["inexact"]
        cuts = [pace.predict(plan) for plan in cuts_of(BatchPlan(**found[0]["plan"]))]
        predictions += [(layout, cut) for cut in cuts]
        rows.append(Finding(name, "ok", "; ".join(map(described, cuts)), figures=figures_of(layout, cuts)))
        if world.is_main:
            print(f"{layout}: {described(max(cuts, key=speed))}", file=sys.stderr, flush=True)
    if not predictions:
        raise Refused(f"no layout could be tried: {rows[0].way_out}")
    return [*rows, *named(world, predictions, inexact)] if world.is_main else []


def output_dir_of(recipe: Path, words: Sequence[str]) -> str:
    """Where the recipe with these flags keeps its runs. Raises `Refused` for flags that it does not take."""
    return parse(load_recipe(recipe).Config, [*words], recipe.name).output_dir


def layouts_of(world: World) -> list[Layout]:
    """From one process to all that were launched; to all cores or GPUs of the machine if only one was."""
    here, machines = world.local_world_size, world.world_size // world.local_world_size
    if world.world_size == 1:
        here = {"cpu": cores(), "cuda": torch.cuda.device_count()}.get(world.device.type, 1)
    layouts = [Layout(count, node=world.node) for count in counts(here)]
    return layouts + [Layout(here * count, count, world.node) for count in range(2, machines + 1)]


def try_everywhere(world: World, layout: Layout, output_dir: str, limit: float, **job) -> list[dict]:
    """`try_layout` on each machine of the layout at the same time: what all its processes found, on every rank."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1") if layout.machines > 1 else "127.0.0.1"
    chosen = (str(folder_for(output_dir)), free_port()) if world.is_main else None
    folder, port = world.exchange(chosen)[0]
    layout, found = dataclasses.replace(layout, address=address, port=port), []
    try:
        if world.is_local_main and world.node < layout.machines:
            on_cpu = world.device.type == "cpu"
            assert world.recipe  # the command line asks for one
            found = try_layout(layout, world.recipe, world.words, Path(folder), on_cpu, limit, **job)
        return [result for theirs in world.exchange(found, limit + 60) for result in theirs]
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def cuts_of(plan: BatchPlan) -> list[BatchPlan]:
    """`plan`, with the largest micro-batches that fit, and the next ones with more micro-steps."""
    found = [plan]
    for micro_steps in [] if plan.whole else [factor * plan.micro_steps for factor in (2, 4)]:
        parts = plan.world_size * micro_steps
        if plan.units >= parts:
            found.append(dataclasses.replace(plan, max_micro_batch_size=plan.unit * -(-plan.units // parts)))
    return found


def speed(prediction: Prediction) -> float:
    return prediction.images_per_second


def described(cut: Prediction) -> str:
    """A prediction in words."""
    sizes, steps = " or ".join(map(str, cut.plan.micro_batch_sizes)), cut.plan.micro_steps
    waits = ", waits for data" if cut.waits else ""
    return f"{steps} micro-step{'s' * (steps > 1)} of {sizes}: {speed(cut):,.0f} images/s, {cut.memory / _GIB:.2f} GiB{waits}"


def figures_of(layout: Layout, cuts: Sequence[Prediction]) -> dict:
    """For --json: what is predicted for each cut."""
    return {
        "processes": layout.processes,
        "machines": layout.machines,
        "cuts": [
            {
                "micro_steps": cut.plan.micro_steps,
                "micro_batch_sizes": list(cut.plan.micro_batch_sizes),
                "max_micro_batch_size": cut.plan.max_micro_batch_size,
                "images_per_second": speed(cut),
                "step_s": cut.step_s,
                "all_reduce_s": cut.all_reduce_s,
                "memory_bytes": cut.memory,
                "waits_for_data": cut.waits,
            }
            for cut in cuts
        ],
    }


def named(world: World, predictions: Sequence[tuple[Layout, Prediction]], inexact: dict[str, str]) -> list[Finding]:
    """Rows for the fastest layout and its command, and for what a change of the layout would change."""
    best = max(speed(cut) for _, cut in predictions)
    layout, cut = next((layout, cut) for layout, cut in predictions if speed(cut) * _SAME >= best)
    alone = max((speed(cut) for other, cut in predictions if other.processes == 1), default=0.0)
    times = f", {speed(cut) / alone:.2g} times as many as 1 process" if alone and layout.processes > 1 else ""
    rows = [
        Finding(
            "plan: fastest",
            "ok",
            f"{layout}, {described(cut)}{times}",
            figures={"command": command(world, layout, cut, predictions)},
        )
    ]
    if not inexact:
        same = "a run can change to it at any checkpoint: layouts don't change results"
        return [*rows, Finding("plan: results", "ok", same)]
    causes = "; ".join(f"{name}: {text}" for name, text in inexact.items())
    return [*rows, Finding("plan: results", "warning", "layouts change the results of this recipe", causes)]


def command(
    world: World, layout: Layout, cut: Prediction, predictions: Sequence[tuple[Layout, Prediction]] = ()
) -> str:
    """What starts the recipe in this layout."""
    kind, suffix = precision(os.environ), ""
    flags: list[object] = []
    if world.device.type == "cuda":
        suffix = "" if kind == "no" else f"_{kind}"
        name, usual = ("single_gpu", 1) if layout.processes == 1 else ("multi_gpu", 8)
    else:
        name, usual = (world.device.type, 1) if layout.processes == 1 else ("multi_cpu", 2)
        flags += [] if kind == "no" else ["--mixed_precision", kind]
    if layout.machines > 1:
        name = "2node_cpu" if world.device.type == "cpu" else "2node"
        flags += ["--num_machines", layout.machines, "--num_processes", layout.processes, "--main_process_ip"]
        flags += [os.environ.get("MASTER_ADDR", "HOST")]
    elif layout.processes != usual:
        flags += ["--num_processes", layout.processes]
    words: list[object] = [*world.words]
    if any(
        other == layout and speed(least) != speed(cut) and least.plan.micro_steps < cut.plan.micro_steps
        for other, least in predictions
    ):  # smaller micro-batches than the run would take itself
        words = without(words, "--max_micro_batch_size") + ["--max_micro_batch_size", cut.plan.max_micro_batch_size]
    file = f"accelerate_configs/{name}{suffix}.yaml"
    return shlex.join(map(str, ["accelerate", "launch", "--config_file", file, *flags, world.recipe, *words]))


def without(words: Sequence[object], flag: str) -> list[object]:
    """`words` less a flag and its value."""
    return [
        word
        for place, word in enumerate(words)
        if not (word == flag or str(word).startswith(f"{flag}=") or (place and words[place - 1] == flag))
    ]
