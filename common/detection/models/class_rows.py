"""Parts of a detector's tensors that are for a class, taken over by the names of the classes."""

from collections.abc import Sequence

from torch import Tensor

from common.training.timm_models import copy_class_rows

# Layers with a row for each class. cls_logits has one for each anchor and class.
_HEADS = {
    "cls_score",
    "bbox_pred",
    "mask_fcn_logits",
    "enc_score_head",
    "class_embed",
    "enc_out_class_embed",
}
_HEADS |= {"cls_logits", "denoising_class_embed"}


def class_rows(tensors: dict[str, Tensor], classes: int) -> dict[str, Tensor]:
    """The tensors of a detector with a part for each class, by name, as views [classes, ...]."""
    views = {}
    for name, tensor in tensors.items():
        layers = set(name.split(".")[-3:-1]) & _HEADS
        if not layers or name.startswith("rpn."):
            continue
        if "cls_logits" in layers and len(tensor) % classes == 0:
            views[name] = tensor.unflatten(0, (-1, classes)).transpose(0, 1)
        elif "denoising_class_embed" in layers:
            views[name] = tensor[:classes]  # the last row is for no class
        elif len(tensor) % classes == 0:
            views[name] = tensor.unflatten(0, (classes, -1))
    return views


def take_classes(
    mine: dict[str, Tensor], theirs: dict[str, Tensor], names: Sequence[str], known: Sequence[str]
) -> list[int]:
    """Copy tensors of `theirs`, of heads the rows of classes in `known`; return the rows that it lacks."""
    head = class_rows(mine, len(names))
    for name in mine.keys() - head.keys():
        mine[name].copy_(theirs[name])
    return copy_class_rows(head, class_rows(theirs, len(known)), names, known)
