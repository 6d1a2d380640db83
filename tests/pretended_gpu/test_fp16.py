"""fp16 on pretended GPUs: a step that overflows leaves the training state unchanged; a loss that is
not finite ends the run.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.harness.outcomes import Outcome, identical
from tests.recipes.copied import copy
from tests.recipes.test_layout import CHANGE, FSDP, HEAD, KINDS

pytestmark = pytest.mark.gpu
LENGTH = (
    "--workers 0 --tracker none --schedule constant --log_every 1 --max_steps 4 "
    "--checkpoint_every 1 --keep_checkpoints 4"
)
SMALL = "--width 32 --short_sides 64 --long_side 64"
CASES = {
    "fused": "cls --opt sgd --clip 1",
    "unfused": "cls --opt nesterov --clip 1",  # the same method as sgd in timm
    "resumed": "cls --opt sgd --clip 1 --resume RUNS/fused/checkpoints/step_00000001",
    "compressed": "cls --opt momentum --comm_hook fp16 --clip 0.02 --clip_mode agc --max_micro_batch_size 2",
    "diverged": "cls --opt sgd --lr 1e6",
    "head": "head --model test_vit --opt adamw --ema_decay 0.9 --clip 1",  # cut by class
    "detected": f"det --opt momentum {SMALL}",
}
SMALL_HEAD = KINDS["sampled"].replace("16.0", "2.0")  # its own gradients overflow at no scale here
# The same run on two GPUs, sharded or not; all weights of this model are trained by plain matrices
# and norms.
SHARDED = "cls --model test_vit --opt adamw --ema_decay 0.9 --max_micro_batch_size 2"


# On the last rank, in steps 1 and 3.
OVERFLOW = """\
@@ main
+        from common.distributed.collectives import rank, world_size
+
+        is_last = rank() == world_size() - 1
         for step in run.steps():
@@ main
+                if is_last and step in (0, 2):
+                    losses.register_hook(lambda gradient: 1e30 * gradient)
                 run.backward(losses)  # gradients are sent with the last micro-batch
"""
# The same of one number of a shard.
OVERFLOW_OF_A_SHARD = """\
@@ main
+            from common.distributed.collectives import rank, world_size
+
+            if rank() == world_size() - 1 and step in (0, 2):
+                shards = [parameter.grad.to_local() for parameter in model.parameters()]
+                next(shard for shard in shards if shard.numel()).view(-1)[:1].fill_(torch.inf)
             grad_norm = run.clip_gradients(config.clip, config.clip_mode)
"""


def build_argv(case: str, folder: Path, overflow: str = OVERFLOW) -> list:
    """The command line of a case, of a copy of its recipe in which gradients overflow."""
    name, _, text = f"{case} --output_dir RUNS {LENGTH}".partition(" ")
    flags = text.replace("RUNS", str(folder / "runs")).split()
    recipe = "det" if name == "det" else "cls"
    changes = [CHANGE.replace(HEAD, SMALL_HEAD)] if name == "head" else []
    file = copy(folder / f"{name}_{len(overflow)}.py", *changes, overflow, recipe=recipe)
    batch = 2 if recipe == "det" else 8
    return [file] + flags + ["--data", folder / recipe, "--global_batch_size", batch]


@pytest.fixture(scope="module")
def runs(gpus, run_on_gpus, folder: Path) -> dict[str, Outcome]:
    """One launch on two GPUs, if there are, in which only the last one's gradients overflow."""
    texts = CASES | {"unsharded": SHARDED}
    cases = {name: build_argv(case, folder) for name, case in texts.items()}
    return run_on_gpus(gpus.at_most(2), cases, precision="fp16")


@pytest.mark.parametrize("name", ["fused", "compressed", "head", "detected"])
def test_an_overflow_on_one_gpu_skips_the_step_on_all(runs, name):
    """Even in the first step, and in transit with `--comm_hook fp16`. The scale halves, which the
    row of that step shows.
    """
    run = runs[name]
    skipped = [norm is None for norm in run.column("train/grad_norm")]
    assert skipped[:3] == [True, False, True] and np.isfinite(run.column("train/loss")).all()
    norm = run.column("train/grad_norm")[1]
    assert 0 < norm < 100, (
        "gradients are clipped and logged without the loss scale, which here is 32,768"
    )
    assert run.column("train/skipped_steps").tolist() == np.cumsum(skipped).tolist()
    scales = [2.0 ** (16 - count) for count in np.cumsum(skipped)]
    assert run.column("train/loss_scale").tolist() == scales
    for file in ("model", "optimizer"):
        for name, tensor in run.tensors(file).items():
            assert not tensor.isnan().any(), name


def test_fused_sgd_trains_what_unfused_sgd_trains(runs):
    """Unwritten memory is NaN here, so a momentum that starts from it would show."""
    fused = runs["fused"]
    unfused = runs["unfused"]
    for key in ("train/loss", "train/loss_scale"):
        np.testing.assert_allclose(fused.column(key), unfused.column(key), rtol=1e-5)
    for file in ("model", "optimizer"):
        torch.testing.assert_close(fused.tensors(file), unfused.tensors(file))


def test_a_resume_after_an_overflow_is_bit_equal(runs):
    """Weights, momentum, loss scale and its growth counter, rows."""
    whole = runs["fused"]
    resumed = runs["resumed"]
    assert len(resumed.rows) < len(whole.rows)
    for file in ("model", "optimizer"):
        assert identical(whole.tensors(file), resumed.tensors(file))
    numbers = [
        json.loads((run.checkpoint / "record.json").read_text())["numbers"]
        for run in (whole, resumed)
    ]
    assert numbers[0] == numbers[1] and numbers[0]["scaler"]["_growth_tracker"] == 1
    keys = ("train/loss", "train/grad_norm", "train/loss_scale", "train/skipped_steps", "eval/loss")
    for key in keys:
        values = resumed.column(key).tolist()
        assert whole.column(key).tolist()[-len(values) :] == values


def test_a_loss_that_is_not_finite_stops_the_run(runs):
    """Though gradients overflow in the same step."""
    run = runs["diverged"]
    assert run.outcome == "refused"
    assert run.text.startswith("step 3: the loss of the samples at positions 16, 17, ")
    assert run.text.endswith("take a bf16 config: beyond 65,504 fp16 is infinite")


def test_an_overflow_in_one_shard_skips_the_step_on_all(runs, run_on_gpus, folder: Path):
    """One number of one rank's shard: the same steps are skipped, at the same scale, as by DDP, and
    the rest is equal.
    """
    case = build_argv(SHARDED, folder, OVERFLOW_OF_A_SHARD)
    whole = runs["unsharded"]
    cut = run_on_gpus(2, {"sharded": case}, precision="fp16", env=FSDP)["sharded"]
    assert cut.outcome == "ok" and "in 2 shards" in cut.stdout, cut.text
    assert [norm is None for norm in cut.column("train/grad_norm")] == [True, False, True, False]
    for key in ("train/loss_scale", "train/skipped_steps"):
        assert cut.column(key).tolist() == whole.column(key).tolist()
    np.testing.assert_allclose(cut.column("train/loss"), whole.column("train/loss"), rtol=1e-5)
    for file in ("model", "ema", "optimizer"):
        torch.testing.assert_close(cut.tensors(file), whole.tensors(file))
    numbers = [
        json.loads((run.checkpoint / "record.json").read_text())["numbers"] for run in (whole, cut)
    ]
    assert numbers[0]["scaler"] == numbers[1]["scaler"]
