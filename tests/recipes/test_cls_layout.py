"""A classification run is the same run on any layout: losses, weights, statistics and moving averages agree.

A case is a command line; a layout is a number of processes and the most samples that one takes at once (and, as that must
not matter either, a number of data workers). All cases of one world size run in one launch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config.parsing import parse
from tests.harness.outcomes import Outcome, Tensors, distance, identical, parameters, statistics
from tests.harness.several import load

STEPS = 30  # of 48 samples: seven epochs, whose ends fall into the middle of batches


@dataclass(frozen=True)
class Layout:
    processes: int
    max_micro_batch_size: int
    workers: int = 0
    global_batch_size: int = 48

    def __str__(self) -> str:
        return f"{self.global_batch_size}-on-{self.processes}x{self.max_micro_batch_size}"

    @property
    def flags(self) -> str:
        return (
            f"--global_batch_size {self.global_batch_size} --max_micro_batch_size {self.max_micro_batch_size} "
            f"--workers {self.workers}"
        )


WHOLE, ACCUMULATED = Layout(1, 48), Layout(1, 12, workers=2)
TWO, TWO_ACCUMULATED = Layout(2, 24, workers=2), Layout(2, 6)
THREE = Layout(3, 16, workers=2)
WHOLE_50, THREE_50 = (
    Layout(1, 50, workers=2, global_batch_size=50),
    Layout(3, 17, global_batch_size=50),
)  # unequal shares
THREE_50_AT_ONCE = Layout(3, 50, global_batch_size=50)

ALL = (WHOLE, ACCUMULATED, TWO, TWO_ACCUMULATED, THREE, WHOLE_50, THREE_50)
AT_ONCE = (WHOLE, TWO, THREE, WHOLE_50, THREE_50_AT_ONCE)  # without accumulation
FEW = (WHOLE, TWO_ACCUMULATED, THREE)

VARIED = "--augment rand-m5-n1 --random_erasing 0.25 --drop_path 0.1 --mixup 0.2 --cutmix 0.2"


@dataclass(frozen=True)
class Case:
    flags: str
    layouts: tuple[Layout, ...]
    falls_to: float  # the mean loss of the last three steps, as a share of the first one's
    flags_of_50: str = ""  # where something has to divide the batch


CASES = {
    "vit": Case(f"--model test_vit --lr 2e-3 {VARIED} --clip 1 --ema_decay 0.9 --label_smoothing 0.1", ALL, 0.7),
    "convnext": Case(
        f"--model test_convnext --lr 2e-3 {VARIED} --layer_decay 0.8 --clip 0.1 --clip_mode agc --ema_decay 0.9",
        ALL,
        0.7,
    ),
    "resnet-group": Case(
        f"--model test_resnet --lr 5e-3 {VARIED} --batch_norm group --norm_batch_size 6 --ema_decay 0.9 "
        "--image_sizes 24,32,40",
        ALL,
        0.7,
        "--norm_batch_size 10 --max_micro_batch_size 20",
    ),
    "resnet-global": Case(
        f"--model test_resnet --opt sgd --lr 0.1 {VARIED} --batch_norm global --ema_decay 0.9", AT_ONCE, 0.5
    ),
    # Without what the cases above vary by, and with what they leave out.
    "vit-plain": Case(
        "--model test_vit --lr 1e-3 --schedule step --warmup_epochs 1 --sampling sqrt",
        (WHOLE, TWO_ACCUMULATED),
        0.3,
    ),
    "vit-bce": Case(
        "--model test_vit --lr 2e-3 --loss bce --class_weights balanced --sampling balanced --repeats 3 "
        "--augment augmix-m3-w2 --color_jitter 0.2 --hflip 0.5 --vflip 0.5 --cache 24",
        (WHOLE, THREE),
        0.65,
    ),
    "convnext-plain": Case("--model test_convnext --opt lion --lr 5e-4 --grad_checkpointing", (WHOLE, THREE), 0.5),
    "resnet-group-plain": Case(
        "--model test_resnet --lr 5e-3 --batch_norm group --norm_batch_size 6 --grad_checkpointing --class_weights sqrt "
        "--channels_last",
        (WHOLE, TWO_ACCUMULATED),
        0.4,
    ),
    "resnet-global-plain": Case("--model test_resnet --opt lamb --lr 3e-2 --batch_norm global", (WHOLE, THREE), 0.1),
    "resnet-frozen": Case(
        "--model test_resnet --lr 0.1 --freeze_stages all --mixup 0.2 --repeats 2", (WHOLE, TWO_ACCUMULATED), 0.75
    ),
    "resnet-thawing": Case(
        "--model test_resnet --lr 5e-3 --batch_norm group --norm_batch_size 6 --freeze_stages 3 --unfreeze_epochs 1,2,4 "
        "--backbone_lr_factor 0.5 --head_lr_factor 2 --layer_decay 0.8 --clip 1 --ema_decay 0.9",
        (WHOLE, TWO_ACCUMULATED, THREE),
        0.7,
    ),
}
NORMS = {norm: f"--model test_resnet --lr 5e-3 --batch_norm {norm}" for norm in ("local", "node", "global")}
SINGLE = {"vit": FEW, "convnext": FEW, "resnet-group": FEW, "resnet-global": (WHOLE, TWO, THREE)}
REPEATED = ("vit", "resnet-group")


def is_long(name: str, layout: Layout) -> bool:
    """Whether the run is left to the long tests: other options, and all layouts for all models."""
    few = {
        "vit": (WHOLE, THREE, WHOLE_50, THREE_50),
        "resnet-group": (WHOLE, TWO_ACCUMULATED, WHOLE_50, THREE_50),
        "resnet-global": (WHOLE, TWO),
        "resnet-frozen": (WHOLE, TWO_ACCUMULATED),
        "resnet-thawing": (WHOLE, TWO_ACCUMULATED, THREE),
    }
    return layout not in few.get(name, ())


def commands(processes: int, thorough: bool) -> Iterator[tuple[str, str]]:
    """Name and flags of every run on that many processes."""
    for name, case in CASES.items():
        for layout in case.layouts:
            if is_long(name, layout) and not thorough:
                continue
            of_50 = f" {case.flags_of_50}" if layout.global_batch_size == 50 else ""
            if layout.processes == processes:
                yield f"{name} {layout}", f"{case.flags} {layout.flags}{of_50} --max_steps {STEPS} --dtype float64"
    for layout in (WHOLE, TWO):
        for norm, flags in NORMS.items():
            if layout.processes == processes:
                yield f"{norm} {layout}", f"{flags} {layout.flags} --max_steps 10 --dtype float64"
    for name, layouts in SINGLE.items():
        for layout in layouts:
            if layout.processes == processes and (thorough or name in REPEATED):
                for time in ("first", "second") if name in REPEATED else ("first",):
                    yield f"{name} {layout} {time}", f"{CASES[name].flags} {layout.flags} --max_steps 3"
    if processes == TWO_ACCUMULATED.processes:
        for time, drop in (("first", 0.5), ("second", 0.5), ("without", 0)):
            yield f"dropout {time}", f"--model test_vit --drop {drop} {TWO_ACCUMULATED.flags} --max_steps 3"


@pytest.fixture(scope="module")
def runs(run_several, stripes, thorough) -> dict[str, Outcome]:
    """Every run by its name, of all cases on all layouts: three launches."""
    outcomes = {}
    for processes in (1, 2, 3):
        flags = f"--data {stripes} --log_every 1 --eval_every {STEPS}".split()
        cases = {name: [*flags, *own.split()] for name, own in commands(processes, thorough)}
        outcomes |= run_several(processes, cases, timeout=900)
    assert not {name: run.text for name, run in outcomes.items() if run.outcome != "ok"}
    return outcomes


@pytest.fixture(scope="module")
def recipe():
    return load(Path("recipes/cls.py"))


def start_of(run: Outcome, recipe) -> Tensors:
    """The state of the model with which a run began: built from its configuration, and so from its seed."""
    config = parse(recipe.Config, ["--config", str(run.folder / "config.yaml")])
    model, *_ = recipe.build_model(config, classes=[*"abcde"], device=torch.device("cpu"))
    return model.state_dict()


@pytest.mark.parametrize(
    "name, layout",
    [
        pytest.param(name, layout, id=f"{name}-{layout}", marks=[pytest.mark.long] * is_long(name, layout))
        for name, case in CASES.items()
        for layout in case.layouts
        if layout not in (WHOLE, WHOLE_50)
    ],
)
def test_every_layout_is_the_same_run(name: str, layout: Layout, runs: dict[str, Outcome], recipe) -> None:
    """Losses of all steps, results, final weights, running statistics and moving averages agree within 1e-8."""
    whole = runs[f"{name} {WHOLE_50 if layout.global_batch_size == 50 else WHOLE}"]
    cut = runs[f"{name} {layout}"]
    start = start_of(whole, recipe)

    assert cut.column("step").tolist() == list(range(1, STEPS + 1))
    for key in ("train/loss", "train/grad_norm", "eval/loss", "eval/ema_loss"):
        np.testing.assert_allclose(cut.column(key), whole.column(key), rtol=1e-8, atol=1e-8, err_msg=key)
    for key in ("epoch", "samples", "train/lr", "eval/count", "eval/top1", "eval/ema_top1"):
        assert cut.column(key).tolist() == whole.column(key).tolist(), key
    for file in ("model", "ema") if "--ema_decay" in CASES[name].flags else ("model",):
        assert distance(parameters(whole.tensors(file)), parameters(cut.tensors(file)), start) <= 1e-8
        if "--batch_norm" in CASES[name].flags:
            assert distance(statistics(whole.tensors(file)), statistics(cut.tensors(file)), start) <= 1e-8


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * is_long(name, WHOLE)) for name in CASES]
)
def test_the_compared_runs_learn(name: str, runs: dict[str, Outcome]) -> None:
    """Layouts would also agree on weights that hardly move; these make the loss fall far."""
    losses = runs[f"{name} {WHOLE}"].column("train/loss")
    assert losses[-3:].mean() < CASES[name].falls_to * losses[0]


def test_a_frozen_backbone_keeps_its_bits(runs: dict[str, Outcome], recipe) -> None:
    """Only the head of a frozen model moves: neither other weights nor running statistics."""
    run = runs[f"resnet-frozen {TWO_ACCUMULATED}"]
    start, end = start_of(run, recipe), run.tensors()
    assert {name for name in end if not torch.equal(start[name], end[name])} == {"fc.weight", "fc.bias"}


def test_plain_batch_norm_depends_on_the_layout(runs: dict[str, Outcome], recipe) -> None:
    """What the exact modes agree on is not there by itself: `local` on two processes is another run."""
    whole, cut = runs[f"local {WHOLE}"], runs[f"local {TWO}"]
    start = start_of(whole, recipe)
    assert distance(parameters(whole.tensors()), parameters(cut.tensors()), start) > 1e-3
    assert distance(statistics(whole.tensors()), statistics(cut.tensors()), start) > 1e-3


def test_batch_norm_of_one_machine_is_global_there(runs: dict[str, Outcome]) -> None:
    """On one machine `node` is `global` to the bit, and one whole micro-batch makes them `local` too."""
    assert identical(runs[f"node {TWO}"].tensors(), runs[f"global {TWO}"].tensors())
    assert identical(runs[f"node {WHOLE}"].tensors(), runs[f"local {WHOLE}"].tensors())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in REPEATED)) for name in SINGLE]
)
def test_single_precision_starts_the_same(name: str, runs: dict[str, Outcome]) -> None:
    """In float32, where each layout sums in another order, the losses of the first three steps agree within 2e-5."""
    whole, *others = (runs[f"{name} {layout} first"].column("train/loss") for layout in SINGLE[name])
    for other in others:
        np.testing.assert_allclose(other, whole, rtol=2e-5)


@pytest.mark.parametrize(
    "name, layout",
    [pytest.param(name, layout, id=f"{name}-{layout}") for name in REPEATED for layout in SINGLE[name]],
)
def test_a_repeated_run_has_the_same_bits(name: str, layout: Layout, runs: dict[str, Outcome]) -> None:
    """In float32, on the same layout: rows but for their timing, weights, statistics and averages."""
    first, second = (runs[f"{name} {layout} {time}"] for time in ("first", "second"))
    rows = [
        [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in run.rows]
        for run in (first, second)
    ]
    assert rows[0] == rows[1]
    assert identical(first.tensors(), second.tensors())
    assert identical(first.tensors("ema"), second.tensors("ema"))


def test_dropout_repeats_on_the_same_layout(runs: dict[str, Outcome]) -> None:
    """Its masks are drawn from the step, the micro-step and the rank: on another layout they are others."""
    first, second, without = (runs[f"dropout {time}"].tensors() for time in ("first", "second", "without"))
    assert identical(first, second)
    assert not identical(first, without)
