"""A model that one GPU has no room for is trained, evaluated and exported on two, each with a shard of it."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.harness.outcomes import Outcome
from tests.pretended_gpu.conftest import Gpus

GIB = 0.35
# 21.4 M parameters: weights, gradients, AdamW and the average take 20 bytes each, 0.4 GiB.
WORDS = (
    *(
        "--data",
        "digits",
        "--model",
        "vit_small_patch16_224",
        "--image_size",
        32,
        "--global_batch_size",
        8,
        "--hflip",
        0,
    ),
    *("--max_steps", 2, "--eval_every", 2, "--log_every", 1, "--ema_decay", 0.9, "--tracker", "none", "--workers", 0),
)


@pytest.mark.gpu
@pytest.mark.long
def test_a_model_that_one_gpu_has_no_room_for_trains_on_two(gpus: Gpus, tmp_path: Path) -> None:
    words = (*WORDS, "--output_dir", tmp_path, "--name")
    refused = gpus.start("single_gpu_bf16", "recipes/cls.py", *words, "one", gib=GIB).finish()
    assert refused.returncode and "fsdp_bf16.yaml" in refused.stderr.splitlines()[-1]

    printed = gpus("fsdp_bf16", "recipes/cls.py", *words, "two", devices=2, gib=GIB)
    run = Outcome("ok", "", printed, 0.0, tmp_path / "two")
    predicted = float(re.search("memory +(.+) of .* GiB at the peak of a step", printed)[1])
    states = 20 * sum(tensor.numel() for tensor in run.tensors("model").values()) / 2**30
    peak = run.column("perf/gpu_memory_gb")[0]
    assert states / 2 < peak < min(states / 2 + 0.1, GIB) and 0.85 * predicted < peak < 1.01 * predicted
    whole = load_file(run.folder / "best/model.safetensors")
    assert {name: tensor.shape for name, tensor in whole.items()} == {
        name: tensor.shape for name, tensor in run.tensors("ema").items()
    }
