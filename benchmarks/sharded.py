"""Measures what `recipes/cls.py` adds to a sharded step (FSDP2), on two processes or more.

    accelerate launch --config_file accelerate_configs/fsdp_cpu.yaml benchmarks/sharded.py [--quartets 5]

The recipe's own `main` is compared with a loop written by hand around torch's `fully_shard`: the same timm model in the same
parts, images in memory, transforms, loss, optimizer and gradient norm. `paired.py` explains the comparison.
"""

import argparse
import itertools
import os
import tempfile

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from loop import CROP_SCALE, Images, flags
from paired import LR, WEIGHT_DECAY, Setting, compare, measure, recipe
from timm.data import create_transform, resolve_model_data_config
from timm.optim import create_optimizer_v2
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from common.classification import sources
from common.distributed.collectives import is_main

SETTINGS = Setting("vit_tiny_patch16_224", 64, 32, 10), Setting("test_vit", 32, 64, 30)


def bare(setting: Setting) -> None:
    """The loop written by hand; each process takes its part of the batch."""
    source, _ = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    sizes = {"img_size": setting.image_size}
    model = timm.create_model(setting.model, num_classes=len(source.classes), **sizes)
    data = resolve_model_data_config(model, {"input_size": (3, setting.image_size, setting.image_size)})
    options = {"use_prefetcher": True, "scale": (CROP_SCALE, 1.0), "hflip": 0.0, "color_jitter": None}
    transform = create_transform(data["input_size"], is_training=True, interpolation=data["interpolation"], **options)
    mean, std = (255 * torch.tensor(data[key])[:, None, None] for key in ("mean", "std"))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    size = setting.batch_size // dist.get_world_size()
    loader = DataLoader(Images(source, transform), size, shuffle=True, drop_last=True)
    optimizer = create_optimizer_v2(model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    parameters, loss = list(model.parameters()), torch.zeros(())
    while True:
        for images, labels in loader:
            late = loss.item()  # of the previous step
            loss = F.cross_entropy(model(images.to(torch.float32).sub_(mean).div_(std)), labels)
            loss.backward()
            torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            if late != late:
                raise FloatingPointError("the loss is not finite")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quartets", type=int, default=5)
    quartets = parser.parse_args().quartets
    torch.set_num_threads(1)
    numbers = itertools.count()
    ours = recipe("cls", flags, lambda: f"{tempfile.gettempdir()}/sharded-{os.getppid()}-{next(numbers)}")
    for setting in SETTINGS:
        measure(ours, setting), measure(bare, setting)  # warm up both
        found = compare(ours, bare, setting, quartets)
        if is_main():
            text = ", ".join(f"{clock} {found[clock]['throughput']:.3f}" for clock in ("wall", "cpu"))
            print(f"{setting}: {found['wall']['recipe_ms']:.1f} ms per step, throughput of a bare loop's: {text}")


if __name__ == "__main__":
    main()
