"""Training labels that the trained model contradicts: likely wrong, or only worth a look.

At the end of a run the model looks at its training images once more, without augmentation. A label is likely wrong if the model
gives it a probability of less than 5 %, and if such labels are more than the model's own doubt explains. Where all labels are
right, at most 0.4 times as many are there as its probabilities let expect, since it has trained on them; where 5 % are wrong,
0.8 to 0.9 times as many (measured: docs/after_training.md). Else a lower threshold is tried. Source of the ranking by loss:
Arazo et al., "Unsupervised Label Noise Modeling and Loss Correction", 2019.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.classification import plots
from common.classification.batches import Batch
from common.data.source import Source
from common.distributed.collectives import all_sum, gather_to_main
from common.run.run import Run

THRESHOLDS = (0.05, 0.04, 0.03, 0.02, 0.01, 0.005)  # for the probability of a label
UNEXPLAINED = 0.5  # labels below a threshold are likely wrong if they are so many times the expected number
WORST, MOST = 0.06, 10_000  # of the images, and rows: the length of the list
SHOWN = 24  # images on the sheet
COLUMNS = ("rank", "verdict", "image", "label", "suggested", "probability", "suggested_probability")


class Suspects(NamedTuple):
    """Images whose labels the model contradicts, the least probable label first."""

    indices: np.ndarray  # int64[n] of the training set
    probabilities: np.ndarray  # float64[n], of their labels
    others: np.ndarray  # int64[n]: the class that is suggested, or for multi-label data to be added or taken away
    others_probabilities: np.ndarray  # float64[n]
    likely: int  # the first so many are likely wrong, the others are worth a look
    classes: list[
        tuple[int, int, int, int]
    ]  # class, suggested class, images that look like others, images: mostly contradicted
    looked_at: int  # images


class Look:
    """What the model says of the training labels. Give it every batch of training images once, on any rank."""

    def __init__(self, source: Source, device: torch.device | str):
        self._source = source
        precise = torch.float32 if torch.device(device).type == "mps" else torch.float64
        self._expected = torch.zeros(len(THRESHOLDS), len(source.classes), dtype=precise, device=device)
        self._rows = [
            torch.zeros(4, 0, dtype=precise, device=device)
        ]  # index, probability, other class, its probability

    @torch.no_grad()
    def update(self, batch: Batch, logits: torch.Tensor) -> None:
        """Count a batch of training images, evaluated without augmentation, with its logits [B, K]."""
        logits = logits[batch.readable].to(self._expected)
        labels, positions = batch.labels[batch.readable], batch.positions[batch.readable]
        if self._source.multi_label:
            given, other = torch.where(labels, logits, -logits).sigmoid().min(1)  # the decision that fits worst
            probability = 1 - given
        else:
            probabilities = logits.softmax(1)
            given = probabilities.gather(1, labels[:, None]).squeeze(1)
            probability, other = probabilities.scatter(1, labels[:, None], -1).max(1)
            for sums, threshold in zip(self._expected, THRESHOLDS, strict=True):
                sums.index_add_(0, labels, (probabilities * (probabilities < threshold)).sum(1))
        self._rows.append(torch.stack([positions.to(given), given, other.to(given), probability]))

    def suspects(self) -> Suspects | None:
        """What was found, on the main process. A collective."""
        expected = all_sum(self._expected).cpu().numpy()
        of_ranks = gather_to_main([torch.cat(self._rows, 1).cpu().numpy()])
        if not of_ranks:
            return None
        rows = np.concatenate([rows for (rows,) in of_ranks], axis=1)
        rows = rows[:, np.lexsort((rows[0], rows[1]))]
        indices, others, looked_at = rows[0].astype(np.int64), rows[2].astype(np.int64), rows.shape[1]
        contradicted, classes, likely = rows[3] > rows[1], [], 0
        if not self._source.multi_label:
            labels = self._source.labels[indices]
            unlearned = self._unlearned(labels, contradicted)
            classes = [
                self._class(number, labels, others, contradicted) for number in np.flatnonzero(unlearned).tolist()
            ]
            contradicted &= ~unlearned[labels]
            for threshold, sums in zip(THRESHOLDS, expected, strict=True):
                below = int((contradicted & (rows[1] < threshold)).sum())
                if below >= UNEXPLAINED * sums[~unlearned].sum() and not likely:
                    likely = min(below, MOST)
        listed = np.flatnonzero(contradicted)[: max(likely, min(MOST, int(np.ceil(WORST * looked_at))))]
        return Suspects(indices[listed], rows[1, listed], others[listed], rows[3, listed], likely, classes, looked_at)

    def _unlearned(self, labels: np.ndarray, contradicted: np.ndarray) -> np.ndarray:
        """bool[K]: the classes three quarters of whose images look like others, as those of a class too rare to be learnt."""
        images, wrong = (
            np.bincount(part, minlength=len(self._source.classes)) for part in (labels, labels[contradicted])
        )
        return 4 * wrong > 3 * images

    @staticmethod
    def _class(
        number: int, labels: np.ndarray, others: np.ndarray, contradicted: np.ndarray
    ) -> tuple[int, int, int, int]:
        wrong = others[contradicted & (labels == number)]
        return number, int(np.bincount(wrong).argmax()), len(wrong), int((labels == number).sum())


@torch.compiler.set_stance("force_eager")
def report(run: Run, source: Source, batches: Iterable[tuple[Batch, torch.Tensor]]) -> None:
    """Write `suspicious.csv` and a picture; `batches` are of training images with their logits."""
    look = Look(source, run.accelerator.device)
    for batch, logits in batches:
        look.update(batch, logits)
    run.model.train()
    judged = source, look.suspects()
    run.table("suspicious", rows, *judged)
    run.draw("suspicious", draw, *judged)


def rows(source: Source, suspects: Suspects) -> list[Sequence]:
    """The rows of `suspicious.csv`. Multi-label data: the suggestion is a class to add, `+cat`, or to take away, `-cat`."""
    table: list[Sequence] = [COLUMNS]
    for number, other, wrong, images in suspects.classes:
        names = f"{wrong} of {images} images", source.classes[number], source.classes[other]
        table.append((len(table), "class", *names, "", ""))
    for place, index in enumerate(suspects.indices.tolist()):
        verdict = "likely wrong" if place < suspects.likely else "worth a look"
        names = source.name(index), _label(source, index), _suggested(source, suspects, place)
        numbers = (f"{part[place]:.6f}" for part in (suspects.probabilities, suspects.others_probabilities))
        table.append((len(table), verdict, *names, *numbers))
    return table


def draw(source: Source, suspects: Suspects, path: Path) -> None:
    """Draw a sheet of the images whose labels are contradicted most."""
    shown = []
    for place, index in enumerate(suspects.indices[:SHOWN].tolist()):
        number = f"{'likely wrong' if place < suspects.likely else 'worth a look'}, {suspects.probabilities[place]:.4f}"
        shown.append((index, _label(source, index), _suggested(source, suspects, place), number))
    plots.suspicious(source, shown, headline(source, suspects), path)


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
