"""Runs with compressed gradients learn, stay as close to the others as the start table says, and refuse what can't work.

In float64, so that nothing but the compression moves a loss: layouts that send gradients as they are agree to 1e-8 there.
"""

import json

import numpy as np
import pytest
import torch

from common.config.fields import RunConfig
from common.distributed.gradient_compression import data_parallel, describe
from common.errors import Refused
from common.training import timm_models
from tests.harness.outcomes import Outcome, identical

STEPS, HALF = 12, 6
COMMAND = (
    f"--dtype float64 --max_steps {STEPS} --log_every 1 --checkpoint_every {HALF} --crop_scale 1 "
    "--global_batch_size 32 --max_micro_batch_size 8"
)
HOOKS = {
    "none": "--bucket_cap_mb 1",
    "fp16": "--comm_hook fp16",
    "bf16": "--comm_hook bf16",
    "powersgd": "--comm_hook powersgd --powersgd_rank 2",
}
# A ViT, without batch norm, makes little of small differences. A ResNet has branches whose first gradients are zeros.
MODELS = dict.fromkeys(HOOKS, "--model test_vit --lr 1e-3") | {"powersgd": "--model test_resnet"}
TOLERANCE = {"fp16": 2**-11, "bf16": 2**-8}  # of a loss, in all these steps: the last bit of a number that is sent


@pytest.fixture(scope="module")
def runs(run_several, tmp_path_factory) -> dict[str, Outcome]:
    """Two ranks with two micro-steps each: every hook; bf16 once more, from half-way; a refusal."""
    folder = tmp_path_factory.mktemp("runs")
    command = f"{COMMAND} --output_dir {folder}"
    cases = {name: f"{command} {MODELS[name]} {hook}" for name, hook in HOOKS.items()}
    cases["bf16 resumed"] = f"{cases['bf16']} --resume {folder}/bf16/checkpoints/step_{HALF:08d}"
    cases["small buckets"] = f"{command} --comm_hook powersgd --bucket_cap_mb 5"
    return run_several(2, {name: words.split() for name, words in cases.items()}, recipe="tests/recipes/counted.py")


@pytest.mark.parametrize("name", HOOKS)
def test_the_loss_falls_and_the_start_table_says_what_the_hook_costs(name: str, runs: dict[str, Outcome]) -> None:
    run = runs[name]
    losses = run.column("train/loss")
    assert run.outcome == "ok" and len(losses) == STEPS
    assert losses[-3:].mean() < losses[:3].mean()
    said = [line for line in run.stdout.splitlines() if line.strip().startswith("gradients")]
    assert len(said) == (name != "none") and all(f"sent {'in' if '16' in name else 'as'}" in line for line in said)


@pytest.mark.parametrize("name", TOLERANCE)
def test_half_precision_stays_close_to_gradients_sent_as_they_are(name: str, runs: dict[str, Outcome]) -> None:
    none, run = (runs[case].column("train/loss") for case in ("none", name))
    np.testing.assert_allclose(run, none, rtol=TOLERANCE[name])
    assert not np.allclose(run, none, rtol=1e-8, atol=0), "nothing was rounded: the comparison would prove nothing"


def test_powersgd_trains_layers_whose_first_gradients_are_zeros(runs: dict[str, Outcome]) -> None:
    """Those of branches whose last scale begins at 0: afterwards their weights have done more than shrink."""
    model = timm_models.build_classifier(
        "test_resnet", 10, pretrained=False, image_size=32, drop=0, drop_path=0, seed=0
    )
    start = model.double().state_dict()
    assert not start["layer1.0.bn2.weight"].any(), "no branch is closed at the start: this would prove nothing"
    for name, weight in runs["powersgd"].tensors().items():
        if weight.ndim > 1:
            assert torch.cosine_similarity(weight.flatten(), start[name].flatten(), dim=0) < 1 - 1e-5, name


@pytest.mark.parametrize("name", HOOKS)
def test_only_the_last_micro_step_sends_gradients(name: str, runs: dict[str, Outcome]) -> None:
    """Two more backward passes are the warm-up's. PowerSGD is given all gradients in one bucket, in each of them."""
    counts = json.loads(runs[name].stdout.splitlines()[-1])
    assert "2 processes x 2 micro-steps" in runs[name].stdout
    assert sum(counts["sent"]) == (STEPS + 2) * counts["parameters"]
    assert name != "powersgd" or len(counts["sent"]) == STEPS + 2


def test_a_resumed_run_has_the_same_bits_with_half_precision(runs: dict[str, Outcome]) -> None:
    assert identical(runs["bf16 resumed"].tensors(), runs["bf16"].tensors())


def test_what_powersgd_cannot_do_is_refused(runs: dict[str, Outcome]) -> None:
    refused = runs["small buckets"]
    assert refused.outcome == "refused" and not refused.folder.exists()
    assert refused.text.startswith("--bucket_cap_mb 5: PowerSGD takes all gradients in one bucket")
    with pytest.raises(Refused, match=r"--comm_hook powersgd with fp16: .*; take bf16") as refusal:
        data_parallel(RunConfig(comm_hook="powersgd"), "fp16")
    assert "\n" not in refused.text + str(refusal.value)


def test_a_process_alone_sends_nothing_and_says_so() -> None:
    assert describe(RunConfig()) == {}
    assert "one process sends none" in describe(RunConfig(comm_hook="fp16"))["gradients"]
