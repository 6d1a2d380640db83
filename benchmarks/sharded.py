"""Measures what `recipes/cls.py` adds to a sharded step (FSDP2), on CPU processes or several GPUs.

    accelerate launch --config_file accelerate_configs/fsdp_cpu.yaml benchmarks/sharded.py [--output FILE]

On several GPUs take fsdp_bf16.yaml.

The recipe's own `main` is compared with the loop of loop.py, whose model torch's `fully_shard` cuts into
the same parts. `paired.py` explains the comparison.
"""

import itertools
import os
import tempfile

import torch
from loop import bare, flags
from paired import Setting, compare_loops, recipe
from table import Row, script
from torch import nn
from torch.distributed.fsdp import fully_shard

ON_CPUS = Setting("vit_tiny_patch16_224", 64, 32, 10), Setting("test_vit", 32, 64, 30)
ON_GPUS = (Setting("vit_large_patch16_224", 224, 64, 20),)
QUICK = (Setting("test_vit", 32, 8, 2),)


def cut(model: nn.Module) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def by_hand(setting: Setting) -> None:
    bare(setting, cut, img_size=setting.image_size)


def measure(quick: bool, brief: bool) -> tuple[list[Row], list]:
    torch.set_num_threads(1)
    numbers = itertools.count()
    ours = recipe("cls", flags, lambda: f"{tempfile.gettempdir()}/sharded-{os.getppid()}-{next(numbers)}")
    settings = QUICK if quick else ON_GPUS if torch.cuda.is_available() else ON_CPUS
    return compare_loops("shards: cls", ours, by_hand, settings, 1 if quick else 3 if brief else 5)


if __name__ == "__main__":
    script(__doc__, measure)
