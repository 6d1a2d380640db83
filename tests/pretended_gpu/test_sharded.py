"""A model that one GPU has no room for is trained, evaluated and exported on several, each with a
shard of it.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.harness.outcomes import Outcome
from tests.pretended_gpu.test_memory import assert_predicted
from tests.recipes.test_layout import FSDP

WORDS = (
    "--image_size 32 --hflip 0 --max_steps 2 --eval_every 2 --log_every 1 --ema_decay 0.9 "
    "--tracker none --workers 0 --schedule constant"
).split()
ELSE = 20  # MiB of the small ViT: cuBLAS's and cuDNN's workspaces (16), activations
STATES = 20  # bytes per parameter: weights, gradients, AdamW's moments, moving average


def train(run_on_gpus, devices: int, gib: float, model: str, folder: Path) -> Outcome:
    """The run of a model, with two images per device and step."""
    case = ["--data", folder / "cls", "--model", model, "--global_batch_size", 2 * devices] + WORDS
    env = FSDP if devices > 1 else None
    options = {"precision": "bf16", "gib": gib, "env": env, "as_typed": True, "timeout": 900}
    return run_on_gpus(devices, {f"on_{devices}": case}, **options)[f"on_{devices}"]


def assert_trained(run: Outcome, states: float, devices: int, gib: float) -> tuple[float, float]:
    """Nothing was whole on a device, the trial foresaw the peak, `best/` is whole; GiB foreseen and
    at the peak of a step.
    """
    assert run.outcome == "ok", run.text
    predicted, peak = assert_predicted(run, min_share=0.75)
    assert states / devices < 0.97 * peak and predicted < gib
    assert np.isfinite(run.column("train/loss")).all()
    best = load_file(run.folder / "best/model.safetensors")
    average = run.tensors("ema")
    assert best.keys() == average.keys()
    for name, tensor in best.items():
        assert tensor.shape == average[name].shape, name
    return predicted, peak


@pytest.mark.gpu
@pytest.mark.long
def test_a_model_that_one_gpu_has_no_room_for_trains_on_two(run_on_gpus, folder: Path) -> None:
    model = "vit_small_patch16_224"
    gib = 0.35
    refused = train(run_on_gpus, 1, gib, model, folder)
    assert (
        refused.outcome == "refused"
        and "fsdp_bf16.yaml" in refused.text
        and "\n" not in refused.text
    )
    run = train(run_on_gpus, 2, gib, model, folder)
    states = STATES * sum(tensor.numel() for tensor in run.tensors("model").values()) / 2**30
    assert states > gib
    assert_trained(run, states, 2, gib)


@pytest.mark.gpu
@pytest.mark.long
def test_a_device_holds_its_shards_and_a_few_blocks(run_on_gpus, folder: Path) -> None:
    """Prints the table of docs/layouts.md."""
    for devices in (2, 4, 8):
        run = train(run_on_gpus, devices, 16, "vit_small_patch16_224", folder)
        model = run.tensors("model")
        block = sum(
            tensor.numel() for name, tensor in model.items() if name.startswith("blocks.0.")
        )
        states = STATES * sum(tensor.numel() for tensor in model.values()) / 2**20
        predicted, peak = (1024 * gib for gib in assert_trained(run, states / 1024, devices, 16))
        goal = states / devices + 2 * 4 * block / 2**20 + ELSE
        assert peak < 1.1 * goal
        print(f"| {devices} | {states / devices:.0f} | {goal:.0f} | {predicted:.0f} | {peak:.0f} |")
