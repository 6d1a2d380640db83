"""torchvision's references/detection/train.py."""

import torchvision
from data import DETECTION
from launching import Launch
from subjects.torchvision_references import run_references
from torch import nn
from torchvision.models._api import register_model
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.transforms import RandomHorizontalFlip

SIZES = DETECTION
VARIANTS = {"torchvision references, detection": 16}
VERSION = torchvision.__version__
METRIC = r"0.50:0.95 \| area=   all \| maxDets=100 \] = ([\d.]+)"
CHANGES = "CPU, gloo, no device ids; FCOS of three convolutions at 96 pixels; Namespace; a seed"
ARGS = "--model small_fcos --device cpu --epochs 2 --lr 0.01 --workers 0 --output-dir ."


def build_fcos(num_classes: int, **_unused) -> FCOS:
    """A small one, not pretrained."""
    backbone = nn.Sequential()
    for num_inputs, num_outputs, stride in ((3, 16, 2), (16, 32, 2), (32, 32, 2)):
        backbone.append(nn.Conv2d(num_inputs, num_outputs, 3, stride, 1))
        backbone.append(nn.GroupNorm(4, num_outputs))
        backbone.append(nn.ReLU())
    backbone.out_channels = 32
    anchors = AnchorGenerator(((8,),), ((1.0,),))
    return FCOS(backbone, num_classes, min_size=96, max_size=96, anchor_generator=anchors)


def train(launch: Launch) -> None:
    register_model("small_fcos")(build_fcos)
    if not launch.augment:  # the references' own flip asks for `p`
        initialize = RandomHorizontalFlip.__init__
        RandomHorizontalFlip.__init__ = lambda flip, p: initialize(flip, p=0)
    run_references(launch, "detection", ARGS)
