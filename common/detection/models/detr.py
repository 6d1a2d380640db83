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
from common.detection.models.boxes import full_precision, to_device
from common.detection.models.detector import Detector
from common.detection.models.detr_models import build_model, empty_model, features_of, save_model
from common.detection.models.spec import DetectorSpec

_TEMPERATURE = 5  # of D-FINE's self-distillation


class DETR(Detector):
    """A DETR of transformers.

    Network, matching, losses and names of parameters are transformers'. Different here: the
    divisors are counts of the global batch; noise comes from `queries.noised`; a query in a crowd
    region is neither object nor background; queries, decoder, boxes and losses are never in half
    precision. Sources: Lv et al. 2024, "RT-DETRv2" (arXiv:2407.17140); Peng et al. 2024, "D-FINE"
    (arXiv:2410.13842); Huang et al. 2025, "Real-Time Object Detection Meets DINOv3" (DEIMv2,
    arXiv:2509.20787).
    """

    needs_squares = True

    def __init__(self, spec: DetectorSpec) -> None:
        super().__init__()
        self.model, self.pretrained_cfg = build_model(spec)
        self.config, self.begins_with, self.seed = (
            self.model.config,
            self.model.begins_with,
            spec.seed,
        )
        self.classes, self.queries = spec.classes, self.config.num_queries
        self.limit = self.queries
        self.strides = self.config.feat_strides
        self.stride = max(self.strides)
        costs = "alpha", "gamma", "class_cost", "bbox_cost", "giou_cost"
        self.costs = {name: getattr(self.config, f"matcher_{name}") for name in costs}
        self.train()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        # In training, encoder layers wait for the device, and DINOv3 draws a scale of its
        # positions.
        for module in (*self.model.encoder.modules(), *self.backbone.modules()):
            if type(module).__name__.endswith(("EncoderLayer", "RopePositionEmbedding")):
                module.training = False
        return self

    @property
    def backbone(self) -> nn.Module:
        return features_of(self.model)

    @property
    def trunk(self) -> nn.Module:
        """The network in the backbone, whose stages can be frozen."""
        return getattr(self.backbone, "_backbone", self.backbone)  # of timm

    @property
    def neck(self) -> list[nn.Module]:
        """The parts between backbone and decoder: adapters of maps, projections and encoder."""
        parts = self.model.named_children()
        return [part for name, part in parts if "encoder" in name or name.endswith("input_proj")]

    def counts(self, targets: list[dict], canvas: Sequence[int]) -> Tensor:
        """int64[4]: boxes, queries with a box, queries, and positives of the images' denoising."""
        number = self._queries(canvas)
        boxes = torch.stack([(~target["crowd"]).sum() for target in targets])
        positives = boxes * queries.groups_of(boxes, self.config.num_denoising)
        columns = boxes, boxes.clamp(max=number), torch.full_like(boxes, number), positives
        return torch.stack([column.sum() for column in columns])

    def compute_terms(
        self, images: Tensor, targets: list[dict], totals: Tensor
    ) -> dict[str, Tensor]:
        """Losses of classes, L1 and generalised IoU of boxes, and distributions of D-FINE's edges."""
        boxes, labels, regions = queries.split_targets(targets, images)
        totals = totals.to(images.dtype)
        denoising = None
        if self.config.num_denoising:
            positions, number = (
                [target["position"] for target in targets],
                self._queries(images.shape[2:]),
            )
            denoising = queries.noised(boxes, labels, positions, self.seed, number, self.config)
        outputs = self._predict(images, denoising)
        with full_precision(images):
            first = denoising.labels.shape[1] if denoising else 0
            wanted = queries.padded(boxes, 0), queries.padded(labels, 0)
            found = _Outputs.of(outputs, slice(first, None), own=True)
            counts = [*map(len, labels)]
            match = queries.match(
                found.logits, found.boxes.clamp(0, 1), *wanted, counts, **self.costs
            )
            numbers = torch.stack([totals[1], totals[2] - totals[1]])
            pairs = _Pairs(
                match, totals[0].clamp(min=1).expand(len(images)), numbers.expand(len(images), 2)
            )
            counted = (match >= 0) | ~queries.in_crowds(found.boxes, regions)
            is_dense = getattr(self.config, "use_dense_one_to_one", False)
            of_boxes = pairs.across_outputs(counts, totals) if is_dense else pairs
            terms = self._compare(found, pairs, of_boxes, *wanted, counted)
            if denoising:
                found = _Outputs.of(outputs, slice(first), own=False)
                shape = found.boxes.shape[:3]
                divisor = totals[0].clamp(min=1) * denoising.groups.clamp(min=1)
                pairs = _Pairs(
                    denoising.match[:, None].expand(shape),
                    divisor,
                    totals[3].expand(len(images), 2),
                )
                restored = self._compare(
                    found, pairs, pairs, *wanted, denoising.real[:, None].expand(shape)
                )
                terms = {name: term + restored[name] for name, term in terms.items()}
            # transformers' loss leaves out some of D-FINE's logits; their gradients are zeros.
            terms["class"] = terms["class"] + 0 * outputs.intermediate_logits.sum((1, 2, 3))
        return terms

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """As `queries.best_pairs`; boxes may exceed the image, as those of transformers do."""
        outputs = self._predict(images)
        logits, boxes = (
            outputs.intermediate_logits[:, -1],
            outputs.intermediate_reference_points[:, -1],
        )
        return queries.best_pairs(logits, boxes, images)

    def export(self, folder: Path, classes: Sequence[str], side: int) -> None:
        """Write a folder for transformers, see `detr_models.save_model`."""
        whole = empty_model(self.config, self._queries((side, side)), classes)
        whole.model.load_state_dict(self.model.state_dict())
        # transformers also has the decoder's heads under a second name.
        decoder = whole.model.decoder
        whole.class_embed, whole.bbox_embed = map(
            copy.deepcopy, (decoder.class_embed, decoder.bbox_embed)
        )
        save_model(whole, self.pretrained_cfg, folder, side)

    def _queries(self, canvas: Sequence[int]) -> int:
        """Number of queries on a canvas of (H, W) pixels: at most the number of its cells."""
        places = sum((canvas[0] // stride) * (canvas[1] // stride) for stride in self.strides)
        return min(self.queries, places)

    def _predict(self, images: Tensor, denoising: queries.Denoising | None = None):
        """Output of transformers' model, of which only features may be in half precision."""
        model = self.model
        model.config.num_queries = self._queries(images.shape[2:])
        if hasattr(model, "conv_encoder"):
            maps = model.conv_encoder(images)
        else:
            features = model.backbone(images, images.new_ones(len(images), *images.shape[2:]))
            maps = [
                project(x)
                for project, (x, _) in zip(model.encoder_input_proj, features, strict=True)
            ]
        encoded = model.encoder(maps)
        name = "feature_maps" if hasattr(encoded, "feature_maps") else "last_hidden_state"
        encoded[name] = [x.to(images.dtype) for x in encoded[name]]
        # inputs_embeds gives the number of images, and keeps the sizes of the maps on the host.
        count = torch.empty(len(images), 0)
        with full_precision(images), self._given(encoded, denoising):
            return model(None, inputs_embeds=count, encoder_outputs=encoded)

    @contextlib.contextmanager
    def _given(self, encoded, denoising: queries.Denoising | None) -> Iterator[None]:
        """Give the model these outputs of its encoder, and noised boxes before the decoder's queries."""

        def insert(
            noise: queries.Denoising, _: nn.Module, args: tuple, kwargs: dict
        ) -> tuple[tuple, dict]:
            labels = self.model.denoising_class_embed(noise.labels)
            first = {"inputs_embeds": labels, "reference_points": torch.logit(noise.boxes, 1e-5)}
            joined = {name: torch.cat([tensor, kwargs[name]], 1) for name, tensor in first.items()}
            return args, kwargs | joined | {"encoder_attention_mask": noise.visible}

        encoder, decoder = self.model.encoder, self.model.decoder
        encoder.forward = lambda *_, **__: encoded
        hook = denoising and decoder.register_forward_pre_hook(
            partial(insert, denoising), with_kwargs=True
        )
        try:
            yield
        finally:
            del encoder.forward
            if hook:
                hook.remove()

    def _compare(
        self,
        outputs: "_Outputs",
        pairs: "_Pairs",
        box_pairs: "_Pairs",
        boxes: Tensor,
        labels: Tensor,
        counted: Tensor,
    ) -> dict[str, Tensor]:
        """The weighted losses [B] of O outputs with Q queries each, by name.

        Args:
            pairs, box_pairs: the pairs that the losses of classes and the losses of boxes compare.
            boxes, labels: [B, n + 1, 4] and int64[B, n + 1], padded at the end.
            counted: bool[B, O, Q], False for padding and queries without a box in a crowd region.
        """
        config = self.config
        compared = queries.pair(pairs.match, outputs.boxes, boxes)
        terms = {
            "class": self._classify(outputs.logits, pairs, labels, compared[2].detach(), counted)
        }

        if box_pairs is not pairs:
            compared = queries.pair(box_pairs.match, outputs.boxes, boxes)
        predicted, expected, overlap, generalised = compared
        quality = overlap.detach()
        sums = {
            "box": config.weight_loss_bbox * (predicted - expected).abs().sum(-1),
            "giou": config.weight_loss_giou * (1 - generalised),
        }
        edges = outputs.edges
        if edges:
            layers = slice(edges.logits.shape[1])
            corners = box_convert(expected[:, layers], "cxcywh", "xyxy")
            unlikely = (
                self._unlikelihood(edges.logits, edges.references, corners) * quality[:, layers]
            )
            sums["fgl"] = config.weight_loss_fgl * unlikely * (box_pairs.match >= 0)[:, layers]
        terms |= {name: values.sum((1, 2)) / box_pairs.divisor for name, values in sums.items()}
        if edges:
            terms["ddf"] = _distil(edges, box_pairs, quality, counted, config.weight_loss_ddf)
        return terms

    def _classify(
        self, logits: Tensor, pairs: "_Pairs", labels: Tensor, quality: Tensor, counted: Tensor
    ) -> Tensor:
        """[B]: the weighted loss of classes; `quality` [B, O, Q] is the goal of a matched query."""
        config = self.config
        is_hit = queries.hits(pairs.match, labels, self.classes)
        goal = quality[..., None] * is_hit
        doubt = logits.detach().sigmoid() ** config.focal_loss_gamma
        if hasattr(config, "weight_loss_mal"):  # DEIMv2's matchability-aware loss
            scale = config.weight_loss_mal
            goal = goal**config.focal_loss_gamma
            weight = torch.where(
                is_hit, 1, doubt if config.mal_alpha is None else config.mal_alpha * doubt
            )
        else:
            scale = config.weight_loss_vfl
            weight = torch.where(is_hit, goal, config.focal_loss_alpha * doubt)
        losses = F.binary_cross_entropy_with_logits(logits, goal, weight, reduction="none").sum(-1)
        return scale * (losses * counted).sum((1, 2)) / pairs.divisor

    def _unlikelihood(self, edges: Tensor, references: Tensor, wanted: Tensor) -> Tensor:
        """[B, O, Q]: cross-entropy of wanted boxes (corners) under distributions of edges [B, O, Q, 4, bins].

        Distances are counted from the edges of the reference boxes [B, O, Q, 4]; a wanted one lies
        between two bins.
        """
        from transformers.loss.loss_d_fine import weighting_function

        decoder, scale = self.model.decoder, self.model.decoder.reg_scale
        bins = weighting_function(decoder.max_num_bins, decoder.up, scale)
        centres, sides = references[..., :2], references[..., 2:] / scale + 1e-16
        distances = torch.cat(
            [centres - wanted[..., :2], wanted[..., 2:] - centres], -1
        ) / sides.repeat(1, 1, 1, 2)
        distances = (distances - scale / 2).clamp(bins[0], bins[-1])
        left = (torch.searchsorted(bins, distances, right=True) - 1).clamp(max=len(bins) - 2)
        share = (distances - bins[left]) / (bins[left + 1] - bins[left])
        logs = F.log_softmax(edges, -1)
        below, above = (logs.gather(-1, place[..., None]).squeeze(-1) for place in (left, left + 1))
        return -(below * (1 - share) + above * share).sum(-1)


@dataclass
class _Pairs:
    """The boxes that Q queries of O outputs for B images are compared with, and divisors of losses."""

    match: Tensor  # int64[B, O, Q] index of a box, or -1
    divisor: Tensor  # [B] of sums over queries
    numbers: Tensor  # [B, 2] queries with and without a box, of an output
    share: Tensor | float = 1.0  # of the image in what has a mean over `numbers`

    def across_outputs(self, counts: list[int], totals: Tensor) -> Self:
        """The same pairs for all outputs: each query with the box that it has most often.

        The source divides by the number of these pairs in the batch, which is known only after the
        forward pass. Here an image has the mean over its own pairs, times its share of all boxes.
        Source: Peng et al. 2024, "D-FINE" (arXiv:2410.13842); DEIM's configuration calls it
        `use_uni_set`.

        Args:
            counts, totals: the images' numbers of boxes, and the sum of `DETR.counts`.
        """
        device, queries = self.match.device, self.match.shape[2]
        number = torch.arange(max(max(counts), 1), device=device)
        votes = (self.match[..., None] == number).sum(1)  # [B, Q, boxes]
        best = torch.where(votes.any(-1), (votes * (len(number) + 1) - number).argmax(-1), -1)
        pairs = (best >= 0).sum(-1)  # [B]
        own = to_device(torch.tensor(counts), device)
        return type(self)(
            best[:, None].expand_as(self.match),
            self.divisor * pairs.clamp(min=1) / own.clamp(min=1),
            torch.stack([pairs, queries - pairs], -1),
            queries / totals[2].clamp(min=1),
        )


@dataclass
class _Edges:
    """D-FINE's distributions of edges for E outputs; the last layer teaches the others."""

    logits: Tensor  # [B, E, Q, 4, bins]
    references: Tensor  # [B, E, Q, 4] boxes that distances are from
    students: int  # number of the E outputs that learn from the teacher
    teacher: Tensor  # [B, Q, 4, bins]
    trust: Tensor  # [B, Q] weight of an unmatched query of the teacher


def _distil(
    edges: _Edges, pairs: _Pairs, quality: Tensor, counted: Tensor, weight: float
) -> Tensor:
    """[B]: how far the students' distributions are from the teacher's; `quality` and `counted` are
    [B, O, Q].
    """
    layers = slice(edges.students)
    students = F.log_softmax(edges.logits[:, layers] / _TEMPERATURE, -1)
    teacher = F.softmax(edges.teacher / _TEMPERATURE, -1)[:, None].expand_as(students)
    distance = F.kl_div(students, teacher, reduction="none").sum((-2, -1)) * _TEMPERATURE**2
    matched = pairs.match[:, layers] >= 0
    missed = counted[:, layers] & ~matched
    distance = distance * torch.where(matched, quality[:, layers], edges.trust[:, None])
    sums = torch.stack([(distance * matched).sum((1, 2)), (distance * missed).sum((1, 2))], -1)
    # Means over both kinds of queries, weighted by the square roots of their numbers.
    roots = (4 * pairs.numbers).sqrt()
    return weight * pairs.share * (sums / roots.clamp(min=1)).sum(-1) / roots.sum(-1).clamp(min=1)


@dataclass
class _Outputs:
    """Outputs of O layers for Q queries of B images. D-FINE's begin with a first guess."""

    logits: Tensor  # [B, O, Q, K]
    boxes: Tensor  # [B, O, Q, 4] centre x, centre y, width, height in 0..1
    edges: _Edges | None = None

    @classmethod
    def of(cls, outputs, queries: slice, own: bool) -> Self:
        """Outputs for some of the decoder's queries: its own, or the noised boxes before them."""
        logits, boxes = (
            outputs.intermediate_logits[:, :, queries],
            outputs.intermediate_reference_points[:, :, queries],
        )
        edges = None
        if outputs.intermediate_predicted_corners is not None:
            corners = outputs.intermediate_predicted_corners[:, :, queries].unflatten(-1, (4, -1))
            layers = corners.shape[1]
            count = layers - own
            references = outputs.initial_reference_points[:, :count, queries]
            trust = logits[:, -1].detach().sigmoid().amax(-1)
            edges = _Edges(
                corners[:, :count], references, layers - 1, corners[:, -1].detach(), trust
            )
            # Own boxes of the last layer come one place later.
            logits, boxes = (
                torch.cat([x[:, :count], x[:, layers : layers + own]], 1)
                for x in (logits, boxes.clamp(0, 1))
            )
        if own:
            logits = torch.cat([logits, outputs.enc_topk_logits[:, None]], 1)
            boxes = torch.cat([boxes, outputs.enc_topk_bboxes[:, None]], 1)
        return cls(logits, boxes, edges)
