"""The configuration and the small model that tests of optimizers share."""

from dataclasses import dataclass

import torch
from timm.models import VisionTransformer
from torch import nn

from common.config.fields import OptimizationConfig, RunConfig

CLASSES = 5


@dataclass
class Config(OptimizationConfig, RunConfig):
    """What every recipe has."""

    model: str = "test_resnet"
    warmup_epochs: float = 0.0


def build_vit(depth: int) -> nn.Module:
    torch.manual_seed(0)
    size = {
        "img_size": 8,
        "patch_size": 4,
        "embed_dim": 16,
        "depth": depth,
        "num_heads": 2,
        "num_classes": CLASSES,
    }
    return VisionTransformer(**size).double()
