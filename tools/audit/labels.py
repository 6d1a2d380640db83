"""Training labels that the trained model contradicts: likely wrong, or only worth a look.

The model predicts its training images without augmentation. A label is likely wrong if the model
gives it a probability of less than 5 %, and if there are more such labels than the model's own
doubt explains. If all labels are right, there are at most 0.4 times as many as its probabilities
predict, since it has trained on them; if 5 % are wrong, 0.8 to 0.9 times as many (measured:
docs/after_training.md). Otherwise a lower threshold is tried. Source of the ranking by loss: Arazo
et al., "Unsupervised Label Noise Modeling and Loss Correction", 2019.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.classification.batches import Batch
from common.classification.plots import make_cell
from common.data.source import Source
from common.distributed import devices
from common.distributed.collectives import all_sum, gather_to_main
from common.run.plots import arrow, run_of, sheet

THRESHOLDS = (0.05, 0.04, 0.03, 0.02, 0.01, 0.005)  # for the probability of a label
# Times the expected number of labels below a threshold: from here on they are likely wrong.
UNEXPLAINED = 0.5
WORST, LONGEST = 0.06, 10_000  # share of the images, and number of rows: the length of the list
SHOWN = 24  # images on the sheet
COLUMNS = ("rank", "verdict", "image", "label", "suggested", "probability", "suggested_probability")


class Suspects(NamedTuple):
    """Images whose labels the model contradicts, the least probable label first."""

    indices: np.ndarray  # int64[n] of the training set
    probabilities: np.ndarray  # float64[n], of their labels
    # int64[n]: the class that is suggested, or for multi-label data to be added or taken away.
    others: np.ndarray
    others_probabilities: np.ndarray  # float64[n]
    likely: int  # how many of the first are likely wrong; the others are worth a look
    # Not learnt: class, suggested class, images like others, images.
    classes: list[tuple[int, int, int, int]]
    looked_at: int  # images

    def verdict(self, place: int) -> str:
        return "likely wrong" if place < self.likely else "worth a look"


@torch.no_grad()
def find(
    source: Source, batches: Iterable[tuple[Batch, Tensor]], device: torch.device | str
) -> Suspects | None:
    """The contradicted labels of `source`, on the main process, from all its images with logits [B,
    K]. A collective.
    """
    count = len(source.classes)
    expected = torch.zeros(
        len(THRESHOLDS), count, dtype=devices.get_sum_dtype(device), device=device
    )
    looks = [
        expected.new_zeros(4, 0),
        *(_look(source, batch, logits, expected) for batch, logits in batches),
    ]
    sums_of = all_sum(expected).cpu().numpy()
    of_ranks = gather_to_main([torch.cat(looks, 1).cpu().numpy()])
    if not of_ranks:
        return None
    rows = np.concatenate([rows for (rows,) in of_ranks], axis=1)
    rows = rows[:, np.lexsort((rows[0], rows[1]))]
    indices, others, looked_at = rows[0].astype(np.int64), rows[2].astype(np.int64), rows.shape[1]
    contradicted, classes, likely = rows[3] > rows[1], [], 0
    if not source.multi_label:
        labels = source.labels[indices]
        images, wrong = (
            np.bincount(part, minlength=count) for part in (labels, labels[contradicted])
        )
        unlearned = 4 * wrong > 3 * images  # bool[K]: too rare to be learnt
        for number in np.flatnonzero(unlearned).tolist():
            other = int(np.bincount(others[contradicted & (labels == number)]).argmax())
            classes.append((number, other, int(wrong[number]), int(images[number])))
        contradicted &= ~unlearned[labels]
        for threshold, sums in zip(THRESHOLDS, sums_of, strict=True):
            below = int((contradicted & (rows[1] < threshold)).sum())
            if below >= UNEXPLAINED * sums[~unlearned].sum() and not likely:
                likely = min(below, LONGEST)
    length = max(likely, min(LONGEST, int(np.ceil(WORST * looked_at))))
    listed = np.flatnonzero(contradicted)[:length]
    return Suspects(
        indices[listed],
        rows[1, listed],
        others[listed],
        rows[3, listed],
        likely,
        classes,
        looked_at,
    )


def _look(source: Source, batch: Batch, logits: Tensor, expected: Tensor) -> Tensor:
    """[4, B]: index, probability of the label, the other class, and its probability.

    Adds to `expected` [thresholds, K] what the model itself expects to lie below each threshold.
    """
    logits = logits[batch.readable].to(expected)
    labels, positions = batch.labels[batch.readable], batch.positions[batch.readable]
    if source.multi_label:
        given, other = torch.where(labels, logits, -logits).sigmoid().min(1)  # the worst decision
        probability = 1 - given
    else:
        probabilities = logits.softmax(1)
        given = probabilities.gather(1, labels[:, None]).squeeze(1)
        probability, other = probabilities.scatter(1, labels[:, None], -1).max(1)
        for sums, threshold in zip(expected, THRESHOLDS, strict=True):
            sums.index_add_(0, labels, (probabilities * (probabilities < threshold)).sum(1))
    return torch.stack([positions.to(given), given, other.to(given), probability])


def rows(source: Source, suspects: Suspects) -> list[Sequence]:
    """Rows of `suspicious.csv`. Multi-label: `+cat` suggests to add a class, `-cat` to take it away."""
    table: list[Sequence] = [COLUMNS]
    for number, other, wrong, images in suspects.classes:
        names = f"{wrong} of {images} images", source.classes[number], source.classes[other]
        table.append((len(table), "class", *names, "", ""))
    for place, index in enumerate(suspects.indices.tolist()):
        names = source.name(index), _label(source, index), _suggested(source, suspects, place)
        numbers = (
            f"{part[place]:.6f}" for part in (suspects.probabilities, suspects.others_probabilities)
        )
        table.append((len(table), suspects.verdict(place), *names, *numbers))
    return table


def draw(source: Source, suspects: Suspects, path: Path) -> None:
    """Draw a sheet of the images whose labels are contradicted most."""
    cells = []
    for place, index in enumerate(suspects.indices[:SHOWN].tolist()):
        names = arrow(_label(source, index), _suggested(source, suspects, place))
        caption = f"{names}\n{suspects.verdict(place)}, {suspects.probabilities[place]:.4f}"
        cells.append(make_cell(source, index, caption))
    sheet(
        cells, f"{run_of(path)}, training (given → suggested): {headline(source, suspects)}", path
    )


def headline(source: Source, suspects: Suspects) -> str:
    """The result in a sentence."""
    likely, looks = suspects.likely, len(suspects.indices) - suspects.likely
    text = f"{likely:,} labels are likely wrong" if likely else "no label is likely wrong"
    for number, _, wrong, images in suspects.classes[:3]:
        text += f"; class {source.classes[number]}: {wrong:,} of {images:,} images look like others"
    return f"{text}; {looks:,} are worth a look, of {suspects.looked_at:,}"


def _label(source: Source, index: int) -> str:
    if not source.multi_label:
        return source.classes[source.labels[index]]
    return ", ".join(source.classes[place] for place in np.flatnonzero(source.labels[index]))


def _suggested(source: Source, suspects: Suspects, place: int) -> str:
    index, other = suspects.indices[place], suspects.others[place]
    sign = ("-" if source.labels[index][other] else "+") if source.multi_label else ""
    return f"{sign}{source.classes[other]}"
