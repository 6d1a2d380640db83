"""Measures what `recipes/cls.py` adds to a sharded step (FSDP2), on two processes or more, of a CPU or with a GPU each.

    accelerate launch --config_file accelerate_configs/fsdp_cpu.yaml benchmarks/sharded.py [--quartets 5]

On several GPUs take fsdp_bf16.yaml.

The recipe's own `main` is compared with a loop written by hand around torch's `fully_shard`: the same timm model in the same
parts, images in memory, transforms, loss, optimizer and gradient norm. `paired.py` explains the comparison.
"""

import argparse
import itertools
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import PartialState
from loop import CROP_SCALE, Images, flags
from paired import LR, WEIGHT_DECAY, Setting, compare, measure, recipe, rows_of_loops
from table import show
from timm.data import create_transform, resolve_model_data_config
from timm.optim import create_optimizer_v2
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from common.classification import sources
from common.distributed.collectives import is_main

ON_CPUS = Setting("vit_tiny_patch16_224", 64, 32, 10), Setting("test_vit", 32, 64, 30)
ON_GPUS = (Setting("vit_large_patch16_224", 224, 64, 20),)
QUICK = (Setting("test_vit", 32, 8, 2),)


def bare(setting: Setting) -> None:
    """The loop written by hand; each process takes its part of the batch."""
    source, _ = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    sizes = {"img_size": setting.image_size}
    device = PartialState().device  # the recipe ran before
    model = timm.create_model(setting.model, num_classes=len(source.classes), **sizes).to(device)
    data = resolve_model_data_config(model, {"input_size": (3, setting.image_size, setting.image_size)})
    options = {"use_prefetcher": True, "scale": (CROP_SCALE, 1.0), "hflip": 0.0, "color_jitter": None}
    transform = create_transform(data["input_size"], is_training=True, interpolation=data["interpolation"], **options)
    mean, std = (255 * torch.tensor(data[key], device=device)[:, None, None] for key in ("mean", "std"))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    size = setting.batch_size // dist.get_world_size()
    loader = DataLoader(Images(source, transform), size, shuffle=True, drop_last=True, pin_memory=device.type != "cpu")
    optimizer = create_optimizer_v2(model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    parameters, loss = list(model.parameters()), torch.zeros(())
    half = torch.autocast(device.type, torch.bfloat16, os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16")
    while True:
        for images, labels in loader:
            late = loss.item()  # of the previous step
            images = images.to(device, non_blocking=True).to(torch.float32).sub_(mean).div_(std)
            with half:
                logits = model(images)
            loss = F.cross_entropy(logits.float(), labels.to(device, non_blocking=True))
            loss.backward()
            torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]).full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            if late != late:
                raise FloatingPointError("the loss is not finite")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quartets", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="only check that it works")
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON file")
    arguments = parser.parse_args()
    settings = ON_GPUS if torch.cuda.is_available() else ON_CPUS
    torch.set_num_threads(1)
    numbers = itertools.count()
    ours = recipe("cls", flags, lambda: f"{tempfile.gettempdir()}/sharded-{os.getppid()}-{next(numbers)}")
    results = []
    for setting in QUICK if arguments.quick else settings:
        measure(ours, setting), measure(bare, setting)  # warm up both
        results.append(compare(ours, bare, setting, 1 if arguments.quick else arguments.quartets))
        if is_main():
            text = ", ".join(f"{clock} {results[-1][clock]['throughput']:.3f}" for clock in ("wall", "cpu"))
            print(f"{setting}, {dist.get_world_size()} shards: throughput of a bare loop's: {text}", flush=True)
    rows = rows_of_loops("shards: cls", results)
    if is_main():
        show(rows)
        if arguments.output:
            arguments.output.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
