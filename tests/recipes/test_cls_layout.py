"""A classification run is the same run on any layout: losses, weights, statistics and moving averages agree.

A case is a command line; a layout is a number of processes and the most samples that one takes at once (and, as that must
not matter either, a number of data workers). All cases of one world size run in one world.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.harness.outcomes import Outcome, assert_same_training, distance, identical, parameters, start_of, statistics

# Steps of 44 samples: three epochs, whose ends fall into the middle of batches.
STEPS = 15


# Processes x the most samples that one takes at once -> data workers. Three processes have unequal shares.
WORKERS = {"1x44": 0, "1x12": 2, "2x22": 2, "2x8": 0, "3x16": 2}
WHOLE, ACCUMULATED, TWO, TWO_ACCUMULATED, THREE = WORKERS


def flags_of(layout: str) -> str:
    most = layout.partition("x")[2]
    return f"--global_batch_size 44 --max_micro_batch_size {most} --workers {WORKERS[layout]}"


VARIED = "--augment rand-m5-n1 --random_erasing 0.25 --drop_path 0.1 --mixup 0.2 --cutmix 0.2"
GROUP = "--model test_resnet --lr 5e-3 --batch_norm group --norm_batch_size 4"


@dataclass(frozen=True)
class Case:
    flags: str
    layouts: tuple[str, ...]  # that `make test` compares with the whole batch on one process
    long: tuple[str, ...] = ()  # that are left to the long tests


CASES = {
    "vit": Case(
        f"--model test_vit --lr 2e-3 {VARIED} --clip 1 --ema_decay 0.9 --label_smoothing 0.1",
        (THREE,),
        (ACCUMULATED, TWO, TWO_ACCUMULATED),
    ),
    "resnet-group": Case(f"{GROUP} {VARIED} --ema_decay 0.9", (TWO_ACCUMULATED,), (ACCUMULATED, TWO, THREE)),
    "resnet-global": Case(
        f"--model test_resnet --opt sgd --lr 0.1 {VARIED} --batch_norm global --ema_decay 0.9", (TWO,), (THREE,)
    ),
    "resnet-thawing": Case(
        f"{GROUP} --freeze_stages 3 --unfreeze_epochs 1,2,3 --backbone_lr_factor 0.5 --head_lr_factor 2 --layer_decay 0.8 "
        "--clip 1 --ema_decay 0.9",
        (THREE,),
        (TWO_ACCUMULATED,),
    ),
    # Other models, and without what the cases above vary by, and with what they leave out.
    "convnext": Case(
        f"--model test_convnext --lr 2e-3 {VARIED} --layer_decay 0.8 --clip 0.1 --clip_mode agc --ema_decay 0.9",
        (),
        (ACCUMULATED, TWO, TWO_ACCUMULATED, THREE),
    ),
    "vit-plain": Case(
        "--model test_vit --lr 1e-3 --schedule step --warmup_epochs 1 --sampling sqrt", (), (TWO_ACCUMULATED,)
    ),
    "vit-bce": Case(
        "--model test_vit --lr 2e-3 --loss bce --class_weights balanced --sampling balanced --repeats 2 "
        "--augment augmix-m3-w2 --color_jitter 0.2 --hflip 0.5 --vflip 0.5 --cache 24",
        (),
        (THREE,),
    ),
    "convnext-plain": Case("--model test_convnext --opt lion --lr 5e-4 --grad_checkpointing", (), (THREE,)),
    "resnet-group-plain": Case(
        f"{GROUP} --grad_checkpointing --class_weights sqrt --channels_last", (), (TWO_ACCUMULATED,)
    ),
    "resnet-global-plain": Case("--model test_resnet --opt lamb --lr 3e-2 --batch_norm global", (), (THREE,)),
    "resnet-frozen": Case(
        "--model test_resnet --lr 0.1 --freeze_stages all --mixup 0.2 --repeats 2", (), (TWO_ACCUMULATED,)
    ),
}
NORMS = ("local", "node", "global")
SINGLE = ("vit", "resnet-group")


def commands(processes: int, thorough: bool) -> dict[str, str]:
    """Flags of every run on that many processes, by its name."""
    found = {}
    for name, case in CASES.items():
        compared = (*case.layouts, *(case.long if thorough else ()))
        for layout in [WHOLE, *compared] if compared else []:
            found[f"{name} {layout}"] = f"{case.flags} {flags_of(layout)} --max_steps {STEPS} --dtype float64"
    for layout, name in itertools.product((WHOLE, THREE), SINGLE):
        found[f"{name} {layout} float32"] = f"{CASES[name].flags} {flags_of(layout)} --max_steps 3"
    found = {name: flags for name, flags in found.items() if f" {processes}x" in name}
    if processes == 2:
        for norm in NORMS:
            found[norm] = (
                f"--model test_resnet --lr 5e-3 --batch_norm {norm} {flags_of(TWO)} --max_steps 3 --dtype float64"
            )
        for time in ("first", "second"):
            found[time] = f"{CASES['vit'].flags} --drop 0.5 {flags_of(TWO_ACCUMULATED)} --max_steps 3"
    return found


@pytest.fixture(scope="module")
def runs(run_several, stripes, thorough) -> dict[str, Outcome]:
    """Every run by its name, of all cases on all layouts: three worlds."""
    outcomes = {}
    for processes in (1, 2, 3):
        flags = f"--data {stripes} --log_every 1 --eval_every {STEPS}".split()
        cases = {name: [*flags, *own.split()] for name, own in commands(processes, thorough).items()}
        outcomes |= run_several(processes, cases, timeout=900)
    assert not {name: run.text for name, run in outcomes.items() if run.outcome != "ok"}
    return outcomes


@pytest.mark.parametrize(
    "name, layout",
    [
        pytest.param(name, layout, id=f"{name}-{layout}", marks=[pytest.mark.long] * (layout in case.long))
        for name, case in CASES.items()
        for layout in (*case.layouts, *case.long)
    ],
)
def test_every_layout_is_the_same_run(name: str, layout: str, runs: dict[str, Outcome]) -> None:
    """Losses of all steps, results, final weights, running statistics and moving averages agree within 1e-8."""
    whole, cut = runs[f"{name} {WHOLE}"], runs[f"{name} {layout}"]
    losses = whole.column("train/loss")
    assert losses[-3:].mean() < 0.85 * losses[0], "layouts would also agree on weights that hardly move"

    assert cut.column("step").tolist() == list(range(1, STEPS + 1))
    assert_same_training(whole, cut, start := start_of(whole))
    for key in ("epoch", "samples", "train/lr", "eval/count", "eval/top1", "eval/ema_top1"):
        assert cut.column(key).tolist() == whole.column(key).tolist(), key
    if name == "resnet-frozen":
        end = cut.tensors()
        assert {key for key in end if not torch.equal(start[key], end[key])} == {"fc.weight", "fc.bias"}


def test_plain_batch_norm_is_another_run_and_node_is_global(runs: dict[str, Outcome]) -> None:
    """What the exact modes agree on is not there by itself; on one machine `node` has global's bits."""
    local, node, whole = (runs[norm].tensors() for norm in NORMS)
    start = start_of(runs["global"])
    assert distance(parameters(whole), parameters(local), start) > 1e-3
    assert distance(statistics(whole), statistics(local), start) > 1e-3
    assert identical(node, whole)


@pytest.mark.parametrize("name", SINGLE)
def test_single_precision_starts_the_same(name: str, runs: dict[str, Outcome]) -> None:
    """In float32, where each layout sums in another order, the losses of the first three steps agree within 2e-5."""
    whole, three = (runs[f"{name} {layout} float32"].column("train/loss") for layout in (WHOLE, THREE))
    np.testing.assert_allclose(three, whole, rtol=2e-5)


def test_a_repeated_run_has_the_same_bits(runs: dict[str, Outcome]) -> None:
    """In float32, on the same layout, with dropout: losses, weights and averages."""
    first, second = runs["first"], runs["second"]
    assert np.array_equal(first.column("train/loss"), second.column("train/loss"))
    for file in ("model", "ema"):
        assert identical(first.tensors(file), second.tensors(file))
