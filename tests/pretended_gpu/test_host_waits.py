"""How often the host waits for the GPU in a step of each recipe is an exact number, on real GPUs
and on pretended ones.

The host waits until a stream has done all that it was asked to do when a number is read, when a
shape depends on numbers, and when memory that is not pinned is copied from or to. On a real GPU
`torch.cuda.set_sync_debug_mode` reports that. A pretended GPU also hears waiting for an event,
which may have passed long ago, and copies that are told not to wait, but may, since memory is not
pinned.
"""

import ctypes
import functools
import json
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.distributed.collectives import leave_process_group
from tests.harness.launching import add_small_defaults
from tests.harness.outcomes import read
from tests.harness.several import load_recipe
from tests.recipes.copied import CHANGES, copy

pytestmark = pytest.mark.gpu
# In this order, or a fork would count its GPUs too early.
IS_REAL = "LD_PRELOAD" not in os.environ and torch.cuda.is_available()
WAIT = "cudaStreamSynchronize"

# Steps that are made before, in which much happens once; and steps that are counted.
FIRST = 3
STEPS = 2
# Runs of `recipes/cls.py`, precision and words, whose steps wait for nothing.
CLS = {
    "varied": (
        "bf16",
        "--mixup 0.2 --cutmix 1 --random_erasing 0.3 --color_jitter 0.3 --hflip 0.5 "
        "--label_smoothing 0.1 --channels_last --ema_decay 0.9 --clip 1 --batch_norm global "
        "--workers 1",
    ),
    "groups": (
        "fp16",
        "--clip 0.1 --clip_mode agc --batch_norm group --norm_batch_size 4 --max_micro_batch_size "
        "8",
    ),
    "transformer": (
        "bf16",
        "--model test_vit --drop_path 0.2 --drop 0.1 --layer_decay 0.8 --grad_checkpointing "
        "--clip 1",
    ),
    "momentum": (
        "fp16",
        "--opt momentum --loss bce --class_weights balanced --batch_norm frozen --ema_decay 0.9",
    ),
    "lamb": ("bf16", "--opt lamb --batch_norm node --drop_path 0.1"),
}
if IS_REAL:
    CLS["compiled"] = ("bf16", "--mixup 0.2 --color_jitter 0.3 --compile")
IMAGES = 4
MICRO_STEPS = 2
LEVELS = 2  # of a step of `recipes/det.py`, on one device
# How many proposals of an image are left; which of them belong to each level; scipy matches queries
# and boxes on the host.
_SUPPRESSION = {"models/boxes.py, ops/boxes.py": IMAGES}
_ROI_LEVELS = {"models/rcnn.py, ops/poolers.py": MICRO_STEPS * LEVELS}
_MATCHER = {"models/queries.py": MICRO_STEPS}
# Runs of `recipes/det.py`: precision, words, and how often a step waits at which place.
DET = {
    "fcos": ("bf16", "--ema_decay 0.9 --clip 1 --workers 1", {}),
    "retinanet": ("no", "--batch_norm group", {}),
    "faster_rcnn": ("bf16", "", _SUPPRESSION | _ROI_LEVELS),
    # a second pool
    "mask_rcnn": (
        "no",
        "",
        _SUPPRESSION | {place: 2 * often for place, often in _ROI_LEVELS.items()},
    ),
    "rtdetr_v2": ("fp16", "--width 32", _MATCHER),
    "dfine": ("no", "--width 32", _MATCHER),
    "deimv2": ("bf16", "--width 32", _MATCHER),
    # interpolates its position embeddings
    "rf_detr": ("bf16", "--model rf_detr_nano --short_sides 64,96", _MATCHER),
    "rf_detr_seg": ("no", "--model rf_detr_seg_nano --short_sides 72", _MATCHER),
}
_WORDS = (
    "--tracker none --log_every 1 --max_steps 100 --eval_every 100 --checkpoint_every 100 "
    "--workers 0"
)
_OF = {
    "cls": f"{_WORDS} --global_batch_size 16",
    "det": (
        f"{_WORDS} --global_batch_size {IMAGES} --max_micro_batch_size {IMAGES // MICRO_STEPS} "
        "--short_sides 64"
    ),
}
_OTHERS = (sysconfig.get_path("stdlib"), str(Path(__file__).resolve().parent))


class _Enough(BaseException):
    """Ends a run."""


def count_waits(main: Callable[[], None]) -> list[Counter[str]]:
    """Run `main` for `FIRST` + `STEPS` steps; how often the host waited in each of the last ones.

    A step lasts from the end of one call of the optimizer to the end of the next. Names are a
    function of CUDA and a place.
    """
    num_steps = 0
    counted = []
    counting = False

    def end_step(*_) -> None:
        nonlocal num_steps, counting
        num_steps += 1
        if num_steps == FIRST + STEPS:
            counting = False
            raise _Enough
        if num_steps >= FIRST:
            counted.append(Counter())
            counting = True
            torch.cuda.set_sync_debug_mode("warn" if IS_REAL else "default")

    def warned(message: Warning | str, *_) -> None:
        if counting and "synchronizing CUDA operation" in str(message):
            counted[-1][f"{WAIT} {_get_location()}"] += 1

    def heard(function: bytes) -> None:
        if counting:
            counted[-1][f"{function.decode()} {_get_location()}"] += 1

    listen = getattr(ctypes.CDLL(None), "pretended_listen", lambda _: None)
    # Kept as long as the runtime may call it.
    listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(heard)
    listen(listener)
    hook = register_optimizer_step_post_hook(end_step)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = warned
            main()
    except _Enough:
        return counted
    finally:
        listen(None)
        hook.remove()
        torch.cuda.set_sync_debug_mode("default")
    raise RuntimeError(
        f"the run ended after {num_steps} steps: too early to count the waits of {FIRST + STEPS}"
    )


