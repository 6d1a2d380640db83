"""Masks of RF-DETR: the mask of a query is its product with a feature map of the image.

In training, products are computed at random points only, where the masks of objects are looked up.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.detection.models import queries
from common.detection.models.anchors import draw_integers
from common.detection.models.boxes import copy_to_device
from common.randomness import key_of, mix

_OVERSAMPLING = 3  # candidates for each point of a loss
_UNCERTAIN_SHARE = 0.75  # of the points; the others are drawn anywhere
_RESOLUTION = 2**24  # of random coordinates, which are exact in single precision


class MaskFactors(NamedTuple):
    """Factors of masks, for L outputs of G groups with Q queries each.

    The last channel has the bias, and ones: so also the bias is interpolated in the way of a mask.
    """

    queries: Tensor  # [B, L, G * Q, C + 1]
    features: Tensor  # [B, L, C + 1, h, w]


def compute_features(head: nn.Module, maps: Tensor, canvas: Sequence[int]) -> list[Tensor]:
    """Features [B, C + 1, h, w] of each decoder layer, and last of the selected queries.

    Args:
        head: RfDetrForInstanceSegmentation.
        maps: [B, C, H / stride, W / stride] of the backbone.
        canvas: H, W in pixels.
    """
    height, width = canvas
    ratio = head.downsample_ratio
    size = (height // ratio, width // ratio)
    x = F.interpolate(maps, size=size, mode="bilinear", align_corners=False)
    selection = x  # without blocks and projection, as in the source
    features = []
    for block in head.blocks:
        x = block(x)
        features.append(head.spatial_features_proj(x))
    features.append(selection)
    return [F.pad(x, (0, 0, 0, 0, 0, 1), value=1) for x in features]


def compute_queries(head: nn.Module, hidden: Tensor) -> Tensor:
    """The factors [..., C + 1] of queries with hidden states [..., C]."""
    x = head.query_features_proj(head.query_features_block(hidden))
    return torch.cat([x, head.segmentation_bias.expand(*x.shape[:-1], 1)], -1)


def predict_masks(head: nn.Module, hidden: Tensor, maps: Tensor, canvas: Sequence[int]) -> Tensor:
    """Mask logits [B, Q, h, w] of the last decoder layer's queries, of hidden states [B, Q, C]."""
    features = compute_features(head, maps, canvas)[-2]
    masks = compute_queries(head, hidden) @ features.flatten(2)
    return masks.unflatten(2, features.shape[2:])


