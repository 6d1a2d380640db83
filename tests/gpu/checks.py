"""The checks of `make gpu`, one per row. Each returns what it measured, or raises `Failed` or `NotRun`."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil
import torch

from common.classification import sources
from tests.gpu.machine import Failed, Launched, Machine, NotRun, Trained
from tests.harness.outcomes import distance, identical

OPTIONS = "--augment rand-m5-n1 --random_erasing 0.25 --color_jitter 0.3 --mixup 0.2 --cutmix 0.2 --label_smoothing 0.1"
VARIED = f"{OPTIONS} --ema_decay 0.9 --clip 1".split()
NO_PAUSE = "--eval_every 1000 --checkpoint_every 1000".split()
EXPECTED = {"cls": ("digits", "top1", 0.98), "det": ("det_digits", "AP50", 0.9)}  # as the presets say
DEMO_PROCESSES = {"cls": 16, "det": 2}  # at most, as in the Makefile: each process needs a batch norm group of its own
EXACT = 1e-8  # relative difference that losses and weights in float64 may have


@dataclass(frozen=True)
class Check:
    """A row of the table: its name, the function that makes it, and its time limit in seconds."""

    name: str
    make: Callable[[Machine], str]
    seconds: float


def demo(recipe: str, precision: str, machine: Machine) -> str:
    """The demo's preset, on as many GPUs as it can use, reaches the result that the preset promises."""
    needs(precision in machine.facts["precisions"], f"the GPU has no {precision}")
    preset, key, expected = EXPECTED[recipe]
    gpus = min(machine.gpus, DEMO_PROCESSES[recipe])
    words = ["--config", f"recipes/presets/{preset}.yaml", *("--max_steps", 8) * machine.quick]
    run = machine.train(*words, recipe=recipe, precision=precision, gpus=gpus)
    finite(run.column("train/loss"))
    result, text = run.result(key), f"{key} {run.result(key):.4f}, expected {expected}; {run.seen['steps_gib']:.2f} GiB"
    require(machine.quick or result >= expected, text)
    return text


