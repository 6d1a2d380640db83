"""Checkpoints of RT-DETR's, RT-DETRv2's and D-FINE's authors, under transformers' names.

An RT-DETR is an RT-DETRv2 whose points are sampled with the same weight on all levels, and becomes
one.
Sources: github.com/lyuwenyu/RT-DETR and github.com/Peterande/D-FINE, both under the Apache License
2.0. Which layer is which is shown by transformers' conversion of the same files.
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.models._meta import _COCO_CATEGORIES

from common.detection.models.detr_architectures import ARCHITECTURES
from common.detection.weights.weights import Weights
from common.errors import Refused

COCO = tuple(name for name in _COCO_CATEGORIES if name not in ("__background__", "N/A"))  # 80, in order of their ids
_OBJECTS365 = 366  # rows of the class heads
_SIDE = "640"  # pixels, of all of them
_POINTS, _HEADS_OF_ATTENTION = 4, 8  # of RT-DETR: sampled on each level by each head

# Of the whole name, in this order. {mlp} and {points} differ between the families.
_RENAMED = (
    # ResNet
    (r"^backbone\.conv1\.conv1_1\.", "backbone.model.embedder.embedder.0."),
    (r"^backbone\.conv1\.conv1_2\.", "backbone.model.embedder.embedder.1."),
    (r"^backbone\.conv1\.conv1_3\.", "backbone.model.embedder.embedder.2."),
    (r"^backbone\.res_layers\.(\d+)\.blocks\.", r"backbone.model.encoder.stages.\1.layers."),
    (r"\.branch2a\.", ".layer.0."),
    (r"\.branch2b\.", ".layer.1."),
    (r"\.branch2c\.", ".layer.2."),
    (r"\.short\.conv\.(conv|norm)\.", r".shortcut.1.\1."),
    (r"\.short\.", ".shortcut."),
    # HGNetv2
    (r"^backbone\.stem\.", "backbone.model.embedder."),
    (r"^backbone\.stages\.", "backbone.model.encoder.stages."),
    (r"^(backbone\..*)\.conv\.", r"\1.convolution."),
    (r"^(backbone\..*)\.(norm|bn)\.", r"\1.normalization."),
    # neck
    (r"^(en|de)coder\.input_proj\.(\d+)\.(conv|0)\.", r"\1coder_input_proj.\2.0."),
    (r"^(en|de)coder\.input_proj\.(\d+)\.(norm|1)\.", r"\1coder_input_proj.\2.1."),
    (r"^(encoder\.encoder\..*)\.norm2\.", r"\1.final_layer_norm."),
    (r"^encoder\.encoder\.", "encoder.aifi."),
    (r"\.downsample_convs\.(\d+)\.0\.cv", r".downsample_convs.\1.conv"),
    (r"\.cv([23])\.0\.", lambda found: f".csp_rep{int(found[1]) - 1}."),
    (r"\.cv([23])\.1\.", r".conv\1."),
    (r"\.cv([14])\.", r".conv\1."),
    # decoder
    (r"^decoder\.(enc_(?:output|score_head|bbox_head)|denoising_class_embed)\.", r"\1."),
    (r"^enc_output\.proj\.", "enc_output.0."),
    (r"^enc_output\.norm\.", "enc_output.1."),
    (r"^decoder\.dec_score_head\.", "decoder.class_embed."),
    (r"^decoder\.dec_bbox_head\.", "decoder.bbox_embed."),
    (r"^decoder\.decoder\.", "decoder."),
    (r"\.cross_attn\.num_points_scale$", ".encoder_attn.{points}"),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.norm1\.", ".self_attn_layer_norm."),
    (r"^(decoder\.layers\..*)\.norm2\.", r"\1.encoder_attn_layer_norm."),
    (r"^(decoder\.layers\..*)\.norm3\.", r"\1.final_layer_norm."),
    # both
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.linear1\.", ".mlp.{mlp[0]}."),
    (r"\.linear2\.", ".mlp.{mlp[1]}."),
)
_WORDS: dict[str, dict] = {
    "rtdetr_v2": {"points": "n_points_scale", "mlp": ("fc1", "fc2")},
    "dfine": {"points": "num_points_scale", "mlp": ("layers.0", "layers.1")},
}
# Anchors of one image size, which are computed here; counts of batches.
_LEFT_OUT = r"^decoder\.(anchors|valid_mask)$|\.num_batches_tracked$"


def matches(state: dict[str, Tensor]) -> bool:
    """True if the tensors are named as in these repositories, or as in DEIMv2's."""
    return {"decoder.dec_score_head.0.weight", "decoder.enc_score_head.weight"} <= state.keys()


