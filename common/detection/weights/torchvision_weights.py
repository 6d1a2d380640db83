"""Weights of torchvision's detectors: published ones by name, and files with a state dict."""

import urllib.error
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models import get_model_builder, get_model_weights

from common.config.parsing import nearest
from common.detection.weights.weights import Weights
from common.errors import Refused

PREFIX = "torchvision:"
_ONE_STAGE = {"levels": "3-7", "convolutions": 4}
# Published models that our families match tensor by tensor -> our flags.
SETTINGS: dict[str, dict] = {
    "fcos_resnet50_fpn": {"detector": "fcos", "variant": "torchvision", **_ONE_STAGE},
    "retinanet_resnet50_fpn": {"detector": "retinanet", "variant": "torchvision", **_ONE_STAGE},
    "retinanet_resnet50_fpn_v2": {
        "detector": "retinanet",
        "variant": "torchvision_v2",
        **_ONE_STAGE,
    },
    "fasterrcnn_resnet50_fpn": {
        "detector": "faster_rcnn",
        "variant": "torchvision",
        "levels": "2-6",
    },
    "fasterrcnn_resnet50_fpn_v2": {
        "detector": "faster_rcnn",
        "variant": "torchvision_v2",
        "levels": "2-6",
    },
    "maskrcnn_resnet50_fpn": {"detector": "mask_rcnn", "variant": "torchvision", "levels": "2-6"},
    "maskrcnn_resnet50_fpn_v2": {
        "detector": "mask_rcnn",
        "variant": "torchvision_v2",
        "levels": "2-6",
    },
}
_COMMON = {
    "model": "resnet50",
    "width": 256,
    "batch_norm": "frozen",
    "short_sides": "800",
    "long_side": 1333,
}
# Published before torchvision's frozen batch norm had an epsilon.
_WITHOUT_EPSILON = ("retinanet_resnet50_fpn", "fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn")
_EPSILON = 1e-5  # of our batch norm
_CATEGORIES = 91  # COCO's, with the background and ten ids without a class
# Tensors that tell the models apart, in this order -> a name of `SETTINGS`, without its version.
_SIGNS = {
    "roi_heads.mask_predictor.mask_fcn_logits.weight": "maskrcnn_resnet50_fpn",
    "roi_heads.box_predictor.cls_score.weight": "fasterrcnn_resnet50_fpn",
    "head.regression_head.bbox_ctrness.weight": "fcos_resnet50_fpn",
    "head.classification_head.cls_logits.weight": "retinanet_resnet50_fpn",
}
_SIGNS_OF_SECOND = {"rpn.head.conv.1.0.weight", "head.classification_head.conv.0.1.weight"}
_LOGITS = ("roi_heads.box_predictor.cls_score.weight", "head.classification_head.cls_logits.weight")


def published(source: str) -> str:
    """The model's name in `torchvision:NAME`. Raises `Refused` for one that no family matches."""
    name = source.removeprefix(PREFIX)
    if name in SETTINGS:
        return name
    why = f"no detector of torchvision that a family of --detector matches{nearest(name, SETTINGS)}"
    raise Refused(f"{source}: {why}; there are {', '.join(PREFIX + name for name in SETTINGS)}")


def peek(name: str) -> Weights:
    """The published weights of `name` without their tensors, which are not read."""
    return Weights(SETTINGS[name] | _COMMON, {}, _coco_classes(name))


def file_of(name: str) -> Path:
    """The file of published weights in torch.hub's cache, downloaded if needed. Raises `Refused`."""
    url, path = (
        get_model_weights(name).DEFAULT.url,
        Path(torch.hub.get_dir()) / "checkpoints" / _file_name(name),
    )
    if not path.exists():
        try:
            torch.hub.load_state_dict_from_url(
                url, progress=False, check_hash=True, weights_only=True
            )
        except (OSError, RuntimeError, urllib.error.URLError) as error:
            raise Refused(
                f"{PREFIX}{name}: can't be downloaded ({error}); fetch {url} on a machine with a "
                f"network, and name the file or copy it to {path.parent}"
            ) from None
    return path


def convert(state: dict[str, Tensor], path: Path, is_published: bool) -> Weights | None:
    """The weights in a state dict from the file `path`; None if it is of no detector of torchvision.

    `is_published` (else the file's name says it) matters for frozen batch norm: torchvision's
    published one has no epsilon, so variances become smaller by ours. Raises `Refused` for another
    detector.
    """
    sign = next((name for sign, name in _SIGNS.items() if sign in state), None)
    if sign is None:
        return None
    name = sign + "_v2" * bool(_SIGNS_OF_SECOND & state.keys())
    rows = len(next(state[key] for key in _LOGITS if key in state)) // (
        9 if sign.startswith("retinanet") else 1
    )
    with torch.device("meta"):
        model = get_model_builder(name)(weights=None, weights_backbone=None, num_classes=rows)
    try:  # torchvision's own loading knows the names that its older versions had
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).splitlines()[1].split())
        raise Refused(f"{path}: not of {name}, which it resembles: {reason:.200}") from None
    tensors = {
        key.replace("backbone.body.", "backbone.features."): each
        for key, each in model.state_dict().items()
    }
    notes: tuple[str, ...] = ()
    is_frozen = not any(key.endswith("num_batches_tracked") for key in state)
    if name in _WITHOUT_EPSILON and is_frozen:
        if is_published or path.name == _file_name(name):
            for key in [key for key in tensors if key.endswith("running_var")]:
                tensors[key] = (tensors[key].double() - _EPSILON).to(tensors[key].dtype)
        else:
            notes = (
                f", batch norm with an epsilon of {_EPSILON:g}: if they were fine-tuned from "
                f"torchvision's published weights, which have none, name them {PREFIX}{name}=FILE",
            )
    classes = _coco_classes(name) if rows == _CATEGORIES else (None,) * rows
    threshold = 0.2 if name.startswith("fcos") else None
    return Weights(
        SETTINGS[name] | _COMMON, tensors, classes, notes=notes, score_threshold=threshold
    )


def _file_name(name: str) -> str:
    return get_model_weights(name).DEFAULT.url.rpartition("/")[2]


def _coco_classes(name: str) -> tuple[str | None, ...]:
    """Names of COCO's 91 ids: None for the background and for ids without a class."""
    categories = get_model_weights(name).DEFAULT.meta["categories"]
    return tuple(
        None if category in ("__background__", "N/A") else category for category in categories
    )
