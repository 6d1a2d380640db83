"""Any timm backbone gives the levels that a detector asks for."""

import pytest
import torch

from common.detection.models.fpn import Backbone
from common.detection.models.spec import DetectorSpec


@pytest.mark.parametrize(
    "name, levels, stride, coarser",
    [
        ("test_resnet", (3, 7), 32, "convolutions"),
        ("test_resnet", (3, 4), 16, "convolutions"),  # layers behind stride 16 are cut off
        ("test_efficientnet", (2, 6), 32, "subsampling"),
        # channels last, windows that cut the canvas
        ("swin_tiny_patch4_window7_224", (3, 6), 32, "convolutions"),
        ("test_vit", (3, 6), 32, "subsampling"),  # one stride only: a simple pyramid
        ("test_vit", (4, 4), 16, "convolutions"),
    ],
)
def test_levels_have_their_strides_and_no_parameter_is_left_over(name, levels, stride, coarser):
    backbone = Backbone(DetectorSpec("fcos", name, 1, width=32), levels, coarser)
    assert backbone.stride == stride
    canvas = (96, 160)  # not a multiple of 64 or 128: coarse levels round up
    maps = backbone(torch.randn(1, 3, *canvas))
    assert [tuple(x.shape[2:]) for x in maps] == backbone.grid_sizes(canvas)
    assert all(x.shape[1] == 32 for x in maps) and backbone.levels == tuple(
        range(levels[0], levels[1] + 1)
    )
    sum(x.square().mean() for x in maps).backward()
    assert not [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
