"""Parts of a model: its backbone, neck and head, and the stages of the backbone.

A model that stands on a backbone has it as `backbone`, and may have `neck`, a list of the modules
between backbone and head. If only a part of the backbone has stages, `trunk` of the model or of its
backbone is that network. Of any other model, all but the head is backbone.

timm's `group_matcher(coarse=True)` names the stages: four in a ResNet or ConvNeXt, the blocks of a
vision transformer, the rows of an EfficientNet. Models of transformers have them in
`encoder.stages` or `encoder.layer`.
"""

import timm
import torch
from timm.models._manipulate import group_with_matcher
from torch import nn

from common.training.timm_models import get_classifier

_TRANSFORMERS_MATCHER = {
    "stem": "^embed",
    "blocks": r"^(?:encoder\.|model\.)?(?:stages|layers?|blocks)\.(\d+)",
}


def group_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of backbone, neck and head, by these names.

    What a backbone has beside its stages' network belongs to the neck. Raises `Refused` for a
    module that does not say which part is its head.
    """
    part_by_id = {}
    if hasattr(model, "backbone"):
        for module in [model.backbone, *getattr(model, "neck", ())]:
            for parameter in module.parameters():
                part_by_id[id(parameter)] = "neck"
    for tensor in _get_backbone_tensors(model).values():
        part_by_id[id(tensor)] = "backbone"
    parameters: dict[str, list[nn.Parameter]] = {"backbone": [], "neck": [], "head": []}
    for parameter in model.parameters():
        part = part_by_id.get(id(parameter), "head")
        parameters[part].append(parameter)
    return parameters


def get_stages(model: nn.Module) -> list[list[torch.Tensor]]:
    """The tensors of the backbone's stem and of each of its stages, from the first to the last.

    Buffers are included. What comes after the stages, but is not the head, belongs to the last one.
    A single list if the stages are unknown.
    """
    tensors = _get_backbone_tensors(model)
    stage_by_name = _match_stages(_get_trunk(model))
    last_stage = max((stage_by_name.get(name, 0) for name in tensors), default=0)
    stages: list[list[torch.Tensor]] = [[] for _ in range(last_stage + 1)]
    for name, tensor in tensors.items():
        stage = stage_by_name.get(name, last_stage)
        stages[stage].append(tensor)
    return stages


def _get_trunk(model: nn.Module) -> nn.Module:
    """The network that has stages: the model itself, or the network in its backbone."""
    if not hasattr(model, "backbone"):
        return model
    if getattr(model, "trunk", None):
        return model.trunk
    return getattr(model.backbone, "trunk", model.backbone)


def _get_backbone_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the backbone, by their names in the network that has the stages."""
    head_ids = set()
    if not hasattr(model, "backbone"):
        head = get_classifier(model).state_dict(keep_vars=True)
        head_ids = {id(tensor) for tensor in head.values()}
    state = _get_trunk(model).state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if id(tensor) not in head_ids}


def _match_stages(trunk: nn.Module) -> dict[str, int]:
    """Tensor name -> stage, 0 for the stem, without those that belong to none."""
    names = list(trunk.state_dict())
    matched_names = names  # as the matcher knows them
    if hasattr(trunk, "group_matcher"):
        matcher = trunk.group_matcher(coarse=True)
    elif hasattr(trunk, "feature_info"):
        # timm's features, whose names differ from the model's by dots and a prefix.
        with torch.device("meta"):
            full_model = timm.create_model(trunk.pretrained_cfg["architecture"])
        matcher = full_model.group_matcher(coarse=True)
        full_names = {name.replace(".", "_"): name for name in full_model.state_dict()}
        matched_names = []
        for name in names:
            flat_name = name.removeprefix("model.").replace(".", "_")
            matched_names.append(full_names.get(flat_name, ""))
    else:
        matcher = _TRANSFORMERS_MATCHER
    # The empty name stands for tensors that belong to no stage.
    named = [(name, None) for name in set(matched_names) | {""}]
    stage_by_match = group_with_matcher(named, matcher, reverse=True)
    stages = {}
    for name, matched_name in zip(names, matched_names, strict=True):
        if stage_by_match[matched_name] != stage_by_match[""]:
            stages[name] = stage_by_match[matched_name]
    return stages
