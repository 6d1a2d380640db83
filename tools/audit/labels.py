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
from common.run.plots import draw_cells, format_arrow, get_run_name

THRESHOLDS = (0.05, 0.04, 0.03, 0.02, 0.01, 0.005)  # for the probability of a label
# Times the expected number of labels below a threshold: from here on they are likely wrong.
UNEXPLAINED = 0.5
LISTED_SHARE = 0.06  # share of the images that the list has at most, unless more are likely wrong
MAX_LISTED = 10_000
MAX_PICTURES = 24  # on the sheet
NUM_NAMED_CLASSES = 3  # classes that were not learnt, in the result's sentence
COLUMNS = ("rank", "verdict", "image", "label", "suggested", "probability", "suggested_probability")


class UnlearnedClass(NamedTuple):
    """A class most of whose images the model takes for others: too rare to be learnt."""

    class_id: int
    suggested_id: int  # the class that most of these images are taken for
    num_contradicted: int
    num_images: int


class Suspects(NamedTuple):
    """Images whose labels the model contradicts, the least probable label first."""

    indices: np.ndarray  # int64[n] of the training set
    probabilities: np.ndarray  # float64[n], of their labels
    # int64[n]: the class that is suggested, or for multi-label data to be added or taken away.
    suggested_ids: np.ndarray
    suggested_probabilities: np.ndarray  # float64[n]
    num_likely: int  # how many of the first are likely wrong; the rest is worth a look
    unlearned: list[UnlearnedClass]
    num_images: int  # that the model has predicted

    def verdict(self, index: int) -> str:
        return "likely wrong" if index < self.num_likely else "worth a look"


@torch.no_grad()
def find_suspects(
    source: Source, predictions: Iterable[tuple[Batch, Tensor]], device: torch.device | str
) -> Suspects | None:
    """Find the contradicted labels of `source`, from the logits [B, K] of all its images. A collective.

    Returns None on all processes but the main one.
    """
    num_classes = len(source.classes)
    sum_dtype = devices.get_sum_dtype(device)
    expected = torch.zeros(len(THRESHOLDS), num_classes, dtype=sum_dtype, device=device)
    predicted = [expected.new_zeros(4, 0)]
    for batch, logits in predictions:
        predicted.append(_compare_labels(source, batch, logits, expected))
    expected_sums = all_sum(expected).cpu().numpy()
    columns_by_rank = gather_to_main([torch.cat(predicted, 1).cpu().numpy()])
    if not columns_by_rank:
        return None
    columns = np.concatenate([columns for (columns,) in columns_by_rank], axis=1)
    columns = columns[:, np.lexsort((columns[0], columns[1]))]
    indices = columns[0].astype(np.int64)
    suggested_ids = columns[2].astype(np.int64)
    is_contradicted = columns[3] > columns[1]
    unlearned: list[UnlearnedClass] = []
    num_likely = 0
    if not source.multi_label:
        labels = source.labels[indices]
        unlearned = _find_unlearned(labels, suggested_ids, is_contradicted, num_classes)
        is_unlearned = np.zeros(num_classes, bool)
        is_unlearned[[entry.class_id for entry in unlearned]] = True
        is_contradicted &= ~is_unlearned[labels]
        expected_counts = [sums[~is_unlearned].sum() for sums in expected_sums]
        num_likely = _count_likely(columns[1][is_contradicted], expected_counts)
    num_images = len(indices)
    max_listed = min(MAX_LISTED, int(np.ceil(LISTED_SHARE * num_images)))
    listed = np.flatnonzero(is_contradicted)[: max(num_likely, max_listed)]
    return Suspects(
        indices=indices[listed],
        probabilities=columns[1, listed],
        suggested_ids=suggested_ids[listed],
        suggested_probabilities=columns[3, listed],
        num_likely=num_likely,
        unlearned=unlearned,
        num_images=num_images,
    )


def _find_unlearned(
    labels: np.ndarray, suggested_ids: np.ndarray, is_contradicted: np.ndarray, num_classes: int
) -> list[UnlearnedClass]:
    """Find the classes of which the model contradicts more than three quarters of the images."""
    num_images = np.bincount(labels, minlength=num_classes)
    num_contradicted = np.bincount(labels[is_contradicted], minlength=num_classes)
    unlearned = []
    for class_id in np.flatnonzero(4 * num_contradicted > 3 * num_images).tolist():
        suggestions = suggested_ids[is_contradicted & (labels == class_id)]
        unlearned.append(
            UnlearnedClass(
                class_id=class_id,
                suggested_id=int(np.bincount(suggestions).argmax()),
                num_contradicted=int(num_contradicted[class_id]),
                num_images=int(num_images[class_id]),
            )
        )
    return unlearned