def convert(state: dict[str, Tensor], _as_published: Callable[[], bool]) -> Weights:
    """The weights under our names. Raises `Refused` for a model that is none of `ARCHITECTURES`, and for DEIMv2."""
    if any(".swish_ffn." in name for name in state):
        raise Refused(
            "a checkpoint of DEIMv2's authors: their model selects its queries from maps that transformers' model normalises "
            "first, so that it would find other boxes; give a model of transformers, --detector deimv2 --model owner/name"
        )
    family = "dfine" if "decoder.pre_bbox_head.layers.0.weight" in state else "rtdetr_v2"
    tensors: dict[str, Tensor] = {}
    for theirs, tensor in state.items():
        for name, part in _renamed(theirs, tensor, family):
            if name in tensors and not torch.equal(tensors[name], part):
                raise Refused(f"a checkpoint with two values for {name}: not as its authors' programs write it")
            tensors[name] = part
    rows, model = len(tensors["model.enc_score_head.weight"]), _architecture(tensors, family)
    for name in [*tensors]:
        if name.endswith(".running_var"):
            tensors[name.replace("running_var", "num_batches_tracked")] = torch.zeros((), dtype=torch.int64)
        points = name.replace("attention_weights.bias", "n_points_scale")  # RT-DETR's are no tensor
        if family == "rtdetr_v2" and points not in tensors:
            tensors[points] = torch.full((len(tensors[name]) // _HEADS_OF_ATTENTION,), 1 / _POINTS)
    classes = COCO if rows == len(COCO) else (None,) * rows
    notes = (", trained on Objects365, whose classes it does not name",) if rows == _OBJECTS365 else ()
    settings = {"detector": family, "model": model, "short_sides": _SIDE}
    return Weights(settings, tensors, classes, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), notes=notes)


def _renamed(theirs: str, tensor: Tensor, family: str) -> list[tuple[str, Tensor]]:
    """Our names for the authors' tensor, and its parts: one, three of an attention's joined projections, or none."""
    if re.search(_LEFT_OUT, theirs):
        return []
    name = theirs
    for pattern, new in _RENAMED:
        name = re.sub(pattern, new.format(**_WORDS[family]) if isinstance(new, str) and "{" in new else new, name)
    if found := re.fullmatch(r"(.*\.self_attn)\.in_proj_(weight|bias)", name):
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return [(f"model.{found[1]}.{letter}_proj.{found[2]}", part) for letter, part in parts]
    if name in ("decoder.up", "decoder.reg_scale"):
        tensor = tensor.float()  # the latter is a whole number there
    return [(f"model.{name}", tensor)]


def _architecture(tensors: dict[str, Tensor], family: str) -> str:
    """The published model with as many decoder layers and channels. Raises `Refused`."""
    layers = sum(bool(re.fullmatch(r"model\.decoder\.class_embed\.\d+\.weight", name)) for name in tensors)
    width = len(tensors["model.encoder_input_proj.0.0.weight"])
    known = {name: of for name, of in ARCHITECTURES.items() if name.startswith(family)}
    for name, of in known.items():
        if (of.get("decoder_layers", 6), of.get("encoder_hidden_dim", 256)) == (layers, width):
            return name
    raise Refused(
        f"a checkpoint of the authors of {family}, with {layers} decoder layers and {width} channels, that is none of "
        f"{', '.join(known)}"
    )
