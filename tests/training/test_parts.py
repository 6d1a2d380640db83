"""The parts and stages of a model are the same groups for every family, and every tensor belongs to
one of them.
"""

import pytest
import timm
from torch import nn

from common.detection.models.detectors import build_detector
from common.detection.models.spec import DetectorSpec
from common.training.parts import get_stages, group_parameters

CLASSIFIERS = {  # tensors of the stem and the stages begin with these
    "test_resnet": ("conv1 bn1", "layer1", "layer2", "layer3", "layer4"),
    "test_convnext": ("stem", "stages.0", "stages.1", "stages.2", "stages.3 head.norm"),
    "test_vit": (
        "cls_token pos_embed patch_embed",
        *(f"blocks.{n}" for n in range(5)),
        "blocks.5 norm",
    ),
    "test_efficientnet": (
        "conv_stem bn1",
        *(f"blocks.{n}" for n in range(4)),
        "blocks.4 conv_head bn2",
    ),
    "deit_tiny_distilled_patch16_224": (
        "cls_token dist_token pos_embed patch_embed",
        *(f"blocks.{n}" for n in range(11)),
        "blocks.11 norm",
    ),
}
DETECTORS = {  # family and backbone -> the number of stages
    ("fcos", "test_resnet"): 4,
    ("fcos", "test_vit"): 6,
    ("faster_rcnn", "test_convnext"): 4,
    ("rtdetr_v2", "rtdetr_v2_r18vd"): 4,
    ("dfine", "dfine_s"): 4,
    ("deimv2", "deimv2_s"): 12,
    ("rf_detr", "rf_detr_nano"): 12,
}
# Where families of transformers have the backbone, and what their neck is.
DETR = (
    "model.backbone.",
    ("model.encoder.", "model.encoder_input_proj.", "model.decoder_input_proj."),
)
NAMES = {
    "rtdetr_v2": DETR,
    "dfine": DETR,
    "deimv2": (
        "model.conv_encoder.",
        ("model.encoder.", "model.conv_encoder.", "model.decoder_input_proj."),
    ),
    "rf_detr": ("model.model.backbone.backbone.", ("model.model.backbone.projector.",)),
}


def named(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_stages_of_a_classifier_are_the_groups_of_timm(name: str) -> None:
    model = timm.create_model(name)
    names = named(model)
    found = [[names[id(tensor)] for tensor in stage] for stage in get_stages(model)]
    assert len(found) == len(CLASSIFIERS[name])
    for stage, prefixes in zip(found, CLASSIFIERS[name], strict=True):
        for prefix in prefixes.split():
            assert any(name.startswith(prefix) for name in stage), prefix
        begins = tuple(f"{prefix}." for prefix in prefixes.split())
        assert all(name.startswith(begins) or name in prefixes for name in stage)
    left = set(names.values()) - {name for stage in found for name in stage}
    assert left and all(
        name.startswith(("fc.", "head.fc.", "head.", "head_dist.", "classifier.")) for name in left
    )
    of_parts = group_parameters(model)
    assert {names[id(parameter)] for parameter in of_parts["head"]} == left and not of_parts["neck"]


@pytest.mark.parametrize("family, model", DETECTORS)
def test_stages_of_a_detector_hold_its_backbone_alone(family: str, model: str) -> None:
    detector = build_detector(DetectorSpec(family, model, 3, levels=(3, 5), width=32))
    names = named(detector)
    found = get_stages(detector)
    assert len(found) == DETECTORS[family, model] + 1 and all(found)
    backbone = {names[id(tensor)] for stage in found for tensor in stage}
    assert len(backbone) == sum(map(len, found)), "each tensor stands in one stage"
    of_parts = {
        part: {names[id(parameter)] for parameter in of}
        for part, of in group_parameters(detector).items()
    }
    assert sum(map(len, of_parts.values())) == len([*detector.parameters()]) and all(
        of_parts.values()
    )
    assert of_parts["backbone"] == {
        name for name in backbone if name in dict(detector.named_parameters())
    }
    prefix, inside = NAMES.get(
        family, ("backbone.features.", ("backbone.fpn.", "backbone.features.resample."))
    )
    assert all(name.startswith(prefix) for name in backbone)
    assert all(name.startswith(inside) for name in of_parts["neck"])
    assert not any(name.startswith((*inside, prefix)) for name in of_parts["head"])