class MaskLosses:
    """Costs of matching masks, and their losses, for one batch.

    Different from transformers, the points of an image are functions of its position in the stream;
    those of the costs are as many as the authors draw, a share of a mask's cells, where
    transformers has a number that depends on the batch. Source: Robinson et al. 2025, "RF-DETR"
    (arXiv:2511.09554); of the points Kirillov et al. 2020, "PointRend" (arXiv:1912.08193).
    """

    def __init__(
        self, factors: MaskFactors, targets: list[dict], seed: int, num_groups: int, config: Any
    ) -> None:
        """Args:
        targets: with masks uint8[n, H, W] on the canvas.
        config: of transformers.
        """
        self._factors = factors
        self._positions = [target["position"] for target in targets]
        self._seed = seed
        self._num_groups = num_groups
        self._config = config
        self._masks = []
        for target in targets:
            objects, _ = queries.split_indices(target)
            index = torch.tensor(objects, dtype=torch.int64)
            masks = target["masks"]
            self._masks.append(masks[copy_to_device(index, masks.device)])

    @torch.no_grad()
    def compute_costs(self) -> Tensor:
        """[B, O, Q, n]: the weighted costs of each query's mask for each object, padded with zeros."""
        max_objects = max(len(masks) for masks in self._masks)
        costs = []
        for i, masks in enumerate(self._masks):
            image_costs = self._compute_image_costs(i)
            costs.append(F.pad(image_costs, (0, max_objects - len(masks))))
        by_group = torch.stack(costs).unflatten(2, (self._num_groups, -1))
        return by_group.flatten(1, 2)

    def _compute_image_costs(self, i: int) -> Tensor:
        """[L, G * Q, n]: the weighted costs of an image, at points that its queries share."""
        features = self._factors.features[i]  # [L, C + 1, h, w]
        masks = self._masks[i]
        num_outputs, _, height, width = features.shape
        num_points = height * width // self._config.mask_point_sample_ratio
        points = self._draw_points(i, "costs", (num_outputs, num_points))
        logits = self._factors.queries[i] @ _interpolate(features, points)  # [L, G * Q, P]
        mask_ids = torch.arange(len(masks), device=masks.device)[:, None]
        expected = _look_up(masks, mask_ids, points[:, None])  # [L, n, P]
        expected = expected.transpose(1, 2)
        overlap = logits @ expected
        cross_entropy = (F.softplus(logits).sum(-1, keepdim=True) - overlap) / num_points
        scores = logits.sigmoid()
        sizes = scores.sum(-1, keepdim=True) + expected.sum(1, keepdim=True)
        dice = 1 - (2 * (scores @ expected) + 1) / (sizes + 1)
        config = self._config
        weighted = config.mask_class_loss_coefficient * cross_entropy
        return weighted + config.mask_dice_loss_coefficient * dice

    def compute_losses(self, match: Tensor) -> dict[str, Tensor]:
        """Weighted sums [B] of cross-entropy and of the dice loss over the pairs of all outputs.

        `match` is int64[B, O, Q], the index of an object or -1.
        """
        cross_entropies = []
        dices = []
        for i in range(len(match)):
            logits, expected = self._select_pairs(i, match[i])
            losses = F.binary_cross_entropy_with_logits(logits, expected, reduction="none")
            cross_entropies.append(losses.mean(1).sum())
            scores = logits.sigmoid()
            sizes = scores.sum(1) + expected.sum(1)
            overlaps = (scores * expected).sum(1)
            dices.append((1 - (2 * overlaps + 1) / (sizes + 1)).sum())
        config = self._config
        return {
            "mask": config.mask_class_loss_coefficient * torch.stack(cross_entropies),
            "dice": config.mask_dice_loss_coefficient * torch.stack(dices),
        }

    def _select_pairs(self, i: int, match: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and expected values [pairs, P] of an image's pairs at the points of each pair.

        Pairs are in the order of outputs, then of queries, as in transformers.
        """
        masks = self._masks[i]
        features = self._factors.features[i]
        num_queries = match.shape[1]
        num_pairs = min(len(masks), num_queries)  # of each output
        is_free = (match < 0).to(torch.uint8)
        query_ids = is_free.sort(dim=1, stable=True).indices[:, :num_pairs]  # [O, pairs]
        mask_ids = match.gather(1, query_ids).flatten()
        factors = self._factors.queries[i].flatten(0, 1).unflatten(0, match.shape)
        output_ids = torch.arange(len(match), device=match.device)[:, None]
        pairs = factors[output_ids, query_ids]  # [O, pairs, C + 1]
        by_feature = pairs.view(len(features), -1, pairs.shape[-1])
        logits = by_feature @ features.flatten(2)
        logits = logits.view(-1, 1, *features.shape[2:])  # [pairs, 1, h, w]
        points = self._sample_points(i, logits)
        expected = _look_up(masks, mask_ids[:, None], points)
        return _interpolate(logits, points).squeeze(1), expected.to(logits.dtype)

    @torch.no_grad()
    def _sample_points(self, i: int, logits: Tensor) -> Tensor:
        """Points [pairs, P, 2] of masks [pairs, 1, h, w]: three quarters where these are least certain."""
        num_pairs, _, height, width = logits.shape
        num_points = max(height, height * width // self._config.mask_point_sample_ratio)
        num_uncertain = int(_UNCERTAIN_SHARE * num_points)
        candidates = self._draw_points(i, "candidates", (num_pairs, _OVERSAMPLING * num_points))
        certainty = _interpolate(logits, candidates).squeeze(1).abs()
        index = certainty.topk(num_uncertain, dim=1, largest=False).indices
        uncertain = candidates.gather(1, index[..., None].expand(-1, -1, 2))
        anywhere = self._draw_points(i, "anywhere", (num_pairs, num_points - num_uncertain))
        return torch.cat([uncertain, anywhere], 1)

    def _draw_points(self, i: int, purpose: str, shape: tuple[int, ...]) -> Tensor:
        """Random points [*shape, 2] in 0..1, functions of the image's position in the stream."""
        features = self._factors.features
        ids = torch.arange(2 * math.prod(shape), device=features.device)
        key = int(mix(self._positions[i], key_of(self._seed, "masks", purpose)))
        integers = draw_integers(ids, key) % _RESOLUTION
        return (integers.to(features.dtype) / _RESOLUTION).view(*shape, 2)


def _interpolate(x: Tensor, points: Tensor) -> Tensor:
    """Values [n, C, P] of maps [n, C, h, w] at points [n, P, 2] (x, y in 0..1), 0 around the maps."""
    values = F.grid_sample(x, 2 * points[:, :, None] - 1, align_corners=False)
    return values.squeeze(3)


def _look_up(masks: Tensor, mask_ids: Tensor, points: Tensor) -> Tensor:
    """Values [...] of `masks` [n, H, W] with the indices `mask_ids` in the pixels of points [..., 2]."""
    height, width = masks.shape[1:]
    columns = (points[..., 0] * width - 0.5).round().long().clamp(0, width - 1)
    rows = (points[..., 1] * height - 0.5).round().long().clamp(0, height - 1)
    return masks[mask_ids, rows, columns].to(points.dtype)
