"""RF-DETR: a detector whose queries each become one box, on a vision transformer of DINOv2."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from common.detection.models import queries
from common.detection.models.boxes import full_precision, to_device
from common.detection.models.detector import Detector
from common.detection.models.detr_architectures import ARCHITECTURES
from common.detection.models.detr_models import (
    empty_model,
    import_transformers,
    is_timm,
    known_models,
    load,
    save_model,
)
from common.detection.models.spec import DetectorSpec
from common.errors import Refused

_GAMMA = 2  # of the focal loss, in matching and in the loss


class RFDETR(Detector):
    """An RF-DETR of transformers.

    Network, matching, losses, initial weights and names of parameters are transformers'. In
    training there are 13 groups of queries, which do not see each other; each selects from the
    feature map by a head of its own, is matched on its own, and counts as one output more. An
    evaluation has the first group.

    Different here: boxes are counted in the global batch; a query in a crowd region is neither
    object nor background; images with fewer places than queries have fewer queries; there is no
    dropout; stochastic depth is drawn for each image, not for each window; decoder, boxes and
    losses are never in half precision; parameters without a gradient (DINOv2's mask token, layers
    behind the last map) are frozen. Sources: Robinson et al. 2025, "RF-DETR" (arXiv:2511.09554);
    Chen et al. 2024, "LW-DETR" (arXiv:2406.03459); Chen et al. 2022, "Group DETR"
    (arXiv:2207.13085); Cai et al. 2023, "Align-DETR" (arXiv:2304.07527).
    """

    needs_squares = True

    def __init__(self, spec: DetectorSpec) -> None:
        super().__init__()
        self.model, self.pretrained_cfg = _build_model(spec)
        self.config, self.begins_with = self.model.config, self.model.begins_with
        self.classes, self.groups = spec.classes, self.config.group_detr
        self.limit = self.config.num_queries
        self.patch = self.config.backbone_config.patch_size
        self.stride = self.patch * self.config.backbone_config.num_windows
        costs = {
            name: getattr(self.config, name) for name in ("class_cost", "bbox_cost", "giou_cost")
        }
        self.costs = {"alpha": 0.25, "gamma": _GAMMA, **costs}  # of a query with a box
        self.train()

    @property
    def backbone(self) -> nn.Module:
        return self.model.model.backbone.backbone

    @property
    def neck(self) -> list[nn.Module]:
        """The projection of the backbone's maps."""
        return [self.model.model.backbone.projector]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay, as the authors', besides norms and biases."""
        return {name for name, _ in self.named_parameters() if name.endswith("position_embeddings")}

    def counts(self, targets: list[dict], canvas: Sequence[int]) -> Tensor:
        """int64[1]: boxes of these images."""
        return torch.stack([(~target["crowd"]).sum() for target in targets]).sum(0, keepdim=True)

    def compute_terms(
        self, images: Tensor, targets: list[dict], totals: Tensor
    ) -> dict[str, Tensor]:
        """IoU-aware binary cross-entropy of classes, L1 and generalised IoU of boxes: [B]."""
        config, alpha = self.config, self.config.focal_alpha
        boxes, labels, regions = queries.split_targets(targets, images)
        logits, found = self._predict(images)
        with full_precision(images):
            wanted, ids = queries.padded(boxes, 0), queries.padded(labels, 0)
            match = queries.match(logits, found, wanted, ids, [*map(len, labels)], **self.costs)
            counted = (match >= 0) | ~queries.in_crowds(found, regions)
            found, wanted, overlap, generalised = queries.pair(match, found, wanted)
            hit, scores = queries.hits(match, ids, self.classes), logits.sigmoid()
            goal = scores.detach() ** alpha * overlap.detach()[..., None] ** (1 - alpha)
            goal = goal.clamp(min=0.01) * hit
            weight = torch.where(hit, 1.0, scores**_GAMMA)
            classification = weight * F.binary_cross_entropy_with_logits(
                logits, goal, reduction="none"
            )
            sums = {
                "class": config.class_loss_coefficient * classification.sum(-1) * counted,
                "box": config.bbox_loss_coefficient * (found - wanted).abs().sum(-1),
                "giou": config.giou_loss_coefficient * (1 - generalised),
            }
            divisor = (totals[0] * self._groups).clamp(min=1)
            return {name: values.sum((1, 2)) / divisor for name, values in sums.items()}

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """As `queries.best_pairs`; boxes may exceed the image."""
        logits, boxes = self._predict(images)
        last = -2 * self._groups  # of the last decoder layer, the first group
        return queries.best_pairs(logits[:, last], boxes[:, last], images)

    def export(self, folder: Path, classes: Sequence[str], side: int) -> None:
        """Write a folder for transformers, see `detr_models.save_model`."""
        # transformers selects that many queries of each group, also on a square with fewer places.
        count = min(self.config.num_queries, (side // self.patch) ** 2)
        whole, tensors = empty_model(self.config, count, classes), dict(self.model.state_dict())
        for name in ("model.reference_point_embed.weight", "model.query_feat.weight"):
            tensors[name] = tensors[name].unflatten(0, (self.groups, -1))[:, :count].flatten(0, 1)
        whole.load_state_dict(tensors)
        save_model(whole, self.pretrained_cfg, folder, side)

    @property
    def _groups(self) -> int:
        return self.groups if self.training else 1

    def _predict(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, O, Q, K] and boxes [B, O, Q, 4]: of decoder layers, then of the selection, one
        per group.
        """
        maps = self.model.model.backbone.projector(self.backbone(images).feature_maps)
        with full_precision(images):
            return self._decode(maps.to(images.dtype))

    def _decode(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """As `RfDetrForObjectDetection`, which waits for the device and needs as many places as queries."""
        from transformers.models.rf_detr.modeling_rf_detr import refine_bboxes

        whole, model, groups = self.model, self.model.model, self._groups
        count, shape = len(maps), tuple(maps.shape[2:])
        number = min(self.config.num_queries, shape[0] * shape[1])
        memory = maps.flatten(2).transpose(1, 2)  # [B, places, C]
        padding = memory.new_zeros(memory.shape[:2], dtype=torch.bool)
        proposals = model.gen_encoder_output_proposals(memory, padding, [shape])
        selected = [
            model.generate_topk_proposals(group, *proposals, number) for group in range(groups)
        ]
        features, references, boxes = zip(*selected, strict=True)  # of each group
        scores = tuple(
            head(x) for head, x in zip(model.enc_out_class_embed, features, strict=False)
        )

        offsets, content = (
            embedding.weight.unflatten(0, (self.groups, -1))[:groups, :number].flatten(0, 1)
            for embedding in (model.reference_point_embed, model.query_feat)
        )
        references = refine_bboxes(torch.cat(references, 1), offsets)
        sizes = to_device(torch.tensor([[*shape], [0, 0]]), maps.device)
        hidden = model.decoder(
            inputs_embeds=content.expand(count, -1, -1),
            reference_points=references,
            spatial_shapes=sizes[:1],
            spatial_shapes_list=[shape],
            level_start_index=sizes[1, :1],
            valid_ratios=memory.new_ones(count, 1, 2),
            encoder_hidden_states=memory,
        ).intermediate_hidden_states
        # [layers, B, groups x Q, _] -> [layers x groups, B, Q, _]
        decoded = (
            x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)
            for x in whole.predict_class_and_boxes(hidden, references)
        )
        logits, found = (
            torch.cat([x, torch.stack(own)]).transpose(0, 1)
            for x, own in zip(decoded, (scores, boxes), strict=True)
        )
        return logits, found


def _build_model(spec: DetectorSpec) -> tuple[nn.Module, dict]:
    """RfDetrForObjectDetection, and the mean and std of its images; see `detr_models.load`."""
    if spec.model not in ARCHITECTURES and is_timm(spec.model):
        raise Refused(
            f"--model {spec.model}: --detector rf_detr has a backbone of its own; "
            f"{known_models('rf_detr')}"
        )
    return load(spec, _fresh, partial(_prepared, drop_path=spec.drop_path))


def _fresh(config, seed: int) -> nn.Module:
    """A model without weights: every selected box stays as it is until something is learnt."""
    torch.manual_seed(seed + 1)
    whole = import_transformers().AutoModelForObjectDetection.from_config(config)
    nn.init.zeros_(whole.model.reference_point_embed.weight)
    return whole


def _prepared(whole: nn.Module, drop_path: float) -> nn.Module:
    """Freeze what gets no gradient; make positions and stochastic depth independent of the layout."""
    backbone, config = whole.model.backbone.backbone, whole.config.backbone_config
    embeddings, layers = backbone.embeddings, backbone.encoder.layer
    if embeddings.mask_token is not None:
        embeddings.mask_token.requires_grad_(False)  # masks patches in DINOv2's own training
    layers[max(config.out_indices) :].requires_grad_(False)  # base has one after the last map
    embeddings.interpolate_pos_encoding = MethodType(_positions, embeddings)
    # Linear in depth, as the authors set it; transformers would drop windows, equally often in all
    # layers.
    for layer, rate in zip(layers, torch.linspace(0, drop_path, len(layers)).tolist(), strict=True):
        layer.drop_path = DropPath(rate)
    return whole


def _positions(embeddings: nn.Module, tokens: Tensor, height: int, width: int) -> Tensor:
    """Position embeddings [1, 1 + patches, C] of images of (height, width) pixels.

    In training by products of matrices, in the model's precision; in an evaluation by transformers,
    in float32: rounding can change the order of the selected queries.
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
    """[new, old]: the weight of each of `old` places in an interpolation to `new` places."""
    unit = torch.eye(old, device=like.device, dtype=like.dtype)[None, None]
    return F.interpolate(
        unit, size=(new, old), mode="bicubic", align_corners=False, antialias=True
    )[0, 0]
