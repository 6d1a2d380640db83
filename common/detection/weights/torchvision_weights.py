"""Weights of torchvision's detectors: published ones by name, and files with a state dict."""

import urllib.error
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models import get_model_builder, get_model_weights

from common.config.parsing import suggest_names
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
_NUM_CATEGORIES = 91  # COCO's, with the background and ten ids without a class
# Tensors that tell the models apart, in this order -> a name of `SETTINGS`, without its version.
_MODEL_BY_TENSOR = {
    "roi_heads.mask_predictor.mask_fcn_logits.weight": "maskrcnn_resnet50_fpn",
    "roi_heads.box_predictor.cls_score.weight": "fasterrcnn_resnet50_fpn",
    "head.regression_head.bbox_ctrness.weight": "fcos_resnet50_fpn",
    "head.classification_head.cls_logits.weight": "retinanet_resnet50_fpn",
}
_V2_TENSORS = {"rpn.head.conv.1.0.weight", "head.classification_head.conv.0.1.weight"}


def parse_name(source: str) -> str:
    """Return the model's name in `torchvision:NAME`. Raises `Refused` if no family matches it."""
    name = source.removeprefix(PREFIX)
    if name in SETTINGS:
        return name
    problem = "no detector of torchvision that a family of --detector matches"
    sources = ", ".join(PREFIX + name for name in SETTINGS)
    raise Refused(f"{source}: {problem}{suggest_names(name, SETTINGS)}; there are {sources}")


def describe_published(name: str) -> Weights:
    """Return the published weights of `name` without their tensors, which are not read."""
    return Weights(SETTINGS[name] | _COMMON, {}, _get_coco_classes(name))


def download_file(name: str) -> Path:
    """Return the file of published weights in torch.hub's cache; download it if it is not there.

    Raises `Refused`.
    """
    url = get_model_weights(name).DEFAULT.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / _get_file_name(name)
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


def convert_weights(state: dict[str, Tensor], path: Path, is_published: bool) -> Weights | None:
    """Convert a state dict from the file `path`; None if it is of no detector of torchvision.

    `is_published` (else the file's name says it) matters for frozen batch norm: torchvision's
    published one has no epsilon, so variances become smaller by ours. Raises `Refused` for another
    detector.
    """
    base_names = [model for tensor, model in _MODEL_BY_TENSOR.items() if tensor in state]
    if not base_names:
        return None
    name = base_names[0]
    num_rows = _count_class_rows(state, name)
    if _V2_TENSORS & state.keys():
        name += "_v2"
    model_state = _load_into_model(state, name, num_rows, path)
    tensors = {}
    for tensor_name, tensor in model_state.items():
        tensors[tensor_name.replace("backbone.body.", "backbone.features.")] = tensor
    notes: tuple[str, ...] = ()
    is_frozen = not any(tensor_name.endswith("num_batches_tracked") for tensor_name in state)
    if name in _WITHOUT_EPSILON and is_frozen:
        if is_published or path.name == _get_file_name(name):
            _subtract_epsilon(tensors)
        else:
            notes = (
                f", batch norm with an epsilon of {_EPSILON:g}: if they were fine-tuned from "
                f"torchvision's published weights, which have none, name them {PREFIX}{name}=FILE",
            )
    classes: tuple[str | None, ...] = (None,) * num_rows
    if num_rows == _NUM_CATEGORIES:
        classes = _get_coco_classes(name)
    return Weights(
        settings=SETTINGS[name] | _COMMON,
        tensors=tensors,
        classes=classes,
        notes=notes,
        score_threshold=0.2 if name.startswith("fcos") else None,
    )


def _count_class_rows(state: dict[str, Tensor], name: str) -> int:
    """Count the rows for classes in the head of a model."""
    if "rcnn" in name:
        return len(state["roi_heads.box_predictor.cls_score.weight"])
    num_logits = len(state["head.classification_head.cls_logits.weight"])
    return num_logits // 9 if name.startswith("retinanet") else num_logits


def _load_into_model(
    state: dict[str, Tensor],
    name: str,
    num_rows: int,
    path: Path,
) -> dict[str, Tensor]:
    """Return `state` as torchvision's model loads it, which knows names of older versions."""
    with torch.device("meta"):
        model = get_model_builder(name)(weights=None, weights_backbone=None, num_classes=num_rows)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).splitlines()[1].split())
        raise Refused(f"{path}: not of {name}, which it resembles: {reason:.200}") from None
    return model.state_dict()


def _subtract_epsilon(tensors: dict[str, Tensor]) -> None:
    """Make variances of batch norm smaller, in place, as if its epsilon were part of them."""
    for name, tensor in tensors.items():
        if name.endswith("running_var"):
            tensors[name] = (tensor.double() - _EPSILON).to(tensor.dtype)


def _get_file_name(name: str) -> str:
    return get_model_weights(name).DEFAULT.url.rpartition("/")[2]


def _get_coco_classes(name: str) -> tuple[str | None, ...]:
    """Return the names of COCO's 91 ids: None for the background and for ids without a class."""
    categories = get_model_weights(name).DEFAULT.meta["categories"]
    unused = ("__background__", "N/A")
    return tuple(None if category in unused else category for category in categories)
