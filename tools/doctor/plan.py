"""Plan and rehearsal: the recipe trains for some seconds in one layout, or in each that is possible."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from common.distributed import devices
from common.distributed.environment import cores
from common.errors import Refused
from tools.doctor.finding import GIB, Finding, judged
from tools.doctor.limits import BUSY, said_busy
from tools.doctor.trial import Layout, config_of, try_layout
from tools.doctor.world import World

REHEARSAL_S, PLAN_S = 150.0, 3600.0  # limits
_LAYOUT_S, _MEASURED_S, _USUAL_S = 600.0, 6.0, 20.0  # of a layout: the limit, what it trains, what it usually takes
_SAME = 1.03  # layouts whose speeds differ by less are equally fast: fewer processes are simpler
_LAGS = 0.15  # share of the time that the slowest rank is behind the average one
_WAITS = 0.2  # share of the time that a process waits for data
_MOST_MEMORY = 0.9  # share of the memory that one should not exceed
_CHECKPOINTS = 3  # two that are kept (--keep_checkpoints) and the one that is being written


def rehearse(world: World) -> list[Finding]:
    """Rows for some steps in the launched layout, with their memory and a checkpoint."""
    layout = Layout(world.world_size, world.world_size // world.local_world_size, world.node)
    found = try_layout(world, layout, 1.5, REHEARSAL_S - 75, log_every=1)
    if found.get("late"):  # which a busy machine may be
        return [Finding("rehearsal", "not run", "the recipe did not come to its fourth step", found["failed"])]
    if "failed" in found:
        return [Finding("rehearsal", "failed", "the recipe made no step", found["failed"])]
    there = Path(config_of(world).output_dir).resolve()
    free = shutil.disk_usage(next(path for path in [there, *there.parents] if path.exists())).free
    on_gpu = world.device.type == "cuda"
    room = devices.memory(world.device)[1] if on_gpu else psutil.virtual_memory().total / world.local_world_size
    return rehearsed(found, world, room, free)


def rehearsed(found: dict, world: World, room: float, free: float) -> list[Finding]:
    """Rows for what a trial found, with `room` bytes of memory per process and a disk with `free` bytes."""
    fewer = "raise --workers, store smaller images, decode fewer times (--cache), or take a machine with more cores"
    smaller = "take a smaller --max_micro_batch_size, which does not change the result, or fewer processes per machine"
    look = "every step waits for it: look there for other processes (top, nvidia-smi), throttling, and a CPU quota"
    speed = f"{found['samples'] / found['images_per_second']:.3g} s per step of {found['samples']} samples"
    text = f"{speed}, {_described(found)}, {found['start_s']:.2g} s to the first step"
    rows = [judged("rehearsal: steps", text, (found["data_wait"] > _WAITS, "warning", fewer), figures=found)]
    if found["lag"] >= _LAGS:
        text = f"is the slowest rank: it takes {found['lag']:.0%} of the time longer than the others on average"
        rows.append(Finding("rehearsal: slowest", "warning", text, look, world.name(found["slowest"])))
    text = f"{found['memory'] / GIB:.2f} GiB of {room / GIB:.3g} GiB per process at the peak"
    rows.append(judged("rehearsal: memory", text, (found["memory"] > _MOST_MEMORY * room, "warning", smaller)))
    check, size = "rehearsal: checkpoint", found.get("checkpoint_bytes", 0)
    if not size:
        return [*rows, Finding(check, "failed", "none was written", "see the recipe: it must call run.save")]
    text = f"{size / 2**20:,.1f} MiB, verified in {found['verify_s']:.2g} s; {free / GIB:,.1f} GiB are free"
    needed = _CHECKPOINTS * size
    way_out = f"a run keeps up to {_CHECKPOINTS} of them: free {needed / GIB:.1f} GiB, or take another --output_dir"
    return [*rows, judged(check, text, (free < needed, "failed", way_out))]


def plan(world: World) -> list[Finding]:
    """A row for each number of processes, and the fastest layout. Raises `Refused`."""
    if world.recipe is None:
        raise Refused("--plan needs a recipe and its flags: --plan recipes/cls.py --data FOLDER")
    config_of(world)
    layouts = layouts_of(world)
    _say(world, f"{len(layouts)} layouts, usually {_USUAL_S:.0f} s each. Other work on these machines makes it wrong.")
    rows, tried = [], []
    for layout in layouts:
        found = try_layout(world, layout, _MEASURED_S, _LAYOUT_S, log_every=5)
        if "failed" in found:
            rows.append(Finding(f"plan: {layout}", "warning", "can't be had", found["failed"]))
            continue
        tried.append((layout, found))
        text = f"{_described(found)}, {found['memory'] / GIB:.2f} GiB per process"
        rows.append(Finding(f"plan: {layout}", "ok", text, figures=found | {"processes": layout.processes}))
        _say(world, f"{layout}: {text}")
    if not tried:
        raise Refused(f"no layout could be tried: {rows[0].way_out}")
    return [*rows, fastest(tried)]


def layouts_of(world: World) -> list[Layout]:
    """From one process to all that were launched; to all cores or GPUs of the machine if only one was."""
    here, machines = world.local_world_size, world.world_size // world.local_world_size
    if world.world_size == 1:
        here = {"cpu": cores(), "cuda": torch.accelerator.device_count()}.get(world.device.type, 1)
    counts = sorted({1, 2, 3, 4, *(2**power for power in range(3, 12)), here} & {*range(1, here + 1)})
    layouts = [Layout(count, node=world.node) for count in counts]
    return layouts + [Layout(here * count, count, world.node) for count in range(2, machines + 1)]


def fastest(tried: Sequence[tuple[Layout, dict]]) -> Finding:
    """The row of the fastest layout; of none if other programs disturbed."""
    check, again = "plan: fastest", "plan again on machines that do nothing else"
    speeds = {layout: found["images_per_second"] for layout, found in tried}
    busy = max(found["others"] for _, found in tried)
    if busy > BUSY:
        return Finding(check, "warning", f"none is named: {said_busy(busy)} meanwhile", again)
    best = next(layout for layout, speed in speeds.items() if speed * _SAME >= max(speeds.values()))
    text = f"{best} (--num_processes {best.processes}), {speeds[best]:,.0f} images/s"
    if best.processes > 1 and (alone := speeds.get(Layout(1, node=best.node))):
        text += f", {speeds[best] / alone:.2g} times as many as 1 process"
    return Finding(check, "ok", text, figures={"processes": best.processes})


def _described(found: dict) -> str:
    return f"{found['images_per_second']:,.0f} images/s, {found['data_wait']:.0%} of the time waiting for data"


def _say(world: World, text: str) -> None:
    if world.is_main:
        print(text, file=sys.stderr, flush=True)
