"""RF-DETR: a detector whose queries each become one box, on a vision transformer of DINOv2."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import MethodType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from common.detection.models import queries, rf_detr_masks
from common.detection.models.boxes import copy_to_device, disable_autocast
from common.detection.models.detector import Detector
from common.detection.models.detr_architectures import ARCHITECTURES
from common.detection.models.detr_models import (
    build_empty_model,
    describe_models,
    get_auto_class,
    is_timm,
    load_model,
    save_model,
)
from common.detection.models.spec import MASK_FAMILIES, DetectorSpec
from common.errors import Refused

_GAMMA = 2  # of the focal loss, in matching and in the loss


class _Outputs(NamedTuple):
    """Outputs for Q queries: those of the decoder layers, then of the selection, one per group each."""

    logits: Tensor  # [B, O, Q, K]
    boxes: Tensor  # [B, O, Q, 4]
    hidden: Tensor  # [B, O, Q, C] states of the queries
    maps: Tensor  # [B, C, h, w] of the backbone


class RFDETR(Detector):
    """An RF-DETR of transformers.

    Network, matching, losses, initial weights and names of parameters are transformers'. In
    training there are 13 groups of queries, which do not see each other; each selects from the
    feature map by a head of its own, is matched on its own, and counts as one output more. An
    evaluation has the first group.

    Different here: boxes are counted in the global batch; a query in a crowd region is neither
    object nor background; images with fewer cells than queries have fewer queries; there is no
    dropout; stochastic depth is drawn for each image, not for each window; decoder, boxes and
    losses are never in half precision; parameters without a gradient (DINOv2's mask token, layers
    behind the last map) are frozen. Sources: Robinson et al. 2025, "RF-DETR" (arXiv:2511.09554);
    Chen et al. 2024, "LW-DETR" (arXiv:2406.03459); Chen et al. 2022, "Group DETR"
    (arXiv:2207.13085); Cai et al. 2023, "Align-DETR" (arXiv:2304.07527).
    """

    needs_squares = True
    has_masks = False

    def __init__(self, spec: DetectorSpec) -> None:
        super().__init__()
        self.model, self.pretrained_cfg = _build_model(spec)
        self.weights_summary = self.model.weights_summary
        self.config = self.model.config
        self.num_classes = spec.num_classes
        self.seed = spec.seed
        self.num_groups = self.config.group_detr
        self.limit = self.config.num_queries
        self.patch_size = self.config.backbone_config.patch_size
        self.stride = self.patch_size * self.config.backbone_config.num_windows
        self.costs = {"alpha": 0.25, "gamma": _GAMMA}  # of a query with a box
        for name in ("class_cost", "bbox_cost", "giou_cost"):
            self.costs[name] = getattr(self.config, name)
        self.train()

    @property
    def box_model(self) -> nn.Module:
        """RfDetrForObjectDetection."""
        return self.model.model if self.has_masks else self.model

    @property
    def backbone(self) -> nn.Module:
        return self.box_model.model.backbone.backbone

    @property
    def neck(self) -> list[nn.Module]:
        """The projection of the backbone's maps."""
        return [self.box_model.model.backbone.projector]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters without weight decay, as the authors', besides norms and biases."""
        return {name for name, _ in self.named_parameters() if name.endswith("position_embeddings")}

    def count_divisors(self, targets: list[dict], canvas: Sequence[int]) -> Tensor:
        """Count the boxes of these images: int64[1]."""
        return queries.count_objects(targets).sum(0, keepdim=True)

    def compute_terms(
        self,
        images: Tensor,
        targets: list[dict],
        totals: Tensor,
    ) -> dict[str, Tensor]:
        """IoU-aware binary cross-entropy of classes, L1 and generalised IoU of boxes: [B]."""
        config = self.config
        boxes, labels, regions = queries.split_targets(targets, images)
        outputs = self._predict(images)
        logits = outputs.logits
        predicted = outputs.boxes
        with disable_autocast(images):
            padded_targets = queries.pad_targets(boxes, labels)
            mask_losses = None
            mask_costs = None
            if self.has_masks:
                mask_losses = self._prepare_mask_losses(outputs, targets, images.shape[2:])
                mask_costs = mask_losses.compute_costs()
            match = queries.match_queries(
                logits, predicted, padded_targets, more_costs=mask_costs, **self.costs
            )
            counted = (match >= 0) | ~queries.is_in_crowd(predicted, regions)
            pairs = queries.pair_boxes(match, predicted, padded_targets.boxes)
            one_hot = queries.encode_one_hot(match, padded_targets.labels, self.num_classes)
            class_losses = self._compute_class_losses(logits, one_hot, pairs.iou.detach())
            distances = (pairs.predicted - pairs.expected).abs().sum(-1)
            losses = {
                "class": config.class_loss_coefficient * class_losses * counted,
                "box": config.bbox_loss_coefficient * distances,
                "giou": config.giou_loss_coefficient * (1 - pairs.giou),
            }
            sums = {name: values.sum((1, 2)) for name, values in losses.items()}
            if mask_losses:
                sums |= mask_losses.compute_losses(match)
            divisor = (totals[0] * self._num_active_groups).clamp(min=1)
            return {name: values / divisor for name, values in sums.items()}

    def _prepare_mask_losses(
        self,
        outputs: _Outputs,
        targets: list[dict],
        canvas: Sequence[int],
    ) -> rf_detr_masks.MaskLosses:
        num_groups = self._num_active_groups
        factors = rf_detr_masks.compute_queries(self.model, outputs.hidden)
        features = rf_detr_masks.compute_features(self.model, outputs.maps, canvas)
        by_layer = factors.unflatten(1, (-1, num_groups)).flatten(2, 3)
        return rf_detr_masks.MaskLosses(
            rf_detr_masks.MaskFactors(by_layer, torch.stack(features, 1)),
            targets,
            self.seed,
            num_groups,
            self.config,
        )

    def _compute_class_losses(self, logits: Tensor, one_hot: Tensor, iou: Tensor) -> Tensor:
        """[B, O, Q]: cross-entropy; a matched query's goal lies between its score and its IoU."""
        alpha = self.config.focal_alpha
        scores = logits.sigmoid()
        goals = scores.detach() ** alpha * iou[..., None] ** (1 - alpha)
        goals = goals.clamp(min=0.01) * one_hot
        weights = torch.where(one_hot, 1.0, scores**_GAMMA)
        losses = F.binary_cross_entropy_with_logits(logits, goals, reduction="none")
        return (weights * losses).sum(-1)

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """As `queries.select_topk`; boxes may exceed the image."""
        outputs = self._predict(images)
        last = -2 * self._num_active_groups  # of the last decoder layer, the first group
        masks = None
        if self.has_masks:
            with disable_autocast(images):
                masks = rf_detr_masks.predict_masks(
                    self.model, outputs.hidden[:, last], outputs.maps, images.shape[2:]
                )
        return queries.select_topk(outputs.logits[:, last], outputs.boxes[:, last], images, masks)

    def export(self, folder: Path, classes: Sequence[str], side: int) -> None:
        """Write a folder for transformers, see `detr_models.save_model`."""
        # transformers selects that many queries of each group, also on a square with fewer cells.
        num_queries = min(self.config.num_queries, (side // self.patch_size) ** 2)
        whole = build_empty_model(self.config, num_queries, classes, self.has_masks)
        state = dict(self.model.state_dict())
        for name, tensor in state.items():
            if name.endswith(("reference_point_embed.weight", "query_feat.weight")):
                groups = tensor.unflatten(0, (self.num_groups, -1))
                state[name] = groups[:, :num_queries].flatten(0, 1)
        whole.load_state_dict(state)
        save_model(whole, self.pretrained_cfg, folder, side)

    @property
    def _num_active_groups(self) -> int:
        return self.num_groups if self.training else 1

    def _predict(self, images: Tensor) -> _Outputs:
        maps = self.neck[0](self.backbone(images).feature_maps)
        with disable_autocast(images):
            return self._decode(maps.to(images.dtype))

    def _decode(self, maps: Tensor) -> _Outputs:
        """As `RfDetrForObjectDetection`, which waits for the device and needs as many cells as queries."""
        from transformers.models.rf_detr.modeling_rf_detr import refine_bboxes

        model = self.box_model.model
        num_groups = self._num_active_groups
        num_images, _, height, width = maps.shape
        num_queries = min(self.config.num_queries, height * width)
        memory = maps.flatten(2).transpose(1, 2)  # [B, cells, C]
        padding = memory.new_zeros(memory.shape[:2], dtype=torch.bool)
        proposals = model.gen_encoder_output_proposals(memory, padding, [(height, width)])
        selected = []
        logits = []
        references = []
        boxes = []
        for group in range(num_groups):
            features, group_references, group_boxes = model.generate_topk_proposals(
                group, *proposals, num_queries
            )
            selected.append(features)
            logits.append(model.enc_out_class_embed[group](features))
            references.append(group_references)
            boxes.append(group_boxes)

        offsets = self._select_queries(model.reference_point_embed, num_queries)
        embeds = self._select_queries(model.query_feat, num_queries)
        initial_references = refine_bboxes(torch.cat(references, 1), offsets)
        shapes = copy_to_device(torch.tensor([[height, width], [0, 0]]), maps.device)
        decoded = model.decoder(
            inputs_embeds=embeds.expand(num_images, -1, -1),
            reference_points=initial_references,
            spatial_shapes=shapes[:1],
            spatial_shapes_list=[(height, width)],
            level_start_index=shapes[1, :1],
            valid_ratios=memory.new_ones(num_images, 1, 2),
            encoder_hidden_states=memory,
        )
        hidden = decoded.intermediate_hidden_states
        decoder_logits, decoder_boxes = self.box_model.predict_class_and_boxes(
            hidden, initial_references
        )
        return _Outputs(
            logits=_concat_outputs(decoder_logits, logits),
            boxes=_concat_outputs(decoder_boxes, boxes),
            hidden=_concat_outputs(hidden, selected),
            maps=maps,
        )

    def _select_queries(self, embedding: nn.Embedding, num_queries: int) -> Tensor:
        """The first `num_queries` of each active group: [groups x queries, C]."""
        groups = embedding.weight.unflatten(0, (self.num_groups, -1))
        return groups[: self._num_active_groups, :num_queries].flatten(0, 1)


class RFDETRSeg(RFDETR):
    """RF-DETR with a mask for each query. Targets need masks, uint8[n, H, W] on the canvas.

    Masks are matched, too. Different from transformers: see `rf_detr_masks.MaskLosses`.
    """

    has_masks = True


def _concat_outputs(decoded: Tensor, selected: list[Tensor]) -> Tensor:
    """Of layers [layers, B, groups x Q, ...] and of each group [B, Q, ...] -> [B, outputs, Q, ...]."""
    by_group = decoded.unflatten(2, (len(selected), -1)).transpose(1, 2).flatten(0, 1)
    return torch.cat([by_group, torch.stack(selected)]).transpose(0, 1)


def _build_model(spec: DetectorSpec) -> tuple[nn.Module, dict]:
    """Build a model of transformers, and mean and std of its images; see `detr_models.load_model`."""
    if spec.model not in ARCHITECTURES and is_timm(spec.model):
        raise Refused(
            f"--model {spec.model}: --detector {spec.family} has a backbone of its own; "
            f"{describe_models(spec.family)}"
        )
    return load_model(
        spec,
        build=partial(_build_untrained, spec.family in MASK_FAMILIES),
        prepare=partial(_prepare, drop_path=spec.drop_path),
    )


def _build_untrained(has_masks: bool, config, seed: int) -> nn.Module:
    """Build a model that leaves every selected box as it is until something is learnt."""
    torch.manual_seed(seed + 1)
    whole = get_auto_class(has_masks).from_config(config)
    nn.init.zeros_(_get_base_model(whole).reference_point_embed.weight)
    return whole


def _get_base_model(whole: nn.Module) -> nn.Module:
    """RfDetrModel, without heads."""
    model = whole.model
    return getattr(model, "model", model)  # with masks there is one more around it


def _prepare(whole: nn.Module, drop_path: float) -> nn.Module:
    """Freeze what gets no gradient; make positions and stochastic depth independent of the layout."""
    backbone = _get_base_model(whole).backbone.backbone
    embeddings = backbone.embeddings
    layers = backbone.encoder.layer
    if embeddings.mask_token is not None:
        embeddings.mask_token.requires_grad_(False)  # masks patches in DINOv2's own training
    num_used = max(whole.config.backbone_config.out_indices)
    layers[num_used:].requires_grad_(False)  # base has one after the last map
    embeddings.interpolate_pos_encoding = MethodType(_interpolate_positions, embeddings)
    # Linear in depth, as the authors set it; transformers would drop windows, equally often in all
    # layers.
    rates = torch.linspace(0, drop_path, len(layers)).tolist()
    for layer, rate in zip(layers, rates, strict=True):
        layer.drop_path = DropPath(rate)
    return whole


def _interpolate_positions(
    embeddings: nn.Module,
    tokens: Tensor,
    height: int,
    width: int,
) -> Tensor:
    """Position embeddings [1, 1 + patches, C] of images of (height, width) pixels.

    In training by products of matrices, in the model's precision; in an evaluation by transformers,
    in float32: rounding can change the order of the selected queries.
    """
    trained = embeddings.position_embeddings
    patch_size = embeddings.patch_size
    side = math.isqrt(trained.shape[1] - 1)
    is_trained_size = height == width == side * patch_size
    if not torch.is_grad_enabled() or is_trained_size:
        return type(embeddings).interpolate_pos_encoding(embeddings, tokens, height, width)
    grid = trained[0, 1:].unflatten(0, (side, side))  # [side, side, C]
    with disable_autocast(trained):
        rows = _compute_resampling_weights(side, height // patch_size, like=trained)
        columns = _compute_resampling_weights(side, width // patch_size, like=trained)
        grid = torch.einsum("ay,bx,yxc->abc", rows, columns, grid)
    return torch.cat([trained[:, :1], grid.flatten(0, 1)[None]], 1)


def _compute_resampling_weights(old_size: int, new_size: int, like: Tensor) -> Tensor:
    """[new, old]: the weight of each old position in an interpolation to the new ones."""
    identity = torch.eye(old_size, device=like.device, dtype=like.dtype)[None, None]
    weights = F.interpolate(
        identity, size=(new_size, old_size), mode="bicubic", align_corners=False, antialias=True
    )
    return weights[0, 0]
