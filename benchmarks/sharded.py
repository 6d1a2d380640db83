"""Measures what `recipes/cls.py` adds to a sharded step (FSDP2), on CPU processes or several GPUs.

    accelerate launch --config_file accelerate_configs/fsdp_cpu.yaml benchmarks/sharded.py [--turns N]

On several GPUs take fsdp_bf16.yaml.

The recipe's own `main` is compared with the loop of loop.py, whose model torch's `fully_shard` cuts
into the same parts. `paired.py` explains the comparison.
"""

import itertools
import os
import tempfile

import torch
from loop import build_flags, train_bare
from paired import Setting, build_recipe_loop, compare_loops
from table import Row, run_script
from torch import nn
from torch.distributed.fsdp import fully_shard


def shard(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def train_by_hand(setting: Setting) -> None:
    train_bare(setting, shard, img_size=setting.image_size)


def measure(turns: int, quick: bool) -> list[Row]:
    settings = [Setting("vit_tiny_patch16_224", 64, 32, 10), Setting("test_vit", 32, 64, 30)]
    if torch.cuda.is_available():
        settings = [Setting("vit_large_patch16_224", 224, 64, 20)]
    numbers = itertools.count()  # the ranks share a folder
    folder = f"{tempfile.gettempdir()}/sharded-{os.getppid()}"
    recipe = build_recipe_loop("cls", build_flags, lambda: f"{folder}-{next(numbers)}")
    return compare_loops("cls.py in shards", recipe, train_by_hand, settings, turns, quick)


if __name__ == "__main__":
    run_script(__doc__, measure)
