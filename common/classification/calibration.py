"""Calibration of a classifier: its confidence against its accuracy, and the temperature that corrects it.

In 15 bins of confidence, the largest probability of the softmax, the mean confidence is compared
with the share of right predictions. The expected calibration error (ECE) is the mean difference,
weighted by images. A temperature divides the logits; the best one has the smallest negative
log-likelihood (NLL). Source: Guo et al., 2017 (arXiv:1706.04599).

Images are counted in integers for each temperature of a fixed grid, so results are the same on any layout.
"""

import copy

import torch
from torch import Tensor

from common.distributed import devices
from common.distributed.collectives import reduce_counts

BINS = 15
# From 0.1 to 10 in steps of 2.3 %, so that the best one is met to about 1 %.
TEMPERATURES = tuple(10 ** (place / 100) for place in range(-100, 101))
_UNIT = 2**24  # sums of losses and confidences are integers of this fraction
_MAX_LOSS = 2.0**16  # a larger loss counts as this


class Calibration:
    """Counts of one evaluation, with one label per image. It is given every sample once, on any rank."""

    def __init__(self, device: torch.device | str, temperatures: tuple[float, ...] = (1.0,)):
        self.temperatures = temperatures
        self._inverse = (
            1
            / torch.tensor(temperatures, dtype=devices.get_sum_dtype(device), device=device)[
                :, None
            ]
        )
        # images, right ones, and sum of confidences of each bin; then the sum of the losses
        self._counts = torch.zeros(
            len(temperatures), 3 * BINS + 1, dtype=torch.int64, device=device
        )

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor, right: Tensor, counted: Tensor) -> None:
        """Count a batch: logits float[batch, classes], labels int64[batch], predictions that are
        right, bool[batch], and images that count, bool[batch]."""
        logits = torch.where(counted[:, None], logits, 0.0)
        logits = logits - logits.amax(1, keepdim=True)
        true = logits.gather(1, labels[:, None])[:, 0]
        # [T, batch]
        totals = torch.stack(
            [(logits / temperature).exp_().sum(1) for temperature in self.temperatures]
        )
        losses = totals.log() - true * self._inverse
        confidences = 1 / totals
        bins = ((confidences * BINS).ceil().long() - 1).clamp(0, BINS - 1)
        ones = counted.long().expand_as(bins)
        of_images = (ones, ones * right, ones * (confidences * _UNIT).round().long())
        for place, values in enumerate(of_images):
            self._counts[:, place * BINS : (place + 1) * BINS].scatter_add_(1, bins, values)
        self._counts[:, -1] += (ones * (losses.clamp(max=_MAX_LOSS) * _UNIT).round().long()).sum(1)

    def reduce(self) -> "Calibration":
        """New counts: the sums over all ranks, on every rank and on the CPU. A collective."""
        total = copy.copy(self)
        total._counts = reduce_counts(self._counts.cpu())
        return total

    def ece(self, temperature: float = 1.0) -> float | None:
        """Expected calibration error, in 0..1; None without images."""
        images, right, confidences = self.bins(temperature)
        return ((right - confidences).abs().sum() / images.sum()).item() if images.any() else None

    def bins(self, temperature: float = 1.0) -> Tensor:
        """float64[3, BINS]: images, right ones, and the sum of the confidences in each bin."""
        counts = self._counts[self.temperatures.index(temperature), :-1].double().view(3, BINS)
        counts[2] /= _UNIT
        return counts

    def temperature(self) -> float | None:
        """The temperature with the smallest NLL; None if it lies at an end of the grid."""
        best = int(self._counts[:, -1].argmin())
        return self.temperatures[best] if 0 < best < len(self.temperatures) - 1 else None

    def results(self) -> dict:
        """ECE and NLL at temperature 1 and at the best one for these images; and the bins."""
        rows = zip(*self.bins().tolist(), strict=True)
        found: dict = {"ece": self.ece(), "nll": self._nll(1.0)}
        if len(self.temperatures) > 1:
            best = self.temperature()
            found |= {"temperature": best, "temperature_fitted_on": "the evaluated images"}
            found |= {"ece_after": best and self.ece(best), "nll_after": best and self._nll(best)}
        shares = [
            (int(of), hits / of if of else None, total / of if of else None)
            for of, hits, total in rows
        ]
        return found | {
            "bins": [
                dict(zip(("images", "accuracy", "confidence"), row, strict=True)) for row in shares
            ]
        }

    def _nll(self, temperature: float) -> float | None:
        counts = self._counts[self.temperatures.index(temperature)].tolist()
        return counts[-1] / _UNIT / sum(counts[:BINS]) if any(counts[:BINS]) else None
