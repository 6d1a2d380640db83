"""Counts the places where a step of training makes the host wait for the GPU, a real or a pretended one.

    accelerate launch --config_file <file> [tests/pretended_gpu/run.py] tests/host_waits.py CASES.json

CASES.json is a list of [precision, recipe, word, ...]: no, fp16 or bf16, and a command line. Each of these runs trains until
`STEPS` of its steps are counted. Every rank writes WAITS.<rank>.json beside CASES.json: for each case its `Step`s.

What counts is what `torch.cuda.set_sync_debug_mode` sees: the host stops until a stream has done all that it was asked to do.
That is so when a number is read, when a shape depends on numbers, and when memory that is not pinned is copied from or to. It
does not see the waiting for an event, which may have passed long ago, nor what a library does by itself, nor copies that are
told not to wait, but may, since memory is not pinned. A pretended GPU hears all of these.
"""

import ctypes
import json
import os
import sys
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.distributed.collectives import leave_process_group
from tests.harness.launching import small
from tests.harness.several import load

FIRST, STEPS = 3, 2  # steps that are made before, in which much happens once; and steps that are counted
# What is counted of `recipes/cls.py`: precision and words. It waits for nothing.
CLS = {
    "varied": (
        "bf16",
        "--mixup 0.2 --cutmix 1 --random_erasing 0.3 --color_jitter 0.3 --hflip 0.5 --label_smoothing 0.1 --channels_last "
        "--ema_decay 0.9 --clip 1 --batch_norm global --workers 1",
    ),
    "groups": ("fp16", "--clip 0.1 --clip_mode agc --batch_norm group --norm_batch_size 4 --max_micro_batch_size 8"),
    "transformer": (
        "bf16",
        "--model test_vit --drop_path 0.2 --drop 0.1 --layer_decay 0.8 --grad_checkpointing --clip 1",
    ),
    "momentum": ("fp16", "--opt momentum --loss bce --class_weights balanced --batch_norm frozen --ema_decay 0.9"),
    "lamb": ("bf16", "--opt lamb --batch_norm node --drop_path 0.1"),
    "compiled": ("bf16", "--mixup 0.2 --color_jitter 0.3 --compile"),
}
IMAGES, MICRO_STEPS, LEVELS = 4, 2, 2  # of a step of `recipes/det.py`, on one device
# How many proposals of an image are left; which of them belong to each level; scipy matches queries and boxes on the host.
_SUPPRESSION = {"models/boxes.py, ops/boxes.py": IMAGES}
_ROI_LEVELS = {"models/rcnn.py, ops/poolers.py": MICRO_STEPS * LEVELS}
_MATCHER = {"models/queries.py": MICRO_STEPS}
# What is counted of `recipes/det.py`: precision, words, and how often a step waits for what.
DET = {
    "fcos": ("bf16", "--ema_decay 0.9 --clip 1 --workers 1", {}),
    "retinanet": ("no", "--batch_norm group", {}),
    "faster_rcnn": ("bf16", "", _SUPPRESSION | _ROI_LEVELS),
    "mask_rcnn": ("no", "", _SUPPRESSION | {place: 2 * often for place, often in _ROI_LEVELS.items()}),  # a second pool
    "rtdetr_v2": ("fp16", "--width 32", _MATCHER),
    "dfine": ("no", "--width 32", _MATCHER),
    "deimv2": ("bf16", "--width 32", _MATCHER),
    "rf_detr": ("bf16", "--model rf_detr_nano --short_sides 64,96", _MATCHER),  # interpolates its position embeddings
}
_WORDS = "--tracker none --log_every 1 --max_steps 100 --eval_every 100 --checkpoint_every 100 --workers 0"
_OF = {
    "cls": f"{_WORDS} --global_batch_size 16",
    "det": f"{_WORDS} --global_batch_size {IMAGES} --max_micro_batch_size {IMAGES // MICRO_STEPS} --short_sides 64",
}
_HERE = Path(__file__).resolve()
_OTHERS = (sysconfig.get_path("stdlib"), str(_HERE), str(_HERE.parent / "pretended_gpu"))


@dataclass
class Step:
    """How often the host waits from the end of one call of the optimizer to the end of the next, by place."""

    torch: Counter = field(default_factory=Counter)  # as torch sees it
    runtime: Counter = field(default_factory=Counter)  # as a pretended runtime hears it: function and place


class _Enough(BaseException):
    """Ends a run."""


def count(main: Callable[[], None], first: int = FIRST, steps: int = STEPS) -> list[Step]:
    """Run `main` until its optimizer has made `first` + `steps` steps, and tell where the host waited in the last ones."""
    made, counted, counting = 0, [], False

    def end_step(*_) -> None:
        nonlocal made, counting
        made += 1
        if made == first + steps:
            counting = False
            raise _Enough
        if made >= first:
            counted.append(Step())
            counting = True
            torch.cuda.set_sync_debug_mode("warn")

    def warned(message: Warning | str, *_) -> None:
        if counting and "synchronizing CUDA operation" in str(message):
            counted[-1].torch[_place()] += 1

    def heard(what: bytes) -> None:
        if counting:
            counted[-1].runtime[f"{what.decode().split()[0]} {_place()}"] += 1

    listen = getattr(ctypes.CDLL(None), "pretended_listen", lambda _: None)
    listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(heard)  # kept as long as the runtime may call it
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
    raise RuntimeError(f"the run ended after {made} steps: too early to count the waits of {first + steps}")


def _place() -> str:
    """The line of the recipe or of `common`, and that of a library that it calls; in a backward pass the operator's name."""
    stack = traceback.extract_stack()
    frames = [frame for frame in stack if not os.path.abspath(frame.filename).startswith(_OTHERS)]
    names = [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}" for frame in frames]
    own = [name for name, frame in zip(names, frames, strict=True) if "site-packages" not in frame.filename]
    node = torch._C._current_autograd_node()
    library = [name for name in names if not name.startswith(("torch/", "_dynamo/", "cuda/", "site-packages/"))]
    places = [*own[-1:], *library[-1:]] if not node else [f"the backward pass of {node.name()}"]
    return ", ".join(dict.fromkeys(places))


def command(name: str, recipe: str | Path, precision: str, words: str, folder: Path) -> list[str]:
    """A case, whose run is in `folder`; `recipe` is a file cls.py or det.py, of this project or a copy."""
    words = f"{_OF[Path(recipe).stem]} {words}"
    words = small(words.split(), Path(recipe).stem)
    return [precision, str(recipe), *words, "--output_dir", str(folder / "runs"), "--name", name]


def main(cases: Path) -> None:
    results = []
    for precision, recipe, *words in json.loads(cases.read_text()):
        AcceleratorState._reset_state()  # it would keep the precision of the case before
        os.environ["ACCELERATE_MIXED_PRECISION"] = precision
        sys.argv = [recipe, *words]
        results.append([vars(step) for step in count(load(Path(recipe)).main)])
    rank = os.environ.get("RANK", "0")
    cases.with_name(f"WAITS.{rank}.json").write_text(json.dumps(results, indent=2))
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
