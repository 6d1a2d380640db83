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

from common.training.timm_models import classifier

_OF_TRANSFORMERS = {
    "stem": "^embed",
    "blocks": r"^(?:encoder\.|model\.)?(?:stages|layers?|blocks)\.(\d+)",
}


def parts(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of backbone, neck and head. What a backbone has beside its stages' network
    belongs to the neck.

    Raises `Refused` for a module that does not say which part is its head.
    """
    part_of = {}
    if hasattr(model, "backbone"):
        for module in [model.backbone, *getattr(model, "neck", ())]:
            part_of.update({id(parameter): "neck" for parameter in module.parameters()})
    part_of.update({id(tensor): "backbone" for tensor in _tensors(model).values()})
    parameters: dict[str, list[nn.Parameter]] = {"backbone": [], "neck": [], "head": []}
    for parameter in model.parameters():
        part = part_of.get(id(parameter), "head")
        parameters[part].append(parameter)
    return parameters


def stages(model: nn.Module) -> list[list[torch.Tensor]]:
    """The tensors, buffers included, of the backbone's stem and of each of its stages, from the
    first to the last.

    What comes after the stages, but is not the head, belongs to the last one. A single list if the
    stages are unknown.
    """
    tensors, numbers = _tensors(model), _numbers(_trunk(model))
    last = max((numbers[name] for name in tensors if name in numbers), default=0)
    found: list[list[torch.Tensor]] = [[] for _ in range(last + 1)]
    for name, tensor in tensors.items():
        found[numbers.get(name, last)].append(tensor)
    return found


def _trunk(model: nn.Module) -> nn.Module:
    """The network that has stages: the model itself, or the network in its backbone."""
    if not hasattr(model, "backbone"):
        return model
    return getattr(model, "trunk", None) or getattr(model.backbone, "trunk", model.backbone)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the backbone, by their names in the network that has the stages."""
    head = {} if hasattr(model, "backbone") else classifier(model).state_dict(keep_vars=True)
    others = set(map(id, head.values()))
    state = _trunk(model).state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if id(tensor) not in others}


def _numbers(trunk: nn.Module) -> dict[str, int]:
    """The stage of each tensor, 0 for the stem, without those that belong to none."""
    names = {name: name for name in trunk.state_dict()}
    if hasattr(trunk, "group_matcher"):
        matcher = trunk.group_matcher(coarse=True)
    elif hasattr(trunk, "feature_info"):
        # timm's features, whose names differ from the model's by dots and a prefix.
        with torch.device("meta"):
            whole = timm.create_model(trunk.pretrained_cfg["architecture"])
        matcher = whole.group_matcher(coarse=True)
        of_model = {name.replace(".", "_"): name for name in whole.state_dict()}
        names = {
            name: of_model.get(name.removeprefix("model.").replace(".", "_"), "") for name in names
        }
    else:
        matcher = _OF_TRANSFORMERS
    numbers = group_with_matcher(
        [(name, None) for name in {*names.values(), ""}], matcher, reverse=True
    )
    return {name: numbers[other] for name, other in names.items() if numbers[other] != numbers[""]}
