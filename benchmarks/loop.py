"""Measures what `recipes/cls.py` adds to the model's own step.

    python benchmarks/loop.py [--quick] [--brief] [--output FILE]

The recipe's own `main` is compared with a loop written by hand without any framework: the same timm model, images in memory,
transforms, loss, optimizer, gradient norm and learning rate per step; the loss is read one step late. Both load data in the
training process (workers 0), so that no part of the input pipeline is hidden. `paired.py` explains the comparison. On the CPU
torch uses one thread, so that waiting is not hidden by other threads' work.
"""

import math
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from paired import LR, TOTAL_STEPS, WEIGHT_DECAY, Setting, recipe, report, rows_of_loops
from table import Row, script
from timm.data import create_transform, resolve_model_data_config
from timm.optim import create_optimizer_v2
from torch.utils.data import DataLoader, Dataset

from common.classification import sources

CROP_SCALE = 0.7


def flags(setting: Setting) -> dict:
    return {
        "data": "digits",
        "image_size": setting.image_size,
        "crop_scale": CROP_SCALE,
        "hflip": 0,
        "warmup_epochs": 0,
    }


class Images(Dataset):
    """Turns pixels in memory into a PIL image, and that into a transformed tensor."""

    def __init__(self, source: sources.Source, transform: Callable):
        self.source, self.labels, self.transform = source, source.labels.tolist(), transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.transform(self.source.image(index)), self.labels[index]


def bare(setting: Setting) -> None:
    """The loop written by hand."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source, _ = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    model = timm.create_model(setting.model, num_classes=len(source.classes)).to(device)
    data = resolve_model_data_config(model, {"input_size": (3, setting.image_size, setting.image_size)})
    transform = create_transform(
        data["input_size"],
        is_training=True,
        use_prefetcher=True,  # ends in uint8
        scale=(CROP_SCALE, 1.0),
        hflip=0.0,
        color_jitter=None,
        interpolation=data["interpolation"],
    )
    mean, std = (255 * torch.tensor(data[key], device=device)[:, None, None] for key in ("mean", "std"))
    loader = DataLoader(
        Images(source, transform), setting.batch_size, shuffle=True, drop_last=True, pin_memory=device.type == "cuda"
    )
    optimizer = create_optimizer_v2(model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    parameters = list(model.parameters())
    step, numbers = 0, torch.zeros(2)
    model.train()
    while True:
        for images, labels in loader:
            for group in optimizer.param_groups:
                group["lr"] = LR * (1 + math.cos(math.pi * step / TOTAL_STEPS)) / 2
            images = images.to(device, non_blocking=True).to(torch.float32).sub_(mean).div_(std)
            loss = F.cross_entropy(model(images), labels.to(device, non_blocking=True))
            loss.backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
            optimizer.step()
            optimizer.zero_grad()
            late = numbers.tolist()  # of the previous step
            if not all(map(math.isfinite, late)):
                raise FloatingPointError(f"step {step}: {late}")
            numbers = torch.stack([loss.detach(), norm])
            step += 1


def measure(quick: bool, brief: bool) -> list[dict]:
    """A usual setting, and two with short steps, of few and of many samples."""
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)
    settings = (
        Setting("resnet50", 224, 64, 30) if gpu else Setting("resnet18", 64, 32, 6),
        Setting("test_resnet", 32, 8, 80),
        Setting("test_resnet", 32, 64, 20),
    )
    if quick:
        settings = tuple(Setting("test_resnet", 32, size, 3) for size in (16, 8, 24))
    return report(recipe("cls", flags), bare, settings, 1 if quick else 3 if brief else 5)


def table(results: list[dict]) -> list[Row]:
    """Rows for the common table."""
    return rows_of_loops("cls", results)


if __name__ == "__main__":
    script(__doc__, measure, table)
