"""RT-DETRv2, D-FINE and DEIMv2: detectors whose queries each become one box."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import box_convert

from common.detection.models import queries
from common.detection.models.boxes import copy_to_device, disable_autocast
from common.detection.models.detector import Detector
from common.detection.models.detr_models import (
    build_empty_model,
    build_model,
    get_backbone,
    save_model,
)
from common.detection.models.spec import DetectorSpec

_TEMPERATURE = 5  # of D-FINE's self-distillation


class DETR(Detector):
    """A DETR of transformers.

    Network, matching, losses and names of parameters are transformers'. Different here: the
    divisors are counts of the global batch; noise comes from `queries.build_denoising`; a query in a
    crowd region is neither object nor background; queries, decoder, boxes and losses are never in
    half precision. Sources: Lv et al. 2024, "RT-DETRv2" (arXiv:2407.17140); Peng et al. 2024,
    "D-FINE" (arXiv:2410.13842); Huang et al. 2025, "Real-Time Object Detection Meets DINOv3"
    (DEIMv2, arXiv:2509.20787).
    """

    needs_squares = True

    def __init__(self, spec: DetectorSpec) -> None:
        super().__init__()
        self.model, self.pretrained_cfg = build_model(spec)
        self.weights_summary = self.model.weights_summary
        self.config = self.model.config
        self.seed = spec.seed
        self.num_classes = spec.num_classes
        self.num_queries = self.config.num_queries
        self.limit = self.num_queries
        self.strides = self.config.feat_strides
        self.stride = max(self.strides)
        self.costs = {}
        for name in ("alpha", "gamma", "class_cost", "bbox_cost", "giou_cost"):
            self.costs[name] = getattr(self.config, f"matcher_{name}")
        self.train()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        # In training, encoder layers wait for the device, and DINOv3 draws a scale of its
        # positions.
        for module in list(self.model.encoder.modules()) + list(self.backbone.modules()):
            if type(module).__name__.endswith(("EncoderLayer", "RopePositionEmbedding")):
                module.training = False
        return self

    @property
    def backbone(self) -> nn.Module:
        return get_backbone(self.model)

    @property
    def trunk(self) -> nn.Module:
        """The network in the backbone, whose stages can be frozen."""
        return getattr(self.backbone, "_backbone", self.backbone)  # of timm

    @property
    def neck(self) -> list[nn.Module]:
        """The modules between backbone and decoder: adapters of maps, projections and encoder."""
        modules = []
        for name, module in self.model.named_children():
            if "encoder" in name or name.endswith("input_proj"):
                modules.append(module)
        return modules

    def count_divisors(self, targets: list[dict], canvas: Sequence[int]) -> Tensor:
        """Count boxes, queries with a box, queries, and positives of the images' denoising: int64[4]."""
        num_queries = self._count_queries(canvas)
        num_boxes = queries.count_objects(targets)
        num_groups = queries.count_groups(num_boxes, self.config.num_denoising)
        counts = [
            num_boxes,
            num_boxes.clamp(max=num_queries),
            torch.full_like(num_boxes, num_queries),
            num_boxes * num_groups,
        ]
        return torch.stack(counts).sum(1)

    def compute_terms(
        self,
        images: Tensor,
        targets: list[dict],
        totals: Tensor,
    ) -> dict[str, Tensor]:
        """Losses of classes, L1 and generalised IoU of boxes, and distributions of D-FINE's edges."""
        boxes, labels, regions = queries.split_targets(targets, images)
        totals = totals.to(images.dtype)
        denoising = None
        if self.config.num_denoising:
            denoising = queries.build_denoising(
                boxes,
                labels,
                positions=[target["position"] for target in targets],
                seed=self.seed,
                num_queries=self._count_queries(images.shape[2:]),
                config=self.config,
            )
        outputs = self._predict(images, denoising)
        with disable_autocast(images):
            padded_targets = queries.pad_targets(boxes, labels)
            num_denoising = denoising.labels.shape[1] if denoising else 0
            decoder_outputs = _Outputs.from_decoder(outputs, slice(num_denoising, None))
            terms = self._compute_decoder_terms(decoder_outputs, padded_targets, regions, totals)
            if denoising:
                denoised = _Outputs.from_denoising(outputs, slice(num_denoising))
                denoising_terms = self._compute_denoising_terms(
                    denoised, denoising, padded_targets, totals
                )
                for name, term in denoising_terms.items():
                    terms[name] = terms[name] + term
            # transformers' loss leaves out some of D-FINE's logits; their gradients are zeros.
            terms["class"] = terms["class"] + 0 * outputs.intermediate_logits.sum((1, 2, 3))
        return terms

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """As `queries.select_topk`; boxes may exceed the image, as those of transformers do."""
        outputs = self._predict(images)
        logits = outputs.intermediate_logits[:, -1]
        boxes = outputs.intermediate_reference_points[:, -1]
        return queries.select_topk(logits, boxes, images)

    def export(self, folder: Path, classes: Sequence[str], side: int) -> None:
        """Write a folder for transformers, see `detr_models.save_model`."""
        whole = build_empty_model(self.config, self._count_queries((side, side)), classes)
        whole.model.load_state_dict(self.model.state_dict())
        # transformers also has the decoder's heads under a second name.
        whole.class_embed = copy.deepcopy(whole.model.decoder.class_embed)
        whole.bbox_embed = copy.deepcopy(whole.model.decoder.bbox_embed)
        save_model(whole, self.pretrained_cfg, folder, side)

    def _count_queries(self, canvas: Sequence[int]) -> int:
        """Count the queries on a canvas of (H, W) pixels: at most the number of its cells."""
        height, width = canvas
        num_cells = sum((height // stride) * (width // stride) for stride in self.strides)
        return min(self.num_queries, num_cells)

    def _predict(self, images: Tensor, denoising: queries.Denoising | None = None):
        """Output of transformers' model, of which only features may be in half precision."""
        model = self.model
        model.config.num_queries = self._count_queries(images.shape[2:])
        if hasattr(model, "conv_encoder"):
            maps = model.conv_encoder(images)
        else:
            masks = images.new_ones(len(images), *images.shape[2:])
            features = model.backbone(images, masks)
            projections = zip(model.encoder_input_proj, features, strict=True)
            maps = [project(x) for project, (x, _) in projections]
        encoded = model.encoder(maps)
        name = "feature_maps" if hasattr(encoded, "feature_maps") else "last_hidden_state"
        encoded[name] = [x.to(images.dtype) for x in encoded[name]]
        # inputs_embeds gives the number of images, and keeps the sizes of the maps on the host.
        embeds = torch.empty(len(images), 0)
        with disable_autocast(images), self._override_inputs(encoded, denoising):
            return model(None, inputs_embeds=embeds, encoder_outputs=encoded)

    @contextlib.contextmanager
    def _override_inputs(self, encoded, denoising: queries.Denoising | None) -> Iterator[None]:
        """Let the encoder return `encoded`, and insert `denoising` before the decoder's queries."""
        encoder = self.model.encoder
        encoder.forward = lambda *args, **kwargs: encoded
        hook = None
        if denoising:
            insert = partial(self._insert_denoising, denoising)
            hook = self.model.decoder.register_forward_pre_hook(insert, with_kwargs=True)
        try:
            yield
        finally:
            del encoder.forward
            if hook:
                hook.remove()

    def _insert_denoising(
        self,
        denoising: queries.Denoising,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
    ) -> tuple[tuple, dict]:
        """A forward pre-hook of the decoder."""
        embeds = self.model.denoising_class_embed(denoising.labels)
        references = torch.logit(denoising.boxes, 1e-5)
        return args, kwargs | {
            "inputs_embeds": torch.cat([embeds, kwargs["inputs_embeds"]], 1),
            "reference_points": torch.cat([references, kwargs["reference_points"]], 1),
            "encoder_attention_mask": denoising.attention_mask,
        }

    def _compute_decoder_terms(
        self,
        outputs: "_Outputs",
        targets: queries.PaddedTargets,
        regions: Tensor,
        totals: Tensor,
    ) -> dict[str, Tensor]:
        """Compute the weighted losses [B] of the decoder's queries, by name."""
        match = queries.match_queries(
            outputs.logits, outputs.boxes.clamp(0, 1), targets, **self.costs
        )
        num_images = len(match)
        query_counts = torch.stack([totals[1], totals[2] - totals[1]])
        matching = _Matching(
            match,
            divisor=totals[0].clamp(min=1).expand(num_images),
            query_counts=query_counts.expand(num_images, 2),
        )
        box_matching = matching
        if getattr(self.config, "use_dense_one_to_one", False):
            box_matching = matching.unite_outputs(targets.num_boxes, totals)
        counted = (match >= 0) | ~queries.is_in_crowd(outputs.boxes, regions)
        return self._compute_output_terms(outputs, matching, box_matching, targets, counted)

    def _compute_denoising_terms(
        self,
        outputs: "_Outputs",
        denoising: queries.Denoising,
        targets: queries.PaddedTargets,
        totals: Tensor,
    ) -> dict[str, Tensor]:
        """Compute the weighted losses [B] of the boxes with noise, by name."""
        shape = outputs.boxes.shape[:3]
        matching = _Matching(
            denoising.match[:, None].expand(shape),
            divisor=totals[0].clamp(min=1) * denoising.num_groups.clamp(min=1),
            query_counts=totals[3].expand(len(outputs.boxes), 2),
        )
        counted = denoising.valid[:, None].expand(shape)
        return self._compute_output_terms(outputs, matching, matching, targets, counted)

    def _compute_output_terms(
        self,
        outputs: "_Outputs",
        class_matching: "_Matching",
        box_matching: "_Matching",
        targets: queries.PaddedTargets,
        counted: Tensor,
    ) -> dict[str, Tensor]:
        """Compute the weighted losses [B] of O outputs with Q queries each, by name.

        `counted` is bool[B, O, Q], False for padding and queries without a box in a crowd region.
        """
        config = self.config
        pairs = queries.pair_boxes(class_matching.match, outputs.boxes, targets.boxes)
        class_loss = self._compute_class_loss(
            outputs.logits, class_matching, targets.labels, pairs.iou.detach(), counted
        )
        if box_matching is not class_matching:
            pairs = queries.pair_boxes(box_matching.match, outputs.boxes, targets.boxes)
        quality = pairs.iou.detach()
        losses = {
            "box": config.weight_loss_bbox * (pairs.predicted - pairs.expected).abs().sum(-1),
            "giou": config.weight_loss_giou * (1 - pairs.giou),
        }
        edges = outputs.edges
        if edges:
            layers = slice(edges.logits.shape[1])
            corners = box_convert(pairs.expected[:, layers], "cxcywh", "xyxy")
            edge_losses = self._compute_edge_losses(edges, corners) * quality[:, layers]
            is_matched = (box_matching.match >= 0)[:, layers]
            losses["fgl"] = config.weight_loss_fgl * edge_losses * is_matched
        terms = {"class": class_loss}
        for name, values in losses.items():
            terms[name] = values.sum((1, 2)) / box_matching.divisor
        if edges:
            terms["ddf"] = _compute_distillation_loss(
                edges, box_matching, quality, counted, config.weight_loss_ddf
            )
        return terms

    def _compute_class_loss(
        self,
        logits: Tensor,
        matching: "_Matching",
        labels: Tensor,
        quality: Tensor,
        counted: Tensor,
    ) -> Tensor:
        """[B]: the weighted loss of classes; `quality` [B, O, Q] is the goal of a matched query."""
        config = self.config
        one_hot = queries.encode_one_hot(matching.match, labels, self.num_classes)
        goals = quality[..., None] * one_hot
        negative_weights = logits.detach().sigmoid() ** config.focal_loss_gamma
        if hasattr(config, "weight_loss_mal"):  # DEIMv2's matchability-aware loss
            loss_weight = config.weight_loss_mal
            goals = goals**config.focal_loss_gamma
            if config.mal_alpha is not None:
                negative_weights = config.mal_alpha * negative_weights
            weights = torch.where(one_hot, 1, negative_weights)
        else:  # varifocal loss
            loss_weight = config.weight_loss_vfl
            weights = torch.where(one_hot, goals, config.focal_loss_alpha * negative_weights)
        losses = F.binary_cross_entropy_with_logits(logits, goals, weights, reduction="none")
        losses = losses.sum(-1) * counted
        return loss_weight * losses.sum((1, 2)) / matching.divisor

    def _compute_edge_losses(self, edges: "_Edges", corners: Tensor) -> Tensor:
        """[B, E, Q]: cross-entropy of boxes' `corners` [B, E, Q, 4] under distributions of edges.

        The distance of an edge from that of the reference box lies between two bins.
        """
        from transformers.loss.loss_d_fine import weighting_function

        decoder = self.model.decoder
        scale = decoder.reg_scale
        bins = weighting_function(decoder.max_num_bins, decoder.up, scale)
        centres = edges.references[..., :2]
        sides = edges.references[..., 2:] / scale + 1e-16
        distances = torch.cat([centres - corners[..., :2], corners[..., 2:] - centres], -1)
        distances = distances / sides.repeat(1, 1, 1, 2)
        distances = (distances - scale / 2).clamp(bins[0], bins[-1])
        left = torch.searchsorted(bins, distances, right=True) - 1
        left = left.clamp(max=len(bins) - 2)
        right = left + 1
        right_share = (distances - bins[left]) / (bins[right] - bins[left])
        log_probs = F.log_softmax(edges.logits, -1)
        left_log_probs = log_probs.gather(-1, left[..., None]).squeeze(-1)
        right_log_probs = log_probs.gather(-1, right[..., None]).squeeze(-1)
        weighted = left_log_probs * (1 - right_share) + right_log_probs * right_share
        return -weighted.sum(-1)


@dataclass
class _Matching:
    """The boxes that Q queries of O outputs for B images are matched with, and divisors of losses."""

    match: Tensor  # int64[B, O, Q] index of a box, or -1
    divisor: Tensor  # [B] of sums over queries
    query_counts: Tensor  # [B, 2] queries with and without a box, of an output
    share: Tensor | float = 1.0  # weight of this image in losses that are means over queries

    def unite_outputs(self, num_boxes: list[int], totals: Tensor) -> Self:
        """One matching for all outputs: each query with the box that it has most often.

        The source divides by the number of these pairs in the batch, which is known only after the
        forward pass. Here an image has the mean over its own pairs, times its share of all boxes.
        Source: Peng et al. 2024, "D-FINE" (arXiv:2410.13842); DEIM's configuration calls it
        `use_uni_set`.

        Args:
            num_boxes, totals: of each image, and the sum of `DETR.count_divisors`.
        """
        device = self.match.device
        num_queries = self.match.shape[2]
        box_indices = torch.arange(max(max(num_boxes), 1), device=device)
        votes = (self.match[..., None] == box_indices).sum(1)  # [B, Q, boxes]
        # Of boxes with equally many votes, the first.
        ranking = votes * (len(box_indices) + 1) - box_indices
        match = torch.where(votes.any(-1), ranking.argmax(-1), -1)
        num_pairs = (match >= 0).sum(-1)  # [B]
        image_boxes = copy_to_device(torch.tensor(num_boxes), device)
        return type(self)(
            match[:, None].expand_as(self.match),
            divisor=self.divisor * num_pairs.clamp(min=1) / image_boxes.clamp(min=1),
            query_counts=torch.stack([num_pairs, num_queries - num_pairs], -1),
            share=num_queries / totals[2].clamp(min=1),
        )


@dataclass
class _Edges:
    """D-FINE's distributions of edges for E outputs; the last layer teaches the others."""

    logits: Tensor  # [B, E, Q, 4, bins]
    references: Tensor  # [B, E, Q, 4] boxes that distances are from
    num_students: int  # of the E outputs, those that learn from the teacher
    teacher: Tensor  # [B, Q, 4, bins]
    confidence: Tensor  # [B, Q] weight of an unmatched query of the teacher


def _compute_distillation_loss(
    edges: _Edges,
    matching: _Matching,
    quality: Tensor,
    counted: Tensor,
    loss_weight: float,
) -> Tensor:
    """[B]: the weighted distance of the students' distributions from the teacher's.

    `quality` and `counted` are [B, O, Q].
    """
    layers = slice(edges.num_students)
    students = F.log_softmax(edges.logits[:, layers] / _TEMPERATURE, -1)
    teacher = F.softmax(edges.teacher / _TEMPERATURE, -1)[:, None].expand_as(students)
    losses = F.kl_div(students, teacher, reduction="none").sum((-2, -1)) * _TEMPERATURE**2
    is_matched = matching.match[:, layers] >= 0
    is_unmatched = counted[:, layers] & ~is_matched
    losses = losses * torch.where(is_matched, quality[:, layers], edges.confidence[:, None])
    matched_sum = (losses * is_matched).sum((1, 2))
    unmatched_sum = (losses * is_unmatched).sum((1, 2))
    # Means over both kinds of queries, weighted by the square roots of their numbers.
    roots = (4 * matching.query_counts).sqrt()
    means = torch.stack([matched_sum, unmatched_sum], -1) / roots.clamp(min=1)
    return loss_weight * matching.share * means.sum(-1) / roots.sum(-1).clamp(min=1)


@dataclass
class _Outputs:
    """Outputs of O layers for Q queries of B images. D-FINE's begin with a first guess."""

    logits: Tensor  # [B, O, Q, K]
    boxes: Tensor  # [B, O, Q, 4] centre x, centre y, width, height in 0..1
    edges: _Edges | None = None

    @classmethod
    def from_decoder(cls, outputs, selection: slice) -> Self:
        """Outputs of transformers' model for the decoder's queries, and of their selection."""
        logits = outputs.intermediate_logits[:, :, selection]
        boxes = outputs.intermediate_reference_points[:, :, selection]
        edges = None
        if outputs.intermediate_predicted_corners is not None:
            num_layers = outputs.intermediate_predicted_corners.shape[1]
            edges = _select_edges(outputs, selection, num_layers - 1)
            boxes = boxes.clamp(0, 1)
            # The last layer's boxes come one index later.
            logits = torch.cat([logits[:, : num_layers - 1], logits[:, num_layers, None]], 1)
            boxes = torch.cat([boxes[:, : num_layers - 1], boxes[:, num_layers, None]], 1)
        logits = torch.cat([logits, outputs.enc_topk_logits[:, None]], 1)
        boxes = torch.cat([boxes, outputs.enc_topk_bboxes[:, None]], 1)
        return cls(logits, boxes, edges)

    @classmethod
    def from_denoising(cls, outputs, selection: slice) -> Self:
        """Outputs of transformers' model for the boxes with noise."""
        logits = outputs.intermediate_logits[:, :, selection]
        boxes = outputs.intermediate_reference_points[:, :, selection]
        edges = None
        if outputs.intermediate_predicted_corners is not None:
            num_layers = outputs.intermediate_predicted_corners.shape[1]
            edges = _select_edges(outputs, selection, num_layers)
            logits = logits[:, :num_layers].contiguous()
            boxes = boxes.clamp(0, 1)[:, :num_layers].contiguous()
        return cls(logits, boxes, edges)


def _select_edges(outputs, selection: slice, num_outputs: int) -> _Edges:
    """The distributions of some of the decoder's queries, for the first `num_outputs` layers."""
    logits = outputs.intermediate_logits[:, -1, selection]
    corners = outputs.intermediate_predicted_corners[:, :, selection].unflatten(-1, (4, -1))
    return _Edges(
        logits=corners[:, :num_outputs],
        references=outputs.initial_reference_points[:, :num_outputs, selection],
        num_students=corners.shape[1] - 1,
        teacher=corners[:, -1].detach(),
        confidence=logits.detach().sigmoid().amax(-1),
    )
