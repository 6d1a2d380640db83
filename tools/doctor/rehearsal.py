"""Rehearsal: two steps of the recipe in the launched layout, with a checkpoint written and loaded. Nothing is kept.

The processes of the rehearsal are children of the doctor's: whatever becomes of them is a row of the table.
"""

import dataclasses
import shutil
import statistics
from pathlib import Path

import psutil
import torch

from common.distributed.environment import cores
from tools.doctor.finding import Finding
from tools.doctor.plan import output_dir_of, try_everywhere
from tools.doctor.plan_layouts import Layout
from tools.doctor.world import World
from tools.trained import RECIPES

LIMIT_S = 180.0
_GIB, _MIB = 2**30, 2**20
_MOST_MEMORY = 0.9  # share of the memory that one should not exceed
_CHECKPOINTS = 3  # two that are kept (--keep_checkpoints) and the one that is being written


def rehearse(world: World) -> list[Finding]:
    """Rows for the steps, the memory, the checkpoint and the data; on rank 0. A failure is one row with its cause."""
    recipe = world.recipe or RECIPES / "cls.py"
    output_dir = output_dir_of(recipe, world.words)
    layout = Layout(world.world_size, world.world_size // world.local_world_size, world.node)
    world = dataclasses.replace(world, recipe=recipe)
    found = try_everywhere(world, layout, output_dir, LIMIT_S - 75, seconds=0, phases=1, rounds=1)
    if not world.is_main:
        return []
    if failed := [result for result in found if "failed" in result]:
        return [Finding("rehearsal", "failed", f"{recipe.name} did not make two steps", failed[0]["failed"])]
    there = Path(output_dir).resolve()
    free = shutil.disk_usage(next(path for path in [there, *there.parents] if path.exists())).free
    return [steps(found), memory(found, world), checkpoint(found, free), supply(found, cores())]


def steps(found: list[dict]) -> Finding:
    """The parts of a step, of the slowest process."""
    phases = [result["phases"][0] for result in found]
    slowest = max(phases, key=lambda phase: phase["step_s"])
    size, parts = found[0]["plan"]["global_batch_size"], slowest["micro_steps"]
    sent = (
        max(0.0, slowest["last_s"] - statistics.median(result["alone_s"] for result in found))
        if len(found) > 1
        else 0.0
    )
    computed = slowest["last_s"] - sent + (parts - 1) * (slowest["earlier_s"] or 0.0)
    text = (
        f"{slowest['step_s']:.3g} s per step of {size} samples: data {slowest['data_s']:.3g} s, "
        f"forward and backward {computed:.3g} s, "
    )
    text += f"all-reduce of {found[0]['gradient_bytes'] / _MIB:.1f} MiB {sent:.2g} s, " if len(found) > 1 else ""
    figures = {
        "step_s": slowest["step_s"],
        "data_s": slowest["data_s"],
        "forward_backward_s": computed,
        "all_reduce_s": sent,
        "end_s": slowest["end_s"],
        "start_s": max(result["start_s"] for result in found),
        "gradient_bytes": found[0]["gradient_bytes"],
    }
    text += f"start {figures['start_s']:.2g} s"
    return Finding("rehearsal: steps", "ok", text, figures=figures)


def memory(found: list[dict], world: World) -> Finding:
    """The peak of the process that took the most, against what there is."""
    peak = max(max(result["end_peak"], result["start_peak"]) for result in found)
    on_cuda = world.device.type == "cuda"
    room = (
        torch.cuda.mem_get_info(world.device)[1] if on_cuda else psutil.virtual_memory().total / world.local_world_size
    )
    text = f"{peak / _GIB:.2f} GiB of {room / _GIB:.3g} GiB per process at the peak"
    figures = {"peak_bytes": peak, "room_bytes": room}
    if peak <= _MOST_MEMORY * room:
        return Finding("rehearsal: memory", "ok", text, figures=figures)
    way_out = "take a smaller --max_micro_batch_size, which does not change the result, or fewer processes per machine"
    return Finding("rehearsal: memory", "warning", text, way_out, figures=figures)


def checkpoint(found: list[dict], free: int) -> Finding:
    """Time of saving and loading, and whether the disk has room for the checkpoints that a run keeps."""
    size, saved, loaded = (found[0][name] for name in ("state_bytes", "save_s", "load_s"))
    text = (
        f"{size / _MIB:,.1f} MiB: saved in {saved:.2g} s, verified and loaded in {loaded:.2g} s; "
        f"{free / _GIB:,.1f} GiB are free"
    )
    figures = {"bytes": size, "save_s": saved, "load_s": loaded, "free_bytes": free}
    if free >= _CHECKPOINTS * size:
        return Finding("rehearsal: checkpoint", "ok", text, figures=figures)
    room = f"{_CHECKPOINTS * size / _GIB:.1f} GiB"
    way_out = f"a run keeps up to {_CHECKPOINTS} of them: free {room}, or take another --output_dir"
    return Finding("rehearsal: checkpoint", "failed", text, way_out, figures=figures)


def supply(found: list[dict], cores_here: int) -> Finding:
    """How many samples a core makes per second, against what the model takes."""
    made = statistics.median(result["samples_per_core_s"] for result in found)
    phase = max((result["phases"][0] for result in found), key=lambda phase: phase["step_s"])
    workers, here = found[0]["workers"], len(found)
    taken = found[0]["plan"]["global_batch_size"] / (phase["step_s"] - phase["data_s"])
    each = taken / here  # of a process
    needed = each / made  # data workers of a process
    text = (
        f"a core reads, decodes and augments {made:,.0f} images/s, the model takes {taken:,.0f} images/s on {here} "
        f"process{'es' * (here > 1)}: {needed:.2g} data workers each, of {workers}; {cores_here} cores"
    )
    figures = {"samples_per_core_s": made, "images_per_second": taken, "workers_needed": needed, "workers": workers}
    if needed <= max(workers, 0.25):  # without workers, the process makes its samples itself, between its steps
        return Finding("data: supply", "ok", text, figures=figures)
    count = -(-needed // 1)
    if count * here <= cores_here - here:
        way_out = f"take --workers {count:.0f}"
    else:
        way_out = (
            "the cores are too few: store smaller images, decode fewer times (--cache), decode on the GPU (--decode device), "
            "or take a machine with more cores"
        )
    return Finding("data: supply", "warning", text, way_out, figures=figures)