def _get_location() -> str:
    """The line of the recipe or of `common`, and of the library that it calls; in a backward pass
    the operator.
    """
    stack = traceback.extract_stack()
    frames = [frame for frame in stack if not os.path.abspath(frame.filename).startswith(_OTHERS)]
    names = [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}" for frame in frames]
    project_frames = [
        name
        for name, frame in zip(names, frames, strict=True)
        if "site-packages" not in frame.filename
    ]
    node = torch._C._current_autograd_node()
    library = [
        name
        for name in names
        if not name.startswith(("torch/", "_dynamo/", "cuda/", "site-packages/"))
    ]
    if node:
        return f"the backward pass of {node.name()}"
    return ", ".join(dict.fromkeys(project_frames[-1:] + library[-1:]))


def main(cases: dict[str, tuple], folder: Path) -> None:
    """Runs of (recipe, precision, words) by name; a recipe is a file cls.py or det.py. Steps go
    into WAITS.<rank>.json.
    """
    results = {}
    for name, (recipe, precision, flags) in cases.items():
        AcceleratorState._reset_state()  # it would keep the precision of the case before
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision
        task = Path(recipe).stem
        flags = f"{_OF[task]} {flags} --output_dir {folder} --name {name}"
        sys.argv = [str(recipe), *add_small_defaults(flags.split(), task)]
        results[name] = count_waits(load_recipe(Path(recipe)).main)
    (folder / f"WAITS.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))
    leave_process_group()


# ---- the tests

WAITING = """Two waits: torch sees the first; the second is of memory that is not pinned. Logs do not wait.
@@
                 run.backward(losses)  # gradients are sent with the last micro-batch
+                run.log({"train/squared": losses.detach() ** 2, "train/own": 0.5})
@@
+            print(losses.mean().item())
+            torch.ones(3).to(run.device, non_blocking=True)
             run.end_step(grad_norm)
"""
# Waits that torch does not report: for events of earlier steps, which have passed.
REPORT = {"cudaEventSynchronize run/step_reports.py": 1}


@pytest.fixture(scope="module")
def count(gpus, tmp_path_factory):
    """`count(cases, devices=1)` gives for each case, by name, the counted steps of all ranks."""
    folder = tmp_path_factory.mktemp("waits")

    def run(cases, devices=1):
        done = gpus.run_main(devices, functools.partial(main, cases, folder))
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        steps = {name: [] for name in cases}
        for rank in range(devices):
            for name, counted in read(folder / f"WAITS.{rank}.json").items():
                steps[name] += counted
        return steps

    return run


def check(steps, waits, hidden=None):
    """Every step has exactly these waits; `hidden`: waits that only the pretended runtime hears."""
    assert steps
    for step in steps:
        waits_of_streams = Counter()
        other_waits = Counter()
        for name, often in step.items():
            function, line = name.split(" ", 1)
            if function == WAIT:
                waits_of_streams[re.sub(r":\d+", "", line)] += often
            # A copy that is waited for was counted as a wait.
            elif function != "cudaMemcpyAsync" or f"{WAIT} {line}" not in step:
                other_waits[re.sub(r":\d+", "", name)] += often
        assert waits_of_streams == waits, step
        assert IS_REAL or other_waits == REPORT | (hidden or {}), step


QUICK = ("groups", "faster_rcnn")


@pytest.fixture(scope="module")
def steps(count, thorough):
    """The steps of each run on one GPU."""
    cases = {name: ("recipes/cls.py", precision, flags) for name, (precision, flags) in CLS.items()}
    for name, (precision, flags, _) in DET.items():
        cases[name] = ("recipes/det.py", precision, f"--detector {name} {flags}")
    return count({name: case for name, case in cases.items() if thorough or name in QUICK})


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in CLS | DET],
)
def test_a_step_waits_only_for_what_a_detector_has_to_know(steps, name):
    check(steps[name], DET[name][2] if name in DET else {})


def test_on_two_gpus_only_a_wait_that_was_added_is_found(count, tmp_path):
    """Also with numbers that a copied recipe logs."""
    precision, flags = CLS["varied"]
    recipe = copy(tmp_path / "waiting" / "cls.py", WAITING)
    steps = count({"waiting": (recipe, precision, flags)}, devices=2)["waiting"]
    # By DDP in its first ten steps.
    timed = {"cudaEventSynchronize waiting/cls.py, parallel/distributed.py": 8}
    check(steps, {"waiting/cls.py": 1}, timed | {"cudaMemcpyAsync waiting/cls.py": 1})


@pytest.mark.long
def test_a_head_that_is_cut_by_class_waits_for_nothing(count, tmp_path):
    """Although it knows only on the device which classes occur in a step."""
    change = CHANGES["hundreds-of-thousands-of-classes"].replace("share=1.0", "share=0.1")
    flags = "--model test_vit --clip 1 --ema_decay 0.9 --max_micro_batch_size 4"
    steps = count({"head": (copy(tmp_path / "head" / "cls.py", change), "fp16", flags)}, devices=2)[
        "head"
    ]
    check(steps, {}, {"cudaEventSynchronize head/cls.py, parallel/distributed.py": 8})
