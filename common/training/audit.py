"""Audit of the training data: sums of each sample's losses and margins over the run, which show wrong labels.

The margin of a sample is the logit of its own label minus the largest other one. A wrong label has a low mean margin, since
the other samples teach the model the right one. Source: Pleiss et al., "Identifying Mislabeled Data using the Area Under the
Margin Ranking", 2020.

What a step has computed anyway is copied to the host with its report, and every thousand steps, and before a checkpoint, sent
to the main process. Sums are integers, so their order does not matter: any layout has the same, also after a kill.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from common.data.batch_plan import BatchPlan
from common.data.stream import Stream
from common.distributed.collectives import gather_to_main, is_main, rank

MOST = 2**24  # audited samples, of 28 bytes each on the main process; of more, every second, third, ... one
WORST, MOST_WORST = 0.06, 10_000  # share of the samples that are reported, and their largest number
_UNIT, _BEYOND = 2.0**24, 2.0**16  # of the sums: a loss or margin counts in 2^-24, and at most as 2^16
_STEPS, _ROWS = 1_000, 2**20  # steps, and samples of all ranks, that are kept until they are sent


class Suspects(NamedTuple):
    """Samples, most suspicious first: those with the least mean margin, or the largest mean loss if margins are unknown."""

    indices: np.ndarray  # int64[n] of the training set
    margins: np.ndarray | None  # float64[n], means
    losses: np.ndarray  # float64[n], means
    seen: np.ndarray  # int64[n]: how often each was counted
    others: np.ndarray | None  # int64[n]: the other class that was the likeliest most often, by a majority vote
    audited: int  # samples that were counted at least once


@torch.no_grad()
def margins(logits: torch.Tensor, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[2, B]: the margin of each sample, and its likeliest other class.

    A mixed image counts only if at least half of it is its own, and against classes that neither image shows; else its margin
    is NaN. For multi-label data the margin is that of the decision that fits worst, and the class is the one it is about.

    Args:
        logits: [B, K]
        labels: int64[B], or bool[B, K] for multi-label data: before mixing.
        targets: [B, K], after mixing and smoothing.
    """
    logits = logits.detach().to(targets.dtype)
    if labels.ndim == 2:
        apart = (targets - labels.to(targets.dtype)).abs()  # more than by smoothing where mixed images differ
        right = torch.where(labels, logits, -logits)
        worst, other = right.masked_fill(apart > apart.amin(1, keepdim=True) + 1e-6, torch.inf).min(1)
        return torch.stack([worst, other.to(targets.dtype)])
    own = labels[:, None]
    shown = targets > targets.amin(1, keepdim=True)
    best, other = logits.masked_fill(shown.scatter_(1, own, True), -torch.inf).max(1)
    margin = logits.gather(1, own).squeeze(1) - best  # infinite if no class is left
    is_own = targets.gather(1, own).squeeze(1) == targets.amax(1)
    return torch.stack([margin.where(is_own, torch.nan), other.to(targets.dtype)])


