"""Building an RF-DETR of transformers from its name."""

import math
from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from common.detection.models.detr_architectures import ARCHITECTURES
from common.detection.models.detr_models import import_transformers, is_timm, known_models, load
from common.detection.models.spec import DetectorSpec
from common.errors import Refused


def build_model(spec: DetectorSpec) -> tuple[nn.Module, dict]:
    """RfDetrForObjectDetection, and the mean and std of the images it was trained on; see `detr_models.load`."""
    if spec.model not in ARCHITECTURES and is_timm(spec.model):
        raise Refused(f"--model {spec.model}: --detector rf_detr has a backbone of its own; {known_models('rf_detr')}")
    return load(spec, _fresh, partial(_made_exact, drop_path=spec.drop_path))


def _fresh(config, seed: int) -> nn.Module:
    """A model without weights: every selected box stays as it is until something is learnt."""
    torch.manual_seed(seed + 1)
    whole = import_transformers().AutoModelForObjectDetection.from_config(config)
    nn.init.zeros_(whole.model.reference_point_embed.weight)
    return whole


def _made_exact(whole: nn.Module, drop_path: float) -> nn.Module:
    """Freeze what gets no gradient, and let neither float32 nor stochastic depth make the layout matter."""
    backbone, config = whole.model.backbone.backbone, whole.config.backbone_config
    embeddings, layers = backbone.embeddings, backbone.encoder.layer
    if embeddings.mask_token is not None:
        embeddings.mask_token.requires_grad_(False)  # masks patches in DINOv2's own training
    layers[max(config.out_indices) :].requires_grad_(False)  # base has one after the last map
    embeddings.interpolate_pos_encoding = MethodType(_positions, embeddings)
    # Linear in depth, as the authors set it. transformers would drop a window at a time, equally often in all layers.
    for layer, rate in zip(layers, torch.linspace(0, drop_path, len(layers)).tolist(), strict=True):
        layer.drop_path = DropPath(rate)
    return whole


def _positions(embeddings: nn.Module, tokens: Tensor, height: int, width: int) -> Tensor:
    """Position embeddings [1, 1 + patches, C] of images of (height, width) pixels, resampled from the trained grid.

    In training a product of matrices: transformers' own interpolates in float32 whatever the
    precision of the run, and its backward pass adds in a varying order on a GPU. In an evaluation
    its own, to the last bit: rounding can change the order of the selected queries, and thereby
    what they become.
    """
    trained, patch = embeddings.position_embeddings, embeddings.patch_size
    side = math.isqrt(trained.shape[1] - 1)
    if not torch.is_grad_enabled() or (height, width) == (side * patch, side * patch):
        return type(embeddings).interpolate_pos_encoding(embeddings, tokens, height, width)
    grid = trained[0, 1:].unflatten(0, (side, side))  # [side, side, C]
    with torch.autocast(trained.device.type, enabled=False):
        rows, columns = (_resampling(side, length // patch, trained) for length in (height, width))
        grid = torch.einsum("ay,bx,yxc->abc", rows, columns, grid)
    return torch.cat([trained[:, :1], grid.flatten(0, 1)[None]], 1)


def _resampling(old: int, new: int, like: Tensor) -> Tensor:
    """[new, old]: what interpolation to `new` places takes from each of `old` places."""
    unit = torch.eye(old, device=like.device, dtype=like.dtype)[None, None]
    return F.interpolate(unit, size=(new, old), mode="bicubic", align_corners=False, antialias=True)[0, 0]
