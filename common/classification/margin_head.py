"""Margin head: a softmax over hundreds of thousands of classes, which are sharded over the processes.

Each process has the directions of some classes (a DTensor, `Shard(0)`), and compares them with the
embeddings of all processes. Sources: ArcFace (Deng et al., 2019, arXiv:1801.07698),
CosFace (Wang et al., 2018, arXiv:1801.09414), and sampled negatives (An et al., "Partial FC", 2021,
arXiv:2010.05222), which are a function of (seed, step, class) here. So the layout changes no
number.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.batch_plan import BatchPlan
from common.distributed import devices
from common.distributed.collectives import rank, world_size
from common.distributed.sharding import SelfSharded, all_gather, get_local_tensor, reduce_scatter
from common.errors import Refused
from common.randomness import key_of, mix

_BLOCK_SIZE = 1024  # classes whose first weights are drawn together
_DEFAULT_MARGINS = {"cosface": 0.35, "arcface": 0.5}  # the papers'


def add_margin_head(
    config: Any, model: nn.Module, num_classes: int, device: torch.device, **options: Any
) -> None:
    """Give a model of embeddings a `MarginHead`, as `model.margin_head`, after `prepare_layers`.

    With --eval_only, it gets none. Of a timm model, the outputs of its classifier are the
    embedding. `options` go to `MarginHead`.
    """
    if config.eval_only:
        return
    dtype = getattr(torch, config.dtype)
    options = {"seed": config.seed, "dtype": dtype, "device": device} | options
    model.margin_head = MarginHead(num_classes, model.num_classes, **options)


class MarginHead(SelfSharded):
    """Embeddings [B, D] and class ids int64[B] of this rank's micro-batch -> cross-entropy of each
    sample, [B].

    Logits are `scale` times the cosine of embedding and direction of a class. The true class loses
    `margin`: of its cosine (`cosface`), or added to its angle (`arcface`). With `share` below 1 a
    step compares with its positives, the classes of the whole global batch, and with that share of
    all other classes; classes that are not compared have gradients of 0 in that step.

    The directions are not in a model's `state_dict`, moving average and export: checkpoints have
    them in a file of their own. They are computed in their own precision, under autocast, too.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
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
        if kind not in _DEFAULT_MARGINS or not 0 < share <= 1:
            raise Refused(
                f"margin head: kind={kind}, share={share}; take cosface or arcface, and a share "
                "in (0, 1]"
            )
        classes_per_rank = math.ceil(num_classes / world_size())  # as DTensor cuts
        if classes_per_rank * (world_size() - 1) >= num_classes:
            raise Refused(
                f"{num_classes} classes leave some of {world_size()} processes without one: start "
                "fewer"
            )
        self.kind = kind
        self.scale = scale
        self.margin = _DEFAULT_MARGINS[kind] if margin is None else margin
        self.num_classes = num_classes
        self.share = share
        self.seed = seed
        # This rank's classes.
        self._first_class = classes_per_rank * rank()
        end = min(self._first_class + classes_per_rank, num_classes)
        self._class_ids = np.arange(self._first_class, end)
        directions = self._draw_directions(embedding_size)
        self.weight = self.shard_rows(directions.to(device, dtype), num_classes)

    def _draw_directions(self, embedding_size: int) -> Tensor:
        """The first weights of this rank's classes, [C, D]; each row is a function of (seed, class)."""
        first_block = self._first_class // _BLOCK_SIZE * _BLOCK_SIZE
        end = self._first_class + len(self._class_ids)
        block_starts = range(first_block, end, _BLOCK_SIZE)
        blocks = torch.empty(len(block_starts) * _BLOCK_SIZE, embedding_size)
        for block, start in zip(blocks.split(_BLOCK_SIZE), block_starts, strict=True):
            generator = torch.Generator().manual_seed(key_of(self.seed, "margin head", start) >> 1)
            block.normal_(0, 0.01, generator=generator)
        return blocks[self._first_class - first_block : end - first_block]

    @property
    def needs_whole_step(self) -> bool:
        """True if a step needs the classes of all its samples; see `training.step.StepModule`."""
        return self.share < 1

    @torch.no_grad()
    def prepare_step(
        self, step: int, batches: Sequence[Any], plan: BatchPlan, is_trial: bool
    ) -> None:
        """Choose the classes of a step; see `training.step.StepModule`.

        The host does not wait for the device. In a trial, copies stand in place of the other ranks'
        samples, as in `sharding.skip_communication`.
        """
        self._max_samples = plan.micro_batch_sizes[0]  # of a micro-batch
        self._is_shared = world_size() > 1 and not is_trial
        self._rows: Tensor | None = None  # of the classes in this step; None: all of this rank
        if not self.needs_whole_step:
            return
        labels = torch.cat([batch.labels for batch in batches])
        num_rows = len(self._class_ids)
        hashes = mix(self._class_ids, key_of(self.seed, "negatives", step))
        is_negative = hashes < np.uint64(self.share * (2**64 - 1))
        negatives = torch.from_numpy(np.flatnonzero(is_negative))
        if devices.has_streams(labels.device):
            negatives = negatives.pin_memory()
        negatives = negatives.to(labels.device, non_blocking=True)
        padded_labels = _pad(labels, self._max_samples * plan.micro_steps, value=-1)
        positives = self._gather(padded_labels) - self._first_class
        positives = torch.where((positives >= 0) & (positives < num_rows), positives, num_rows)
        rows = torch.cat([negatives, positives]).sort().values
        # Rows of other ranks, and repeated ones, stay and don't count, so that the host knows how
        # many there are.
        is_repeated = rows == F.pad(rows, (1, 0), value=-1)[:-1]
        self._is_counted = (rows < num_rows) & ~is_repeated
        self._rows = rows.clamp(max=num_rows - 1)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if labels.dtype != torch.int64 or labels.ndim != 1:
            raise Refused(
                "a margin head takes one class id per image: leave out --mixup and --cutmix, and "
                "many labels"
            )
        weight = get_local_tensor(self.weight)
        embeddings = F.normalize(embeddings.to(weight.dtype))
        return _Losses.apply(embeddings, weight, labels, self)

    def describe(self) -> dict[str, str]:
        """A row of the start table."""
        classes = f"{self.num_classes:,} classes"
        if world_size() > 1:
            classes += f", {len(self._class_ids):,} on this process"
        negatives = "all compared in a step"
        if self.share < 1:
            negatives = f"{self.share:.3g} of them as negatives in a step"
        settings = f"{self.kind}, scale {self.scale:g}, margin {self.margin:g}"
        return {"margin head": f"{settings}: {classes}; {negatives}"}

    def _apply_margin(self, cosines: Tensor) -> tuple[Tensor, Tensor | float]:
        """The cosines of true classes after the margin, and their derivative.

        Beyond an angle of pi it goes on in a line.
        """
        if self.kind == "cosface":
            return cosines - self.margin, 1.0
        cos_margin = math.cos(self.margin)
        sin_margin = math.sin(self.margin)
        sines = (1 - cosines.square()).clamp(min=1e-6).sqrt()
        is_within = cosines > -cos_margin
        shifted = cosines * cos_margin - sines * sin_margin
        line = cosines - self.margin * sin_margin
        slopes = cos_margin + cosines / sines * sin_margin
        return torch.where(is_within, shifted, line), torch.where(is_within, slopes, 1.0)

    def _gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, each of which has as many."""
        if not self._is_shared:
            return torch.cat([rows] * world_size())
        gathered = rows.new_empty(world_size() * len(rows), *rows.shape[1:])
        all_gather(gathered, rows.contiguous())
        return gathered

    def _reduce_scatter(self, rows: Tensor) -> Tensor:
        """The sum over ranks of the rows of this rank's samples."""
        summed = rows[: len(rows) // world_size()].contiguous()
        if self._is_shared:
            reduce_scatter(summed, rows)
        return summed

    def _all_reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        if self._is_shared:
            dist.all_reduce(values, operation)
        return values

    def _save_to_state_dict(self, *_: Any) -> None:
        """Nothing: `TrainingState` saves and loads what a `state_dict` leaves out."""

    _load_from_state_dict = _save_to_state_dict

    def __deepcopy__(self, _: dict) -> nn.Module:
        """A copy of a model, such as its moving average, has no head."""
        return nn.Identity()


class _Losses(torch.autograd.Function):
    """Embeddings [B, D] of length 1, this rank's directions [C, D], class ids [B] -> losses [B].

    One tensor [all samples of the micro-step, this rank's classes of the step] is held, and
    computed in place.
    """

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, weight: Tensor, labels: Tensor, head: MarginHead
    ) -> Tensor:
        all_embeddings = head._gather(_pad(embeddings, head._max_samples)) * head.scale  # [N, D]
        targets = head._gather(_pad(labels, head._max_samples, value=-1)) - head._first_class  # [N]
        is_local = (targets >= 0) & (targets < len(weight))
        rows = head._rows
        directions = weight if rows is None else weight[rows]
        columns = targets if rows is None else torch.searchsorted(rows, targets)
        true_class = (
            torch.arange(len(targets), device=targets.device),
            columns.clamp(0, len(directions) - 1),
        )
        inverse_norms = 1 / directions.norm(dim=1).clamp(min=1e-12)
        logits = (all_embeddings @ directions.T).mul_(inverse_norms)
        if rows is not None:
            logits.masked_fill_(~head._is_counted, -torch.inf)
        cosines, slopes = head._apply_margin(logits[true_class] / head.scale)
        logits[true_class] = torch.where(is_local, cosines * head.scale, logits[true_class])
        largest = head._all_reduce(logits.amax(1), dist.ReduceOp.MAX)
        true_logits = torch.where(is_local, logits[true_class] - largest, 0)
        exps = logits.sub_(largest[:, None]).exp_()
        sums, true_logits = head._all_reduce(torch.stack([exps.sum(1), true_logits]))
        ctx.save_for_backward(all_embeddings, directions, inverse_norms, exps, sums)
        ctx.targets = is_local, true_class, slopes
        ctx.rows = rows
        ctx.num_rows = len(weight)
        ctx.head = head
        losses = (sums.log() - true_logits).view(world_size(), -1)[rank()]
        return losses[: len(labels)].clone()

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        all_embeddings, directions, inverse_norms, exps, sums = ctx.saved_tensors
        is_local, true_class, slopes = ctx.targets
        head = ctx.head
        factors = head._gather(_pad(grad_losses, head._max_samples))
        grad_logits = exps.mul_((factors / sums)[:, None])
        grad_true = grad_logits[true_class]
        grad_logits[true_class] = torch.where(is_local, (grad_true - factors) * slopes, grad_true)
        grad_logits.mul_(inverse_norms)
        grad_embeddings = head._reduce_scatter(grad_logits @ directions).mul_(head.scale)
        # All samples are in it already. Of all other gradients DDP takes the mean over ranks.
        grad_directions = (grad_logits.T @ all_embeddings).div_(world_size())
        dot_products = torch.einsum("cd,cd->c", grad_directions, directions)
        projections = dot_products * inverse_norms.square()
        grad_directions.addcmul_(directions, projections[:, None], value=-1)
        grad_weight = grad_directions
        if ctx.rows is not None:
            grad_weight = grad_directions.new_zeros(ctx.num_rows, directions.shape[1])
            grad_weight.index_add_(0, ctx.rows, grad_directions)
        return grad_embeddings[: len(grad_losses)], grad_weight, None, None


def _pad(rows: Tensor, length: int, value: float = 0.0) -> Tensor:
    """`length` rows, of which the last are filled with `value`."""
    return F.pad(rows, [0, 0] * (rows.ndim - 1) + [0, length - len(rows)], value=value)