def _count_likely(probabilities: np.ndarray, expected_counts: Sequence[float]) -> int:
    """Count the labels that are likely wrong, of contradicted ones with these `probabilities`.

    `expected_counts`: how many labels the model itself expects below each threshold.
    """
    for threshold, expected_count in zip(THRESHOLDS, expected_counts, strict=True):
        num_below = int((probabilities < threshold).sum())
        if num_below and num_below >= UNEXPLAINED * expected_count:
            return min(num_below, MAX_LISTED)
    return 0


def _compare_labels(source: Source, batch: Batch, logits: Tensor, expected: Tensor) -> Tensor:
    """[4, B]: index, probability of the label, the suggested class, and its probability.

    Adds to `expected` [thresholds, K] what the model itself expects to lie below each threshold.
    """
    logits = logits[batch.readable].to(expected)
    labels = batch.labels[batch.readable]
    positions = batch.positions[batch.readable]
    if source.multi_label:
        # The worst decision about an image.
        decisions = torch.where(labels, logits, -logits).sigmoid()
        label_probability, suggested = decisions.min(1)
        suggested_probability = 1 - label_probability
    else:
        probabilities = logits.softmax(1)
        label_probability = probabilities.gather(1, labels[:, None]).squeeze(1)
        suggested_probability, suggested = probabilities.scatter(1, labels[:, None], -1).max(1)
        for sums, threshold in zip(expected, THRESHOLDS, strict=True):
            sums.index_add_(0, labels, (probabilities * (probabilities < threshold)).sum(1))
    return torch.stack(
        [
            positions.to(label_probability),
            label_probability,
            suggested.to(label_probability),
            suggested_probability,
        ]
    )


def build_table(source: Source, suspects: Suspects) -> list[Sequence]:
    """Rows of `suspicious.csv`. Multi-label: `+cat` suggests to add a class, `-cat` to take it away."""
    table: list[Sequence] = [COLUMNS]
    for entry in suspects.unlearned:
        images = f"{entry.num_contradicted} of {entry.num_images} images"
        label = source.classes[entry.class_id]
        suggested = source.classes[entry.suggested_id]
        table.append((len(table), "class", images, label, suggested, "", ""))
    for i, index in enumerate(suspects.indices.tolist()):
        table.append(
            (
                len(table),
                suspects.verdict(i),
                source.get_name(index),
                _format_label(source, index),
                _format_suggestion(source, suspects, i),
                f"{suspects.probabilities[i]:.6f}",
                f"{suspects.suggested_probabilities[i]:.6f}",
            )
        )
    return table


def draw_sheet(source: Source, suspects: Suspects, path: Path) -> None:
    """Draw a sheet of the images whose labels are contradicted most."""
    cells = []
    for i, index in enumerate(suspects.indices[:MAX_PICTURES].tolist()):
        names = format_arrow(_format_label(source, index), _format_suggestion(source, suspects, i))
        caption = f"{names}\n{suspects.verdict(i)}, {suspects.probabilities[i]:.4f}"
        cells.append(make_cell(source, index, caption))
    summary = summarize(source, suspects)
    draw_cells(cells, f"{get_run_name(path)}, training (given → suggested): {summary}", path)


def summarize(source: Source, suspects: Suspects) -> str:
    """Summarize the result in a sentence."""
    text = "no label is likely wrong"
    if suspects.num_likely:
        text = f"{suspects.num_likely:,} labels are likely wrong"
    for entry in suspects.unlearned[:NUM_NAMED_CLASSES]:
        text += (
            f"; class {source.classes[entry.class_id]}: {entry.num_contradicted:,} of "
            f"{entry.num_images:,} images look like others"
        )
    num_others = len(suspects.indices) - suspects.num_likely
    return f"{text}; {num_others:,} are worth a look, of {suspects.num_images:,}"


def _format_label(source: Source, index: int) -> str:
    if not source.multi_label:
        return source.classes[source.labels[index]]
    class_ids = np.flatnonzero(source.labels[index])
    return ", ".join(source.classes[class_id] for class_id in class_ids)


def _format_suggestion(source: Source, suspects: Suspects, i: int) -> str:
    class_id = suspects.suggested_ids[i]
    name = source.classes[class_id]
    if not source.multi_label:
        return name
    has_class = source.labels[suspects.indices[i]][class_id]
    return f"-{name}" if has_class else f"+{name}"
