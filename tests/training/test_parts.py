"""The parts and stages of a model are groups that every family has; every tensor belongs to one."""

import pytest
import timm
from torch import nn

from common.detection.models.detectors import build_detector
from common.detection.models.spec import DetectorSpec
from common.training.parts import get_stages, group_parameters

BLOCKS = [f"blocks.{i}" for i in range(12)]
CLASSIFIERS = {  # tensors of the stem and the stages begin with these
    "test_resnet": ("conv1 bn1", "layer1", "layer2", "layer3", "layer4"),
    "test_convnext": ("stem", "stages.0", "stages.1", "stages.2", "stages.3 head.norm"),
    "test_vit": ("cls_token pos_embed patch_embed", *BLOCKS[:5], "blocks.5 norm"),
    "test_efficientnet": ("conv_stem bn1", *BLOCKS[:4], "blocks.4 conv_head bn2"),
    "deit_tiny_distilled_patch16_224": (
        "cls_token dist_token pos_embed patch_embed",
        *BLOCKS[:11],
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
    ("rf_detr_seg", "rf_detr_seg_nano"): 12,
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
    "rf_detr_seg": (
        "model.model.model.backbone.backbone.",
        ("model.model.model.backbone.projector.",),
    ),
}


HEADS = ("fc.", "head.fc.", "head.", "head_dist.", "classifier.")


def get_names(model: nn.Module) -> dict[int, str]:
    """The names of parameters and buffers by their id."""
    return {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}


def get_stage_names(model: nn.Module) -> list[set[str]]:
    names = get_names(model)
    stages = []
    for tensors in get_stages(model):
        stage_names = {names[id(tensor)] for tensor in tensors}
        assert len(stage_names) == len(tensors)
        stages.append(stage_names)
    return stages


def get_part_names(model: nn.Module) -> dict[str, set[str]]:
    names = get_names(model)
    parts = {}
    for part, parameters in group_parameters(model).items():
        parts[part] = {names[id(parameter)] for parameter in parameters}
    return parts


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_stages_of_a_classifier_are_the_groups_of_timm(name: str) -> None:
    model = timm.create_model(name)
    stages = get_stage_names(model)
    assert len(stages) == len(CLASSIFIERS[name])
    for stage, text in zip(stages, CLASSIFIERS[name], strict=True):
        prefixes = text.split()
        for prefix in prefixes:
            assert any(name.startswith(prefix) for name in stage), prefix
        starts = tuple(f"{prefix}." for prefix in prefixes)
        assert all(name.startswith(starts) or name in text for name in stage)
    head = set(get_names(model).values()) - set.union(*stages)
    assert head
    assert all(name.startswith(HEADS) for name in head)
    parts = get_part_names(model)
    assert parts["head"] == head
    assert not parts["neck"]


@pytest.mark.parametrize("family, model", DETECTORS)
def test_stages_of_a_detector_hold_its_backbone_alone(family: str, model: str) -> None:
    detector = build_detector(DetectorSpec(family, model, 3, levels=(3, 5), width=32))
    stages = get_stage_names(detector)
    assert len(stages) == DETECTORS[family, model] + 1
    assert all(stages)
    backbone = set.union(*stages)
    assert len(backbone) == sum(map(len, stages)), "each tensor stands in one stage"
    parts = get_part_names(detector)
    parameter_names = dict(detector.named_parameters()).keys()
    assert all(parts.values())
    assert sum(map(len, parts.values())) == len(list(detector.parameters()))
    assert parts["backbone"] == backbone & parameter_names
    default = ("backbone.features.", ("backbone.fpn.", "backbone.features.resample."))
    backbone_prefix, neck_prefixes = NAMES.get(family, default)
    assert all(name.startswith(backbone_prefix) for name in backbone)
    assert all(name.startswith(neck_prefixes) for name in parts["neck"])
    assert not any(name.startswith((backbone_prefix, *neck_prefixes)) for name in parts["head"])
