"""What DDP sends, whole or compressed, and the graphs that `--compile` makes: as many as it should,
cut where DDP sends.

In float64, so that nothing but the compression moves a loss: layouts that send gradients as they
are agree to 1e-8 there.
"""

import json

import numpy as np
import pytest

from tests.harness.outcomes import Outcome, identical

STEPS = 12
HALF = 6
COMMAND = (  # a ViT, without batch norm, makes little of small differences
    f"--dtype float64 --max_steps {STEPS} --log_every 1 --checkpoint_every {HALF} --crop_scale 1 "
    "--global_batch_size 32 --max_micro_batch_size 8 --model test_vit --lr 1e-3"
)
COMPILED = (
    "--compile --model test_resnet --max_steps 2 --eval_every 1 --global_batch_size 50 "
    "--max_micro_batch_size 17"
)
# Of a loss, in all these steps: the last bit of a number that is sent.
TOLERANCE = {"fp16": 2**-11, "bf16": 2**-8}
HOOKS = ("none", *TOLERANCE)


@pytest.fixture(scope="module")
def runs(run_several, tmp_path_factory) -> dict[str, Outcome]:
    """Two ranks with two micro-steps: every hook; bf16 from half-way; compiled to eager graphs."""
    folder = tmp_path_factory.mktemp("runs")
    cases = {name: f"{COMMAND} --output_dir {folder} --comm_hook {name}" for name in HOOKS}
    cases["bf16 resumed"] = f"{cases['bf16']} --resume {folder}/bf16/checkpoints/step_{HALF:08d}"
    cases["compiled"] = COMPILED
    args = {name: flags.split() for name, flags in cases.items()}
    return run_several(2, args, recipe="tests/recipes/counted.py", env={"COMPILE_BACKEND": "eager"})


def read_counts(run: Outcome) -> dict:
    assert run.outcome == "ok", run.text
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", HOOKS)
def test_the_loss_falls_and_only_the_last_micro_step_sends(
    name: str, runs: dict[str, Outcome]
) -> None:
    run = runs[name]
    counted = read_counts(runs[name])
    losses = run.column("train/loss")
    assert len(losses) == STEPS and losses[-3:].mean() < losses[:3].mean()
    lines = [line for line in run.stdout.splitlines() if line.strip().startswith("gradients")]
    assert len(lines) == (name != "none") and all(f"sent in {name}" in line for line in lines)
    assert "2 processes x 2 micro-steps" in run.stdout
    # Two more backward passes are the warm-up's.
    assert sum(counted["sent"]) == (STEPS + 2) * counted["parameters"]


@pytest.mark.parametrize("name", TOLERANCE)
def test_half_precision_stays_close_to_full_gradients(name: str, runs: dict[str, Outcome]) -> None:
    expected = runs["none"].column("train/loss")
    losses = runs[name].column("train/loss")
    np.testing.assert_allclose(losses, expected, rtol=TOLERANCE[name])
    assert not np.allclose(losses, expected, rtol=1e-8, atol=0), (
        "nothing was rounded: the comparison would prove nothing"
    )


def test_a_resumed_run_has_the_same_bits_with_half_precision(runs: dict[str, Outcome]) -> None:
    assert identical(runs["bf16 resumed"].tensors(), runs["bf16"].tensors())


def test_training_compiles_once_for_each_micro_batch_size(runs) -> None:
    """Neither the trial of the micro-batch nor an evaluation compiles: three functions for each of two sizes.

    A graph that was compiled in the trial, before DDP, would be used in training as a whole: no
    gradient would be sent before the last is there.
    """
    counted = read_counts(runs["compiled"])
    assert counted["compiled"] == 6 and counted["cut"] == [2, 2] and not counted["broken"]


@pytest.mark.long
def test_compiled_models_train_as_eager_ones(run_several, stripes) -> None:
    """Three graphs for each size of a micro-batch, whatever the steps; the losses agree."""
    flags = f"--data {stripes} --log_every 1 --eval_every 5 --lr 2e-3 --max_steps 10 --drop_path 0.1".split()
    cases = {
        "vit": flags + "--model test_vit --global_batch_size 50 --max_micro_batch_size 15".split(),
        "group": flags + "--model test_resnet --batch_norm group --norm_batch_size 8".split(),
    }
    cases |= {f"{name} compiled": args + ["--compile"] for name, args in cases.items()}
    outcomes = run_several(2, cases, recipe="tests/recipes/counted.py", timeout=3000)
    for name, graphs in (("vit", 6), ("group", 3)):  # the vit has two sizes
        eager = outcomes[name]
        compiled = outcomes[f"{name} compiled"]
        np.testing.assert_allclose(
            compiled.column("train/loss"), eager.column("train/loss"), rtol=1e-3
        )
        counted = read_counts(compiled)
        assert counted["compiled"] == graphs and not counted["broken"]
