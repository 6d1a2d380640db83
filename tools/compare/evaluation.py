"""Evaluation of the models to compare on the same images, image by image."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.classification import Evaluation
from common.data import splits
from common.detection.evaluation.metrics import Detections
from common.distributed import is_main
from common.distributed.collectives import all_sum
from common.errors import Refused
from common.segmentation.evaluation import count_confusion
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
        """The key of the result that a run is chosen by: AP, mIoU, f1, or top1."""
        if self.trained.is_detector:
            return "AP"
        if self.trained.is_segmenter:
            return "mIoU"
        return "f1" if self.val.multi_label else "top1"


def load_candidates(runs: Sequence[Path], flags: Sequence[str]) -> list[Candidate]:
    """Load the models of the runs with their validation images.

    Raises `Refused` unless these are the same images for all.
    """
    models = []
    for path in runs:
        trained = load(str(path), flags, reads_data=True, takes_segmenters=True)
        models.append(trained)
        if trained.task != models[0].task:
            raise Refused(
                f"{runs[0]} and {path}: a model for {models[0].task} and one for {trained.task} have no "
                "result in common; name runs of the same task"
            )
    candidates: list[Candidate] = []
    for path, trained in zip(runs, models, strict=True):
        candidate = Candidate(path, trained, trained.load_data())
        candidates.append(candidate)
        first = candidates[0]
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


def build_miou(counts: np.ndarray) -> Measure:
    """Build the measure mIoU, of all images together.

    `counts` int64[N, K, 3]: of each image and class the right, the labelled and the predicted pixels.
    """
    num_images = len(counts)
    right, labelled, predicted = np.moveaxis(counts.astype(np.float64), 2, 0)
    union = labelled + predicted - right

    def compute_miou(weights: np.ndarray) -> np.ndarray:
        """Over the classes with labelled pixels; NaN without any."""
        weights = np.asarray(weights, np.float64).reshape(-1, num_images)
        is_present = weights @ labelled > 0
        ious = weights @ right / np.maximum(weights @ union, 1)
        num_present = is_present.sum(1)
        means = np.where(is_present, ious, 0).sum(1) / np.maximum(num_present, 1)
        return np.where(num_present, means, np.nan)

    return compute_miou


def evaluate(candidate: Candidate, accelerator) -> Measure | None:
    """Evaluate a model: its result as a function of how often each image counts. A collective.

    Returns None on all processes but the main one.
    """
    model, batches = candidate.trained.build(candidate.val, accelerator)
    predictions = candidate.trained.predict(batches.loader.dataset.adapt(model), batches)
    if candidate.trained.is_detector:
        return _evaluate_detector(candidate, predictions)
    if candidate.trained.is_segmenter:
        return _evaluate_segmenter(candidate.val, predictions, batches.device)
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


def _evaluate_segmenter(val: Any, predictions: Iterable[tuple], device: Any) -> Measure | None:
    num_classes = len(val.classes)
    num_outputs = num_classes
    if val.model_classes is not None:
        num_outputs += len(val.model_classes.absent_ids)
    counts = torch.zeros(len(val), num_classes, 3, dtype=torch.int64, device=device)
    num_images = torch.zeros(1, dtype=torch.int64, device=device)
    for batch, ids in predictions:
        num_images += len(ids)
        for i, index in enumerate(batch.positions.tolist()):
            is_read = bool(batch.sizes[i, 0])
            predicted = ids[i] if is_read else torch.full_like(ids[i], num_outputs)
            confusion = count_confusion(
                batch.labels[i].long(), predicted, num_classes, num_outputs + 1
            )
            right = confusion.diagonal()
            labelled = confusion.sum(1)
            num_predicted = confusion.sum(0)[:num_classes]
            counts[index] = torch.stack([right, labelled, num_predicted], dim=1)
    counts = all_sum(counts)  # 0 for images of other ranks
    num_evaluated = int(all_sum(num_images))
    if num_evaluated != len(val):
        raise RuntimeError(
            f"evaluated {num_evaluated} images of {len(val)}: each must count exactly once"
        )
    return build_miou(counts.cpu().numpy()) if is_main() else None


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
