"""Does `recipes/cls.py` train on CUDA devices what it trains on the CPU? By torch's own CUDA build, on pretended devices."""

import json

import numpy as np
import pytest

WORDS = "--tracker none --workers 2 --log_every 1 --max_steps 6 --eval_every 6 --checkpoint_every 3".split()
VARIED = "--mixup 0.2 --cutmix 1 --random_erasing 0.3 --color_jitter 0.3 --ema_decay 0.9 --clip 1".split()
CASES = {
    "groups": ("single_gpu_bf16", 1, "--batch_norm group --max_micro_batch_size 16"),
    "vit": ("multi_gpu_bf16", 2, "--model test_vit --drop_path 0.2 --drop 0.1 --grad_checkpointing"),
}


def rows(folder):
    return [row for row in map(json.loads, (folder / "metrics.jsonl").open()) if "train/loss" in row]


def test_two_gpus_train_what_a_cpu_trains(launch, gpus, tmp_path):
    words = [*WORDS, *VARIED, "--dtype", "float64", "--batch_norm", "global", "--output_dir", tmp_path]
    gpus("multi_gpu", "recipes/cls.py", *words, "--name", "gpus", devices=2)
    assert launch("cpu", "recipes/cls.py", *words, "--name", "cpu").returncode == 0
    gpu, cpu = rows(tmp_path / "gpus"), rows(tmp_path / "cpu")
    for key in ("train/loss", "train/grad_norm"):
        np.testing.assert_allclose([row[key] for row in gpu], [row[key] for row in cpu], rtol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_a_run_on_gpus_trains(gpus, tmp_path, name):
    config, devices, flags = CASES[name]
    words = [*WORDS, *flags.split(), "--output_dir", tmp_path, "--name", "run"]
    gpus(config, "recipes/cls.py", *words, devices=devices)
    assert all(np.isfinite(row["train/loss"]) for row in rows(tmp_path / "run"))