def layout(recipe: str, machine: Machine) -> str:
    """In float64 one GPU, one GPU with smaller micro-batches, a CPU and all GPUs together train the same."""
    batch, group, gpus = {"cls": (64, 4, 16), "det": (8, 2, 4)}[recipe]
    words = ["--dtype", "float64", "--batch_norm", "group", "--norm_batch_size", group, "--global_batch_size", batch]
    words += ["--max_steps", steps(machine, 20), "--eval_every", steps(machine, 20), "--clip", 1, "--ema_decay", 0.9]
    words += VARIED if recipe == "cls" else ["--hflip", 0.5, "--photometric", 0.5]
    small = ["--max_micro_batch_size", batch // 4]
    one, cut, cpu = all_or_none(
        machine.start(*words, recipe=recipe),
        machine.start(*words, *small, recipe=recipe),
        machine.start(*words, recipe=recipe, gpus=0),
    )
    others = {"smaller micro-batches": cut, "the CPU": cpu}
    if (gpus := min(machine.gpus, gpus)) > 1:
        others[f"{gpus} GPUs"] = machine.train(*words, recipe=recipe, gpus=gpus)
    return "; ".join(f"{name}: {same(one, other, EXACT)}" for name, other in others.items())


def nccl(machine: Machine) -> str:
    """All GPUs over NCCL train what one trains, with batch norm over all of them; each gradient compression trains."""
    needs(machine.gpus > 1, "one GPU")
    gpus, words = min(machine.gpus, 16), ["--max_steps", steps(machine, 20), *NO_PAUSE, "--global_batch_size", 64]
    exact = [*words, "--dtype", "float64", "--batch_norm", "global", *VARIED]
    text = f"{gpus} GPUs: {same(machine.train(*exact), machine.train(*exact, gpus=gpus), EXACT)}"
    plain = machine.train(*words, gpus=gpus).column("train/loss")
    for hook in ("fp16", "bf16", "powersgd"):
        losses = finite(machine.train(*words, "--comm_hook", hook, gpus=gpus).column("train/loss"))
        text += f"; {hook} {apart(plain, losses, 0.5):.1e} from uncompressed"
    return text


def resume(recipe: str, deterministic: bool, machine: Machine) -> str:
    """fp16 on all GPUs: killed (SIGKILL) between two checkpoints and started again, a run ends as if undisturbed."""
    flag = ["--deterministic"] * deterministic
    needs(
        not deterministic or "--deterministic" in machine.python(f"recipes/{recipe}.py", "--help"),
        "the recipe has no --deterministic",
    )
    words = ["--max_steps", 16, "--checkpoint_every", 5, "--eval_every", 16, *flag]
    words += VARIED if recipe == "cls" else ["--ema_decay", 0.9]
    options = {"recipe": recipe, "precision": "fp16", "gpus": min(machine.gpus, DEMO_PROCESSES[recipe])}
    undisturbed = machine.start(*words, **options)
    whole = undisturbed.end() if options["gpus"] > 1 else None  # runs on several GPUs take turns
    killed = machine.start(*words, **options, name=f"killed_{recipe}{deterministic:d}", env={"HOLD_AT": "8"})
    kill(killed)
    whole = whole or undisturbed.end()
    went_on = machine.train(*words, **options, name=killed.folder.name)
    require("resuming from step 5 of 16" in went_on.stdout, "it did not resume from its checkpoint of step 5")
    bits = all(identical(whole.tensors(file), went_on.tensors(file)) for file in ("model", "ema", "optimizer"))
    rows = [[row["train/loss"] for row in run.rows if "train/loss" in row] for run in (whole, went_on)]
    if bits and rows[0] == rows[1]:
        return "the same bits"
    text = same(whole, went_on, np.inf if deterministic else 0.1)
    require(not deterministic, f"not the same bits: {text}")
    return f"not the same bits, which needs --deterministic: {text}"


def waits(recipe: str, precision: str, machine: Machine) -> str:
    """The host never waits for the GPU in a step."""
    run = machine.train(
        "--max_steps", 12, *NO_PAUSE, *(VARIED if recipe == "cls" else []), recipe=recipe, precision=precision
    )
    often = len(run.seen["waits"]) / 5
    text = f"{often:g} per step" + ": " * bool(often) + ", ".join(sorted(set(run.seen["waits"])))
    require(often == 0, f"{text}; expected 0")
    return text


def decoded_pixels(machine: Machine) -> str:
    """nvJPEG decodes JPEGs of all kinds to nearly the CPU's pixels."""
    seen = json.loads(machine.python("tests/gpu/decoded.py"))
    text = "; ".join(f"{name} {seen[name]:.3g} of 255, at most {seen[f'{name} allowed']}" for name in ("most", "mean"))
    require(all(seen[name] <= seen[f"{name} allowed"] for name in ("most", "mean")), text)
    return text


def decoded_training(machine: Machine) -> str:
    """A model learns the digits as JPEGs, decoded by the GPU and by data workers."""
    folder = machine.scratch / "jpegs"
    for part, source in zip(("train", "val"), sources.load(sources.Spec("digits", seed=0, val_share=0.2)), strict=True):
        for number in range(len(source)):
            file = folder / part / source.classes[source.labels[number]] / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            source.image(number).convert("RGB").resize((64, 64)).save(file, quality=90)
    words = ["--data", folder, "--config", "recipes/presets/digits.yaml", *("--max_steps", 8) * machine.quick]
    runs = all_or_none(*(machine.start(*words, "--decode", way) for way in ("device", "worker")))
    mine, theirs = (run.result("top1") for run in runs)
    text = f"top1 {mine:.4f}, decoded by workers {theirs:.4f}"
    first = apart(*(run.column("train/loss")[:1] for run in runs), np.inf)
    require(first <= 0.1, f"the first losses are {first:.0%} apart; {text}")
    require(machine.quick or min(mine, theirs) >= EXPECTED["cls"][2] - 0.01, text)
    return text


def overflow(optimizer: str, machine: Machine) -> str:
    """fp16: steps that overflow are skipped, the loss scale falls, and training continues."""
    lr = {"adamw": 4e-3, "momentum": 0.05}[optimizer]
    words = ["--opt", optimizer, "--lr", lr, "--max_steps", steps(machine, 60, 16), *NO_PAUSE]
    run = machine.train(*words, precision="fp16", env={"FIRST_SCALE": str(2.0**24)})
    losses, scales = finite(run.column("train/loss")), run.column("train/loss_scale")
    scale, skipped = scales[-1], run.column("train/skipped_steps")[-1]
    text = f"{skipped:g} steps skipped, the scale fell to {scale:g}; loss {losses[0]:.2f} to {losses[-5:].mean():.2f}"
    require(3 <= skipped <= len(losses) - 3 and 0 < scale < 2**24, text)
    require(machine.quick or losses[-5:].mean() < 0.9 * losses[0], text)
    return text


def memory_words(machine: Machine) -> list:
    """Flags of a run that needs much memory, and trains the same with any micro-batch."""
    side, batch = (64, 32) if machine.quick else (192, 128)
    words = ["--image_size", side, "--global_batch_size", batch, "--max_micro_batch_size", batch, "--dtype", "float64"]
    return [*words, "--batch_norm", "frozen", "--max_steps", 8, "--checkpoint_every", 3, "--eval_every", 1000]


def with_all_memory(machine: Machine) -> Trained:
    """That run with all of the GPU's memory, made once and kept."""
    if "memory" not in machine.kept:
        machine.kept["memory"] = machine.train(*memory_words(machine))
    return machine.kept["memory"]


def memory(machine: Machine) -> str:
    """No step takes more memory than the search for the micro-batch did."""
    seen = with_all_memory(machine).seen
    text = f"{seen['steps_gib']:.3f} GiB at the peak, {seen['trial_gib']:.3f} in the trial, {seen['held_gib'][0]:.3f} before it"
    require(seen["held_gib"][0] < seen["steps_gib"] <= 1.02 * seen["trial_gib"], text)
    return text


def out_of_memory(step: int, machine: Machine) -> str:
    """With too little memory, from the start or from a step on, micro-batches get smaller and training stays the same."""
    whole = with_all_memory(machine)
    peak = whole.seen["steps_gib" if step else "trial_gib"]
    needed = peak - whole.seen["held_gib"][step > 0]
    less = machine.train(*memory_words(machine), env={"ROOM": f"{step}:{0.75 * needed}"})
    said = [line for line in less.stdout.splitlines() if "out of memory" in line or "do not fit into memory" in line]
    require(bool(said), "it was never out of memory")
    return f"{needed:.2f} GiB needed, {0.75 * needed:.2f} left; {same(whole, less, EXACT)}"


def compiled(machine: Machine) -> str:
    """With --compile a run trains what it trains without; counts graphs and seconds of compiling."""
    words = ["--max_steps", steps(machine, 20), *NO_PAUSE, *VARIED, "--dtype", "float64"]
    eager, run = machine.train(*words), machine.train(*words, "--compile")
    longer = run.seen["first_step_s"] - eager.seen["first_step_s"]
    text = f"{run.seen['graphs']} graphs, {longer:.0f} s longer to the first step"
    require(run.seen["graphs"] > 0, f"nothing was compiled; {text}")
    return f"{same(eager, run, 1e-6)}; {text}"


def speed(machine: Machine) -> str:
    """benchmarks/gpu.py --brief meets its goals."""
    file = machine.scratch / "speed.json"
    size = ["--quick", "--eager"] if machine.quick else ["--brief", "--seconds", machine.check_until - time.monotonic()]
    machine.python("benchmarks/gpu.py", *size, "--output", file)
    result = json.loads(file.read_text())
    rows = [f"{row['what'].rpartition(': ')[2]} {row['ratio']:.2f} (goal {row['goal']:.2f})" for row in result["rows"]]
    text = f"{result['sessions'][0]['model']}: {', '.join(rows)}"
    require(machine.quick or all(row["ratio"] >= row["goal"] for row in result["rows"]), text)
    return text


CHECKS = [
    *(Check(f"{r} demo {p}", partial(demo, r, p), 90) for p in ("fp32", "bf16", "fp16") for r in ("cls", "det")),
    *(Check(f"{r} layout", partial(layout, r), 90) for r in ("cls", "det")),
    Check("nccl", nccl, 120),
    Check("cls resume", partial(resume, "cls", False), 90),
    *(Check(f"{r} resume --deterministic", partial(resume, r, True), 90) for r in ("cls", "det")),
    *(
        Check(f"{r} host waits {p}", partial(waits, r, p), 45)
        for r, p in (("cls", "bf16"), ("cls", "fp16"), ("det", "bf16"))
    ),
    Check("--decode device: pixels", decoded_pixels, 45),
    Check("--decode device: training", decoded_training, 60),
    *(Check(f"fp16 overflow, {o}", partial(overflow, o), 45) for o in ("adamw", "momentum")),
    Check("memory at the peak", memory, 45),
    Check("out of memory at the start", partial(out_of_memory, 0), 60),
    Check("out of memory later", partial(out_of_memory, 5), 90),
    Check("--compile", compiled, 150),
    Check("speed", speed, 240),
]


def steps(machine: Machine, many: int, few: int = 6) -> int:
    return few if machine.quick else many


def needs(there: bool, reason: str) -> None:
    if not there:
        raise NotRun(reason)


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Failed(text)


def finite(losses: np.ndarray) -> np.ndarray:
    require(bool(np.isfinite(losses).all()), f"losses are not finite from row {np.argmin(np.isfinite(losses)) + 1} on")
    return losses


def apart(one: np.ndarray, other: np.ndarray, limit: float) -> float:
    """The largest relative difference of losses. Raises `Failed` if it exceeds the limit."""
    require(one.shape == other.shape, f"{len(one)} and {len(other)} steps")
    off = float((np.abs(finite(one) - finite(other)) / np.abs(one)).max())
    require(off <= limit, f"losses {off:.1e} apart, at most {limit:g}")
    return off


def same(one: Trained, other: Trained, limit: float) -> str:
    """Text with the relative differences of losses and weights. Raises `Failed` if one exceeds the limit."""
    losses = apart(one.column("train/loss"), other.column("train/loss"), limit)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in one.tensors().items()}
    weights = distance(one.tensors(), other.tensors(), nothing)
    require(weights <= limit, f"weights {weights:.1e} apart, at most {limit:g}")
    return f"losses {losses:.0e}, weights {weights:.0e} apart"


def all_or_none(*launched: Launched) -> list[Trained]:
    """Waits for runs that were started together."""
    return [run.end() for run in launched]


def kill(held: Launched) -> None:
    """Sends SIGKILL to all processes of a run, its launcher last, as soon as it pauses at the step HOLD_AT."""
    process, sign = psutil.Process(held.started.process.pid), held.folder.with_suffix(".held")
    while not sign.exists():
        if held.started.process.poll() is not None or time.monotonic() > held.until:
            held.end()
            raise Failed("it ended before it could be killed")
        time.sleep(0.01)
    family = [process, *process.children(recursive=True)]
    for each in family[::-1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(family, 30)
