"""Margin head: a softmax over hundreds of thousands of classes, whose weights are cut over the processes by class.

Each process has the directions of its part of the classes (a DTensor, `Shard(0)`), and compares them with the embeddings of
all processes. Sources: ArcFace (Deng et al., 2019, arXiv:1801.07698), CosFace (Wang et al., 2018, arXiv:1801.09414), and
sampled negatives (An et al., "Partial FC", 2021, arXiv:2010.05222), which are a function of (seed, step, class) here. So
the layout changes no number.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from common.distributed import devices
from common.distributed.collectives import rank, world_size
from common.distributed.sharding import all_gather, local, reduce_scatter
from common.errors import Refused
from common.randomness import key_of, mix

_BLOCK = 1024  # classes whose first weights are drawn together
_MARGINS = {"cosface": 0.35, "arcface": 0.5}  # the papers'


def add_margin_head(config: Any, model: nn.Module, classes: int, device: torch.device, **options: Any) -> None:
    """Give a model of embeddings a `MarginHead`, as `model.margin_head`, unless it is only evaluated; after `prepare_layers`.

    Of a timm model, the outputs of its classifier are the embedding. `options` go to `MarginHead`.
    """
    if not config.eval_only:
        options = {"seed": config.seed, "dtype": getattr(torch, config.dtype), "device": device} | options
        model.margin_head = MarginHead(classes, model.num_classes, **options)


class MarginHead(nn.Module):
    """Embeddings [B, D] and class ids int64[B] of this rank's micro-batch -> cross-entropy of each sample, [B].

    Logits are `scale` times the cosine of embedding and direction of a class. The true class loses `margin`: of its cosine
    (`cosface`), or added to its angle (`arcface`). With `share` below 1 a step compares with its positives, the classes of the
    whole global batch, and with that share of all other classes; the rest have gradients of 0 in that step.

    The directions are no part of a model's `state_dict`, moving average and export: checkpoints have them in a file of their
    own. They are computed in their own precision, under autocast, too.
    """

    def __init__(
        self,
        classes: int,
        features: int,
        *,
        kind: str = "cosface",
        scale: float = 64.0,
        margin: float | None = None,
        share: float = 1.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if kind not in _MARGINS or not 0 < share <= 1:
            raise Refused(f"margin head: kind={kind}, share={share}; take cosface or arcface, and a share in (0, 1]")
        each = -(-classes // world_size())  # as DTensor cuts
        if each * (world_size() - 1) >= classes:
            raise Refused(f"{classes} classes leave some of {world_size()} processes without one: start fewer")
        self.kind, self.scale, self.margin = kind, scale, _MARGINS[kind] if margin is None else margin
        self.classes, self.share, self.seed = classes, share, seed
        self._first, last = each * rank(), min(each * (rank() + 1), classes)
        self._own = np.arange(self._first, last)
        low = self._first // _BLOCK * _BLOCK
        weight = torch.empty(-(-(last - low) // _BLOCK) * _BLOCK, features)
        for start in range(0, len(weight), _BLOCK):  # a row is a function of (seed, class)
            draws = torch.Generator().manual_seed(key_of(seed, "margin head", low + start) >> 1)
            weight[start : start + _BLOCK].normal_(0, 0.01, generator=draws)
        weight = weight[self._first - low : last - low].to(device, dtype)
        if world_size() > 1:
            group: Any = dist.group.WORLD
            mesh = DeviceMesh.from_group(group, weight.device.type, mesh_dim_names=("classes",))
            size = torch.Size([classes, features])
            weight = DTensor.from_local(weight, mesh, [Shard(0)], shape=size, stride=(features, 1))
        self.weight = nn.Parameter(weight)

    @torch.no_grad()
    def begin(self, step: int, labels: Tensor, limit: int, micro_steps: int = 1, alone: bool = False) -> None:
        """Choose the classes of a step with up to `micro_steps` micro-batches of `limit` samples on each rank. A collective.

        `labels` int64[n] belong to this rank's samples of the whole step; a `share` of 1 does not need them. The host does not
        wait for the device. If `alone`, copies stand in place of the other ranks' samples, as in `sharding.alone`.
        """
        self._limit, self._rows, self._is_shared = limit, None, world_size() > 1 and not alone
        if self.share == 1:
            return
        count = len(self._own)
        kept = mix(self._own, key_of(self.seed, "negatives", step)) < np.uint64(self.share * (2**64 - 1))
        negatives = torch.from_numpy(np.flatnonzero(kept))
        negatives = negatives.pin_memory() if devices.has_streams(labels.device) else negatives
        positives = self._gathered(_padded(labels, limit * micro_steps, -1)) - self._first
        positives = torch.where((positives >= 0) & (positives < count), positives, count)
        rows = torch.cat([negatives.to(labels.device, non_blocking=True), positives]).sort().values
        # Rows of other ranks, and those that come twice, stay and don't count, so that the host knows the number.
        self._counted = (rows < count) & (rows != F.pad(rows, (1, 0), value=-1)[:-1])
        self._rows = rows.clamp(max=count - 1)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if labels.dtype != torch.int64 or labels.ndim != 1:
            raise Refused("a margin head takes one class id per image: leave out --mixup and --cutmix, and many labels")
        weight = local(self.weight)
        embeddings = F.normalize(embeddings.to(weight.dtype))
        return _Losses.apply(embeddings, weight, labels, self)

    def __str__(self) -> str:
        negatives = f"{self.share:.3g} of them as negatives in a step" if self.share < 1 else "all compared in a step"
        cut = f", {len(self._own):,} on this process" if world_size() > 1 else ""
        return f"{self.kind}, scale {self.scale:g}, margin {self.margin:g}: {self.classes:,} classes{cut}; {negatives}"

    def _with_margin(self, cosines: Tensor) -> tuple[Tensor, Tensor | float]:
        """The cosines of true classes after the margin, and their derivative. Beyond an angle of pi it goes on in a line."""
        if self.kind == "cosface":
            return cosines - self.margin, 1.0
        cos, sin = math.cos(self.margin), math.sin(self.margin)
        sines = (1 - cosines.square()).clamp(min=1e-6).sqrt()
        is_within = cosines > -cos
        moved = torch.where(is_within, cosines * cos - sines * sin, cosines - self.margin * sin)
        return moved, torch.where(is_within, cos + cosines / sines * sin, 1.0)

    def _gathered(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, each of which has as many."""
        if not self._is_shared:
            return torch.cat([rows] * world_size())
        gathered = rows.new_empty(world_size() * len(rows), *rows.shape[1:])
        all_gather(gathered, rows.contiguous())
        return gathered

    def _summed(self, rows: Tensor) -> Tensor:
        """The sum over ranks of the rows of this rank's samples."""
        own = rows[: len(rows) // world_size()].contiguous()
        if self._is_shared:
            reduce_scatter(own, rows)
        return own

    def _reduced(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        if self._is_shared:
            dist.all_reduce(values, operation)
        return values

    def _save_to_state_dict(self, *_: Any) -> None:
        """Nothing: `TrainingState` saves and loads the weights."""

    _load_from_state_dict = _save_to_state_dict

    def __deepcopy__(self, _: dict) -> nn.Module:
        """A copy of a model, such as its moving average, has no head."""
        return nn.Identity()


class _Losses(torch.autograd.Function):
    """Embeddings [B, D] of length 1, this rank's directions [C, D], class ids [B] -> losses [B].

    One tensor [all samples of the micro-step, this rank's classes of the step] is held, and computed in place.
    """

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, weight: Tensor, labels: Tensor, head: MarginHead) -> Tensor:
        everyone = head._gathered(_padded(embeddings, head._limit)) * head.scale  # [N, D]
        targets = head._gathered(_padded(labels, head._limit, -1)) - head._first  # [N]
        is_own, rows = (targets >= 0) & (targets < len(weight)), head._rows
        directions = weight if rows is None else weight[rows]
        columns = targets if rows is None else torch.searchsorted(rows, targets)
        places = torch.arange(len(targets), device=targets.device), columns.clamp(0, len(directions) - 1)
        inverse = 1 / directions.norm(dim=1).clamp(min=1e-12)
        logits = (everyone @ directions.T).mul_(inverse)
        if rows is not None:
            logits.masked_fill_(~head._counted, -torch.inf)
        moved, slopes = head._with_margin(logits[places] / head.scale)
        logits[places] = torch.where(is_own, moved * head.scale, logits[places])
        top = head._reduced(logits.amax(1), dist.ReduceOp.MAX)
        true = torch.where(is_own, logits[places] - top, 0)
        shares = logits.sub_(top[:, None]).exp_()
        sums, true = head._reduced(torch.stack([shares.sum(1), true]))
        ctx.save_for_backward(everyone, directions, inverse, shares, sums)
        ctx.targets, ctx.rows, ctx.classes, ctx.head = (is_own, places, slopes), rows, len(weight), head
        return (sums.log() - true).view(world_size(), -1)[rank(), : len(labels)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (everyone, directions, inverse, shares, sums), head = ctx.saved_tensors, ctx.head
        is_own, places, slopes = ctx.targets
        factors = head._gathered(_padded(gradient, head._limit))
        of_logits = shares.mul_((factors / sums)[:, None])
        of_true = of_logits[places]
        of_logits[places] = torch.where(is_own, (of_true - factors) * slopes, of_true)
        of_logits.mul_(inverse)
        of_embeddings = head._summed(of_logits @ directions).mul_(head.scale)
        # All samples are in it already. Of all other gradients DDP takes the mean over ranks.
        of_directions = (of_logits.T @ everyone).div_(world_size())
        along = torch.einsum("cd,cd->c", of_directions, directions) * inverse.square()
        of_directions.addcmul_(directions, along[:, None], value=-1)
        if ctx.rows is not None:
            of_all = of_directions.new_zeros(ctx.classes, directions.shape[1])
            of_directions = of_all.index_add_(0, ctx.rows, of_directions)
        return of_embeddings[: len(gradient)], of_directions, None, None


def _padded(rows: Tensor, count: int, value: float = 0.0) -> Tensor:
    """`count` rows, of which the last are filled with `value`."""
    return F.pad(rows, [0, 0] * (rows.ndim - 1) + [0, count - len(rows)], value=value)
