"""Evaluation of the models to compare on the same images, image by image."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.classification import Evaluation
from common.data import splits
from common.detection.evaluation.metrics import Detections
from common.distributed import is_main
from common.errors import Refused
from tools.compare.average_precision import AveragePrecision
from tools.compare.bootstrap import Measure
from tools.trained import Trained, load

_BOXES = ("boxes", "scores", "labels")  # of a detection; masks are not compared


@dataclass(frozen=True)
class Candidate:
    """A run's model and the images to evaluate it on."""

    path: Path
    trained: Trained
    val: Any

    @property
    def part(self) -> str:
        return splits.describe(self.trained.config.data, self.val)

    @property
    def metric(self) -> str:
        """The key of the result that a run is chosen by: AP, f1, or top1."""
        return "AP" if self.trained.is_detector else "f1" if self.val.multi_label else "top1"


def find(runs: Sequence[Path], flags: Sequence[str]) -> list[Candidate]:
    """The models of the runs with their validation images. Raises `Refused` unless these are the
    same images for all.
    """
    found: list[Candidate] = []
    for path in runs:
        trained = load(str(path), flags, reads_data=True)
        found.append(Candidate(path, trained, trained.load_data()))
        first, here = found[0], found[-1]
        if here.trained.is_detector != first.trained.is_detector:
            raise Refused(
                f"{first.path} and {path}: a classifier and a detector have no result in common"
            )
        if here.val.fingerprint != first.val.fingerprint:
            raise Refused(
                f"{first.path} and {path}: would be evaluated on different images or labels "
                f"({first.part}; {here.part}): name the same for all, by --data FOLDER and "
                "--split PART"
            )
    return found


def f1(counts: np.ndarray) -> Measure:
    """F1 of all decisions together; `counts` int64[N, 2]: of each image the right positive and the
    wrong decisions.
    """
    right, wrong = counts.astype(np.float64).T

    def measured(weights: np.ndarray) -> np.ndarray:
        hits, misses = 2 * weights @ right, weights @ wrong
        return hits / np.maximum(hits + misses, 1e-12)

    return measured


def measure(candidate: Candidate, accelerator) -> Measure | None:
    """Evaluate: the model's result as a function of how often each image counts; None but on the
    main process. A collective.
    """
    model, batches = candidate.trained.build(candidate.val, accelerator)
    predictions = candidate.trained.predict(batches.loader.dataset.adapt(model), batches)
    if candidate.trained.is_detector:
        return _measure_detector(candidate, predictions)
    return _measure_classifier(candidate.val, predictions, batches.device)


def _measure_classifier(val: Any, predictions: Iterable[tuple], device: Any) -> Measure | None:
    evaluation = Evaluation(val, device)
    for batch, logits in predictions:
        evaluation.update(batch, logits)
    evaluation.results()  # gathers them, and checks that each image counts once
    if not is_main():
        return None
    predicted = evaluation.predicted.numpy()
    is_read = ~np.isnan(evaluation.scores[:, 0].numpy())
    if val.multi_label:
        decisions = predicted.astype(bool) & is_read[:, None]
        right = (decisions & val.labels).sum(1)
        wrong = (decisions ^ val.labels).sum(1)
        return f1(np.stack([right, wrong], axis=1))
    is_right = (predicted == val.labels) & is_read
    return lambda weights: weights @ is_right / weights.sum(1)


def _measure_detector(candidate: Candidate, predictions: Iterable[tuple]) -> Measure | None:
    found = Detections()
    for batch, detections in predictions:
        found.update(
            batch.positions.tolist(), [{key: one[key] for key in _BOXES} for one in detections]
        )
    count = found.results(candidate.val)["count"]  # also gathers them
    expected = len(candidate.val)
    if count != expected:
        raise RuntimeError(f"evaluated {count} images of {expected}: each must count exactly once")
    return AveragePrecision(candidate.val, *found.to_arrays()) if is_main() else None
