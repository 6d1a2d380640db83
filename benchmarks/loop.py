"""Measures what `recipes/cls.py` adds to the model's own step.

    python benchmarks/loop.py [--quick] [--turns N]

The recipe's own `main` is compared with a loop written by hand without any framework: the same timm
model, images in memory, transforms, loss, optimizer, gradient norm and learning rate per step; the
loss is read one step late. Both load data in the training process (workers 0), so that no part of
the input pipeline is hidden. `paired.py` explains the comparison. On the CPU torch uses one thread,
so that waiting is not hidden by other threads' work.
"""

import itertools
import os
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F
from accelerate.state import PartialState
from paired import Setting, build_recipe_loop, compare_loops, train_by_hand
from table import Row, run_script
from timm.data import create_transform, resolve_model_data_config
from torch.utils.data import DataLoader, Dataset

from common.classification import sources
from common.distributed.collectives import world_size

CROP_SCALE = 0.7


def build_flags(setting: Setting) -> dict:
    return {
        "image_size": setting.image_size,
        "crop_scale": CROP_SCALE,
    }


class Images(Dataset):
    """Turns pixels in memory into a PIL image, and that into a transformed tensor."""

    def __init__(self, source: sources.Source, transform: Callable):
        self.source = source
        self.labels = source.labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return self.transform(self.source.load_image(index)), self.labels[index]


def train_bare(setting: Setting, shard: Callable | None = None, **options: object) -> None:
    """The loop written by hand, on this process's part of a batch; `shard` may cut the model into shards."""
    device = PartialState().device  # the recipe ran before
    source, _ = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    model = timm.create_model(setting.model, num_classes=len(source.classes), **options).to(device)
    data_config = resolve_model_data_config(
        model, {"input_size": (3, setting.image_size, setting.image_size)}
    )
    transform = create_transform(
        data_config["input_size"],
        is_training=True,
        use_prefetcher=True,  # ends in uint8
        scale=(CROP_SCALE, 1.0),
        hflip=0.0,
        color_jitter=None,
        interpolation=data_config["interpolation"],
    )
    if shard:
        shard(model)
    size = setting.batch_size // world_size()
    loader = DataLoader(
        Images(source, transform),
        size,
        shuffle=True,
        drop_last=True,
        pin_memory=device.type == "cuda",
    )
    mean, std = (
        255 * torch.tensor(data_config[key], device=device)[:, None, None]
        for key in ("mean", "std")
    )
    autocast = torch.autocast(
        device.type, torch.bfloat16, os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    )

    def compute_loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = images.to(device, non_blocking=True).to(torch.float32).sub_(mean).div_(std)
        with autocast:
            logits = model(images)
        return F.cross_entropy(logits.float(), labels.to(device, non_blocking=True))

    train_by_hand(model, itertools.chain.from_iterable(itertools.repeat(loader)), compute_loss)


def measure(turns: int, quick: bool) -> list[Row]:
    """A usual setting, and two with short steps, of few and of many samples."""
    usual = Setting("resnet18", 64, 32, 6)
    if torch.cuda.is_available():
        usual = Setting("resnet50", 224, 64, 30)
    settings = [usual, Setting("test_resnet", 32, 8, 80), Setting("test_resnet", 32, 64, 20)]
    return compare_loops(
        "cls.py", build_recipe_loop("cls", build_flags), train_bare, settings, turns, quick
    )


if __name__ == "__main__":
    run_script(__doc__, measure)
