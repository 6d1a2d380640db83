"""For trainers without a script: timm's model and torchvision's data set, as in their guides."""

from pathlib import Path

import timm
from torch import nn
from torch.optim import SGD
from torchvision import transforms
from torchvision.datasets import ImageFolder


def build_model() -> nn.Module:
    return timm.create_model("test_vit", img_size=32, num_classes=10)


def build_optimizer(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.02, momentum=0.9)


def open_images(data: Path) -> tuple[ImageFolder, ImageFolder]:
    """The images to train on and those to evaluate on."""
    steps = [transforms.ToTensor(), transforms.Normalize(0.5, 0.5)]
    augmentation = [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip()]
    train_images = ImageFolder(data / "train", transforms.Compose(augmentation + steps))
    return train_images, ImageFolder(data / "val", transforms.Compose(steps))
