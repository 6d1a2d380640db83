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
from tools.trained import TrainedModel, load

_BOX_KEYS = ("boxes", "scores", "labels")  # of a detection; masks are not compared


@dataclass(frozen=True)
class Candidate:
    """A run's model and the images to evaluate it on."""

    path: Path
    trained: TrainedModel
    val: Any

    @property
    def split(self) -> str:
        """What the validation images are, for people."""
        return splits.describe_eval_data(self.trained.config.data, self.val)

    @property
    def metric(self) -> str:
        """The key of the result that a run is chosen by: AP, f1, or top1."""
        if self.trained.is_detector:
            return "AP"
        return "f1" if self.val.multi_label else "top1"


def load_candidates(runs: Sequence[Path], flags: Sequence[str]) -> list[Candidate]:
    """Load the models of the runs with their validation images.

    Raises `Refused` unless these are the same images for all.
    """
    candidates: list[Candidate] = []
    for path in runs:
        trained = load(str(path), flags, reads_data=True)
        candidate = Candidate(path, trained, trained.load_data())
        candidates.append(candidate)
        first = candidates[0]
        if trained.is_detector != first.trained.is_detector:
            raise Refused(
                f"{first.path} and {path}: a classifier and a detector have no result in common"
            )
        if candidate.val.fingerprint != first.val.fingerprint:
            raise Refused(
                f"{first.path} and {path}: would be evaluated on different images or labels "
                f"({first.split}; {candidate.split}): name the same for all, by --data FOLDER and "
                "--split PART"
            )
    return candidates


def build_f1(counts: np.ndarray) -> Measure:
    """Build the measure F1 of all decisions together.

    `counts` int64[N, 2]: of each image the right positive and the wrong decisions.
    """
    right, wrong = counts.astype(np.float64).T

    def compute_f1(weights: np.ndarray) -> np.ndarray:
        hits = 2 * weights @ right
        misses = weights @ wrong
        return hits / np.maximum(hits + misses, 1e-12)

    return compute_f1


def evaluate(candidate: Candidate, accelerator) -> Measure | None:
    """Evaluate a model: its result as a function of how often each image counts. A collective.

    Returns None on all processes but the main one.
    """
    model, batches = candidate.trained.build(candidate.val, accelerator)
    predictions = candidate.trained.predict(batches.loader.dataset.adapt(model), batches)
    if candidate.trained.is_detector:
        return _evaluate_detector(candidate, predictions)
    return _evaluate_classifier(candidate.val, predictions, batches.device)


def _evaluate_classifier(val: Any, predictions: Iterable[tuple], device: Any) -> Measure | None:
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
        return build_f1(np.stack([right, wrong], axis=1))
    is_right = (predicted == val.labels) & is_read
    return lambda weights: weights @ is_right / weights.sum(1)


def _evaluate_detector(candidate: Candidate, predictions: Iterable[tuple]) -> Measure | None:
    detections = Detections()
    for batch, outputs in predictions:
        boxes = []
        for output in outputs:
            boxes.append({key: output[key] for key in _BOX_KEYS})
        detections.update(batch.positions.tolist(), boxes)
    num_images = detections.results(candidate.val)["count"]  # also gathers them
    expected = len(candidate.val)
    if num_images != expected:
        raise RuntimeError(
            f"evaluated {num_images} images of {expected}: each must count exactly once"
        )
    if not is_main():
        return None
    images, rows = detections.to_arrays()
    return AveragePrecision(candidate.val, images, rows)
