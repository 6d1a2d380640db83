"""Any timm backbone gives the levels that a detector asks for, or a refusal that names those that it has."""

import pytest
import torch

from common.detection.models.fpn import build_backbone
from common.detection.models.spec import DetectorSpec
from common.errors import Refused


@pytest.mark.parametrize(
    "name, levels, stride, coarser",
    [
        ("test_resnet", (3, 7), 32, "convolutions"),
        ("test_resnet", (3, 4), 16, "convolutions"),  # layers behind stride 16 are cut off
        ("test_efficientnet", (2, 6), 32, "subsampling"),
        ("swin_tiny_patch4_window7_224", (3, 6), 32, "convolutions"),  # channels last, windows that cut the canvas
        ("test_vit", (3, 6), 32, "subsampling"),  # one stride only: a simple pyramid
        ("test_vit", (4, 4), 16, "convolutions"),
    ],
)
def test_levels_have_their_strides_and_no_parameter_is_left_over(name, levels, stride, coarser):
    backbone = build_backbone(DetectorSpec("fcos", name, 1, levels=levels, width=32), coarser)
    assert backbone.stride == stride
    canvas = (96, 160)  # not a multiple of 64 or 128: coarse levels round up
    maps = backbone(torch.randn(1, 3, *canvas))
    assert [tuple(x.shape[2:]) for x in maps] == backbone.grid_sizes(canvas)
    assert all(x.shape[1] == 32 for x in maps) and backbone.levels == tuple(range(levels[0], levels[1] + 1))
    sum(x.square().mean() for x in maps).backward()
    assert not [name for name, parameter in backbone.named_parameters() if parameter.grad is None]


def test_what_can_not_be_is_refused_in_one_line():
    for name, levels, says in (
        ("test_convnext", (1, 4), "strides 4, 8, 16, 32"),
        ("test_resnet", (4, 3), "--levels 4-3"),
        ("test_resnett", (3, 4), "test_resnet"),
    ):
        with pytest.raises(Refused, match=says):
            build_backbone(DetectorSpec("fcos", name, 1, levels=levels, width=32), "convolutions")