class Audit:
    """The sums of one run over `source`, its training set. All ranks call it alike; the main process has the sums.

    Images that could not be read are left out. A source of `fresh` images, which are never seen twice, is not audited.
    """

    def __init__(self, stream: Stream, plan: BatchPlan, source: Any):
        self._stream, self._plan, self._source = stream, plan, source
        self._is_off = getattr(source, "fresh", False)
        self._every = -(-stream.size // MOST)
        self._span = plan.span(rank(), 0)[0], plan.span(rank(), plan.micro_steps - 1)[1]
        self._period = min(_STEPS, max(1, _ROWS // stream.global_batch_size))
        self._copied: deque = deque()  # of steps whose report is not in yet
        self._known: list[tuple[int, np.ndarray]] = []  # step -> [1 or 3, n]
        self._sums: dict[str, np.ndarray] = {}

    def take(self, step: int, losses: torch.Tensor, judged: torch.Tensor | None, broken: tuple[str, ...]) -> None:
        """Copy what this rank knows of `step`, counted from 1, to the host, before its report; does not wait for a device.

        `losses` [n], and `judged` [2, n] as `margins` returns it; `broken`: images that could not be read, name and reason.
        """
        if not self._is_off:
            rows = losses[None] if judged is None else torch.cat([losses[None].to(judged.dtype), judged])
            self._copied.append((step, rows.to("cpu", non_blocking=True), broken))

    def confirm(self, step: int) -> None:
        """The report of `step` is in: the copy has arrived, and its numbers are finite on all ranks."""
        while self._copied and self._copied[0][0] <= step:
            step_then, rows, broken = self._copied.popleft()
            rows = rows.numpy().astype(np.float64)
            if broken:
                names = [
                    self._source.name(index) for index in self._stream.indices(self._positions([step_then])).tolist()
                ]
                rows[:, [any(text.startswith(f"{name}: ") for text in broken) for name in names]] = np.nan
            self._known.append((step_then, rows))

    def is_due(self, step: int) -> bool:
        """Whether the ranks have kept so much that it is to be sent, after `step`."""
        return step % self._period == 0

    def gather(self) -> None:
        """Send what is known to the main process, which adds it up. A collective."""
        known, self._known = self._known, []
        rows = np.concatenate([rows for _, rows in known], axis=1) if known else np.zeros((1, 0))
        of_ranks = gather_to_main([self._positions([step for step, _ in known]), rows])
        if of_ranks and len(of_ranks[0][0]):
            self._add(*(np.concatenate(columns, axis=-1) for columns in zip(*of_ranks, strict=True)))

    def _positions(self, steps: list[int]) -> np.ndarray:
        """int64[n]: this rank's positions of the stream in these steps."""
        return np.concatenate(
            [np.zeros(0, np.int64), *(self._stream.positions(step - 1, self._span) for step in steps)]
        )

    def _add(self, positions: np.ndarray, rows: np.ndarray) -> None:
        sound = np.isfinite(rows).all(0)
        positions, rows = positions[sound], rows[:, sound]
        order = positions.argsort()
        indices, rows = self._stream.indices(positions[order]), rows[:, order]
        chosen = indices % self._every == 0
        indices, rows = indices[chosen] // self._every, rows[:, chosen]
        np.add.at(self._column("seen", np.int32), indices, 1)
        for name, values in zip(("loss", "margin"), rows, strict=False):
            exact = np.rint(values.clip(-_BEYOND, _BEYOND) * _UNIT).astype(np.int64)
            np.add.at(self._column(name, np.int64), indices, exact)
        if len(rows) > 1:
            self._vote(indices, rows[2].astype(np.int32))

    def _vote(self, indices: np.ndarray, others: np.ndarray) -> None:
        """Count votes of samples, in the order of their positions, in constant memory. Source: Boyer & Moore, 1981."""
        leaders, leads = self._column("other", np.int32), self._column("lead", np.int32)
        by_sample = indices.argsort(kind="stable")
        _, starts, counts = np.unique(indices[by_sample], return_index=True, return_counts=True)
        for turn in range(counts.max(initial=0)):
            rows = by_sample[starts[counts > turn] + turn]  # a vote of each sample
            index, other = indices[rows], others[rows]
            for_leader = (leads[index] == 0) | (leaders[index] == other)
            leaders[index] = np.where(leads[index] == 0, other, leaders[index])
            leads[index] += np.where(for_leader, 1, -1)

    def _column(self, name: str, kind: type) -> np.ndarray:
        return self._sums.setdefault(name, np.zeros(-(-self._stream.size // self._every), kind))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The sums, to save with a checkpoint; not copies. Empty except on the main process."""
        return {name: torch.from_numpy(column) for name, column in self._sums.items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Count on from the sums of a checkpoint; from nothing if it has none. Raises ValueError for those of other data."""
        self._sums = {name: tensor.numpy().copy() for name, tensor in tensors.items()} if is_main() else {}
        size = -(-self._stream.size // self._every)
        if any(len(column) != size for column in self._sums.values()):
            raise ValueError(f"the audit is not of {size} samples")

    def suspects(self, share: float = WORST) -> Suspects:
        """The worst `share` of the audited samples, at most `MOST_WORST`; none except on the main process."""
        sums = self._sums
        if "seen" not in sums:
            none = np.zeros(0)
            return Suspects(none.astype(np.int64), None, none, none.astype(np.int64), None, 0)
        rows = np.flatnonzero(sums["seen"])
        count = sums["seen"][rows]
        means = {name: sums[name][rows] / _UNIT / count for name in ("loss", "margin") if name in sums}
        order = np.lexsort((rows, -means["loss"], means.get("margin", -means["loss"])))
        order = order[: min(MOST_WORST, int(np.ceil(share * len(rows))))]
        return Suspects(
            rows[order] * self._every,
            means["margin"][order] if "margin" in means else None,
            means["loss"][order],
            count[order].astype(np.int64),
            sums["other"][rows[order]].astype(np.int64) if "other" in sums else None,
            len(rows),
        )
