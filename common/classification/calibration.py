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
TEMPERATURES = tuple(10 ** (exponent / 100) for exponent in range(-100, 101))
_UNIT = 2**24  # sums of losses and confidences are integers of this fraction
_MAX_LOSS = 2.0**16  # a larger loss counts as this


class Calibration:
    """Counts of one evaluation, with one label per image. It is given every sample once, on any rank."""

    def __init__(self, device: torch.device | str, temperatures: tuple[float, ...] = (1.0,)):
        self.temperatures = temperatures
        dtype = devices.get_sum_dtype(device)
        self._inverse = 1 / torch.tensor(temperatures, dtype=dtype, device=device)[:, None]
        # Images, right ones, and sum of confidences of each bin; then the sum of the losses.
        shape = (len(temperatures), 3 * BINS + 1)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor, right: Tensor, counted: Tensor) -> None:
        """Count a batch.

        Args:
            logits: float[B, K].
            labels: int64[B].
            right: predictions that are right, bool[B].
            counted: images that count, bool[B].
        """
        logits = torch.where(counted[:, None], logits, 0.0)
        logits = logits - logits.amax(1, keepdim=True)
        true_logit = logits.gather(1, labels[:, None])[:, 0]
        totals = torch.stack(
            [(logits / each).exp_().sum(1) for each in self.temperatures]
        )  # [T, B]
        losses = totals.log() - true_logit * self._inverse
        confidences = 1 / totals
        bins = ((confidences * BINS).ceil().long() - 1).clamp(0, BINS - 1)
        ones = counted.long().expand_as(bins)
        self._counts[:, :BINS].scatter_add_(1, bins, ones)
        self._counts[:, BINS : 2 * BINS].scatter_add_(1, bins, ones * right)
        units = (confidences * _UNIT).round().long()
        self._counts[:, 2 * BINS : 3 * BINS].scatter_add_(1, bins, ones * units)
        loss_units = (losses.clamp(max=_MAX_LOSS) * _UNIT).round().long()
        self._counts[:, -1] += (ones * loss_units).sum(1)

    def reduce(self) -> "Calibration":
        """New counts: the sums over all ranks, on every rank and on the CPU. A collective."""
        total = copy.copy(self)
        total._counts = reduce_counts(self._counts.cpu())
        return total

    def ece(self, temperature: float = 1.0) -> float | None:
        """Expected calibration error, in 0..1; None without images."""
        images, right, confidences = self.bins(temperature)
        if not images.any():
            return None
        return ((right - confidences).abs().sum() / images.sum()).item()

    def bins(self, temperature: float = 1.0) -> Tensor:
        """float64[3, BINS]: images, right ones, and the sum of the confidences in each bin."""
        counts = self._counts[self.temperatures.index(temperature), :-1].double().view(3, BINS)
        counts[2] /= _UNIT
        return counts

    def temperature(self) -> float | None:
        """The temperature with the smallest NLL; None if it lies at an end of the grid."""
        best = int(self._counts[:, -1].argmin())
        is_inside = 0 < best < len(self.temperatures) - 1
        return self.temperatures[best] if is_inside else None

    def results(self) -> dict:
        """ECE and NLL at temperature 1 and at the best one for these images; and the bins."""
        results: dict = {"ece": self.ece(), "nll": self._nll(1.0)}
        if len(self.temperatures) > 1:
            best = self.temperature()
            results["temperature"] = best
            results["temperature_fitted_on"] = "the evaluated images"
            results["ece_after"] = None if best is None else self.ece(best)
            results["nll_after"] = None if best is None else self._nll(best)
        results["bins"] = []
        for images, right, confidence in self.bins().T.tolist():
            row = {"images": int(images), "accuracy": None, "confidence": None}
            if images:
                row |= {"accuracy": right / images, "confidence": confidence / images}
            results["bins"].append(row)
        return results

    def _nll(self, temperature: float) -> float | None:
        counts = self._counts[self.temperatures.index(temperature)].tolist()
        num_images = sum(counts[:BINS])
        return counts[-1] / _UNIT / num_images if num_images else None
