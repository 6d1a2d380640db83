"""Runs a recipe unchanged, and measures what it does on the GPU.

    accelerate launch ... tests/gpu/observed.py recipes/cls.py words

The main process writes a JSON object to the file named by the environment variable OBSERVED:

- "trial_gib", "steps_gib": peak memory of the search for the micro-batch, and of all steps
- "held_gib": memory in use before each of both
- "waits": places where the host waited for the device in the steps 6 to 10
- "graphs": number of graphs that torch.compile made
- "first_step_s": seconds until the first step was made

Three more variables disturb the run. HOLD_AT=STEP pauses it after that step, once its last checkpoint is written, so that it
can be killed; the file OBSERVED with the suffix .held marks the pause. FIRST_SCALE is the initial loss scale. ROOM=STEP:GIB
(0:1.5) takes all of the GPU's memory but that many GiB, before the search (0) or before that step.
"""

import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

from common.launching import launch
from common.run import micro_batch
from common.run.run import Run
from tests.harness.several import load

OWN = {Path(__file__).resolve().parents[2] / folder for folder in ("common", "recipes")}
GIB = 2**30
WATCHED = range(6, 11)  # steps after all one-time work
began, seen, ballast = time.monotonic(), {"waits": []}, []
step_of_room, room = (float(part) for part in os.environ.get("ROOM", "-1:0").split(":"))


def leave(gib: float) -> None:
    """Takes all of the GPU's memory but `gib`."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast.append(torch.empty(max(0, int(free - gib * GIB)), dtype=torch.uint8, device="cuda"))
    torch.cuda.reset_peak_memory_stats()


def peak() -> float:
    return (torch.cuda.max_memory_allocated() - sum(map(len, ballast))) / GIB


def held() -> float:
    torch.cuda.reset_peak_memory_stats()
    return (torch.cuda.memory_allocated() - sum(map(len, ballast))) / GIB


start, fit, steps, end_step = launch.start, micro_batch.fit, Run.steps, Run.end_step


def started(*arguments, **options):
    accelerator = start(*arguments, **options)
    if accelerator.scaler and "FIRST_SCALE" in os.environ:
        accelerator.scaler._init_scale = float(os.environ["FIRST_SCALE"])
    return accelerator


def fitted(*arguments):
    if not torch.cuda.is_initialized():
        return fit(*arguments)
    if step_of_room == 0:
        leave(room)
    seen["held_gib"] = [held()]
    plan = fit(*arguments)
    seen["trial_gib"] = peak()
    return plan


def watched_steps(run):
    on_gpu = run.accelerator.device.type == "cuda"
    if on_gpu:
        seen["held_gib"].append(held())
    for step in steps(run):
        if step + 1 == step_of_room:
            leave(room)
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn" if step + 1 in WATCHED else "default")
        yield step
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")


def ended(run, grad_norm):
    end_step(run, grad_norm)
    seen.setdefault("first_step_s", time.monotonic() - began)
    if run.accelerator.device.type == "cuda":
        seen["steps_gib"] = peak()
    if run.step == int(os.environ.get("HOLD_AT", 0)):
        run._writer.wait()
        if os.environ.get("RANK", "0") == "0":
            Path(os.environ["OBSERVED"]).with_suffix(".held").touch()
        time.sleep(3600)


def warned(message, category, filename, lineno, *rest) -> None:
    if "synchronizing CUDA operation" in str(message):
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_stack()]
        own = [place for place in places if OWN & {*Path(place[0]).resolve().parents}]
        file, line = own[-1] if own else (filename, lineno)
        seen["waits"].append(f"{Path(file).name}:{line}")
    else:
        show(message, category, filename, lineno, *rest)


def main() -> None:
    recipe = load(Path(sys.argv[0]))
    launch.start, micro_batch.fit, Run.steps, Run.end_step = started, fitted, watched_steps, ended
    try:
        recipe.main()
    finally:
        seen["graphs"] = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
        if os.environ.get("RANK", "0") == "0":
            Path(os.environ["OBSERVED"]).write_text(json.dumps(seen))


if __name__ == "__main__":
    show, warnings.showwarning = warnings.showwarning, warned
    warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
    sys.argv = sys.argv[1:]
    launch.run(main)
