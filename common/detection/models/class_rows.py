"""Rows of a detector's tensors that are for one class each, copied by the names of the classes."""

from collections.abc import Sequence

from torch import Tensor

from common.training.timm_models import copy_class_rows

# Layers with a row for each class. cls_logits has one for each anchor and class.
_CLASS_LAYERS = {
    "bbox_pred",
    "class_embed",
    "cls_logits",
    "cls_score",
    "denoising_class_embed",
    "enc_out_class_embed",
    "enc_score_head",
    "mask_fcn_logits",
}


def view_class_rows(tensors: dict[str, Tensor], num_classes: int) -> dict[str, Tensor]:
    """View the tensors of a detector that have rows for classes as [num_classes, ...], by name."""
    views = {}
    for name, tensor in tensors.items():
        layers = set(name.split(".")[-3:-1]) & _CLASS_LAYERS
        if not layers or name.startswith("rpn."):
            continue
        if "cls_logits" in layers and len(tensor) % num_classes == 0:
            views[name] = tensor.unflatten(0, (-1, num_classes)).transpose(0, 1)
        elif "denoising_class_embed" in layers:
            views[name] = tensor[:num_classes]  # the last row is for no class
        elif len(tensor) % num_classes == 0:
            views[name] = tensor.unflatten(0, (num_classes, -1))
    return views


def copy_tensors(
    target: dict[str, Tensor],
    source: dict[str, Tensor],
    target_names: Sequence[str],
    source_names: Sequence[str],
) -> list[int]:
    """Copy the tensors of `source` into `target`, rows for classes by the names of the classes.

    Returns the indices of rows of `target` whose classes `source` lacks; they stay as they are.
    """
    class_rows = view_class_rows(target, len(target_names))
    for name in target.keys() - class_rows.keys():
        target[name].copy_(source[name])
    source_rows = view_class_rows(source, len(source_names))
    return copy_class_rows(class_rows, source_rows, target_names, source_names)
