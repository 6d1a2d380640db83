"""Detectors for export: scored by average precision, and detection by detection."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from common.detection.data.annotated import Annotated
from common.detection.data.masks import paste_masks
from common.detection.evaluation.metrics import Detections
from common.errors import Refused
from tools.export.detector_module import Exportable
from tools.export.proof import ImageDifference, Outputs, Task
from tools.trained import TrainedModel

# An image differs if a detection moves by more pixels, or changes its score by more.
MAX_MOVE = 1.0
MAX_SCORE_CHANGE = 0.01
# Share of the images that may differ: rounding can change which of two nearly equal boxes is kept.
MAX_DIFFERING_SHARE = 0.02
COLUMNS = ("boxes", "scores", "labels")


class DetectorTask(Task):
    """The task of a detector: its export is scored against the recipe's evaluation."""

    limit = 0.0005  # of average precision, of boxes and of masks

    def __init__(self, trained: TrainedModel, val: Annotated, accelerator: Any):
        super().__init__(trained, val, accelerator)
        self.max_differing = MAX_DIFFERING_SHARE * len(val)
        # Class ids of the data, by class ids of the model.
        self.data_ids = {class_id: i for i, class_id in enumerate(self.class_ids)}
        plain = self.batches.loader.dataset.augmentation
        detector = copy.deepcopy(self.model).to("cpu", torch.float32).eval()
        self.module = Exportable(detector, plain).eval()
        self.outputs = {
            "boxes": "float32[n, 4]: left, top, right, bottom in pixels of the picture",
            "scores": "float32[n] in 0..1, best first",
            "labels": "int64[n]: places in `classes`",
        }
        if trained.config.detector == "mask_rcnn":
            self.outputs["masks"] = "float32[n, 28, 28] in 0..1, each on the grid of its box"
        self.about = {
            "task": "detection",
            "family": trained.config.detector,
            "classes": list(self.classes),
            "preprocessing": {
                "short_side": max(plain.short_sides),
                "long_side": None if plain.square else plain.long_side,
                "square": plain.square,
                "mean": list(self.model.pretrained_cfg["mean"]),
                "std": list(self.model.pretrained_cfg["std"]),
            },
        }

    def read_picture(self, index: int) -> np.ndarray:
        return self.val.open_picture(index).decode().permute(1, 2, 0).numpy()

    def predict(self) -> Iterator[dict]:
        self.trained_detections = Detections()
        self.exported_detections = Detections()
        outputs: dict[int, dict] = {}
        for batch, detections in self.trained.predict(self.model, self.batches):
            for index, detection in zip(batch.positions.tolist(), detections, strict=True):
                arrays = {name: detection[name].cpu().numpy() for name in COLUMNS}
                arrays["boxes"] = arrays["boxes"].astype(np.float32)
                arrays["scores"] = arrays["scores"].astype(np.float32)
                outputs[index] = detection | arrays
        for index in range(len(self.val)):  # the loader has images of one shape together
            yield outputs.pop(index)

    def compare(self, expected: dict, outputs: Outputs) -> ImageDifference:
        return compare(expected, outputs, self.classes)

    def record(self, index: int, expected: dict, outputs: Outputs | None) -> None:
        self.trained_detections.update([index], [self._convert(expected, index)])
        self.exported_detections.update([index], [self._convert(outputs or expected, index)])

    def compute_results(self) -> dict[str, tuple[float, float]]:
        trained = self.trained_detections.results(self.val)
        exported = self.exported_detections.results(self.val)
        if trained["AP"] is None:
            raise Refused(
                "the validation set has no objects, so nothing can be proved with it; name "
                "another with --data"
            )
        names = [name for name in ("AP", "mask_AP") if name in trained]
        return {name: (trained[name], exported[name]) for name in names}

    def _convert(self, outputs: dict, index: int) -> dict:
        """Detections with the class ids of the data, without classes that it does not have."""
        labels = [self.data_ids.get(label, -1) for label in outputs["labels"].tolist()]
        class_ids = np.array(labels, np.int64)
        rows = np.flatnonzero(class_ids >= 0)
        detections: dict[str, Any] = {
            "boxes": torch.from_numpy(outputs["boxes"][rows]),
            "scores": torch.from_numpy(outputs["scores"][rows]),
            "labels": torch.from_numpy(class_ids[rows]),
        }
        if "rles" in outputs:
            detections["rles"] = [outputs["rles"][row] for row in rows.tolist()]
        elif "masks" in outputs:
            masks = torch.from_numpy(outputs["masks"][rows])
            detections["rles"] = paste_masks(masks, detections["boxes"], self.val.sizes[index])
        return detections


def compare(trained: dict, exported: Outputs, classes: Sequence[str]) -> ImageDifference:
    """Find the counterpart of each detection, in both directions: one of its class, near in place and score.

    Detections whose score is nearly the lowest may be missing: they are at the threshold, or the
    last ones within the limit.
    """
    difference = ImageDifference({"boxes": 0.0, "scores": 0.0})
    _compare_one_way(difference, trained, exported, classes, "missing")
    _compare_one_way(difference, exported, trained, classes, "new")
    return difference


def _compare_one_way(
    difference: ImageDifference,
    detections: dict,
    candidates: dict,
    classes: Sequence[str],
    unmatched: str,
) -> None:
    """Update `difference` by the detections' counterparts; one without any is called `unmatched`."""
    scores = detections["scores"]
    is_near_lowest = scores <= scores.min(initial=1.0) + MAX_SCORE_CHANGE
    rows = np.flatnonzero(~is_near_lowest)
    if not len(rows):
        return
    moves = np.abs(detections["boxes"][rows, None] - candidates["boxes"]).max(-1)
    score_changes = np.abs(scores[rows, None] - candidates["scores"])
    # The last column stands for no counterpart.
    no_counterpart = ((0, 0), (0, 1))
    moves = np.pad(moves, no_counterpart, constant_values=np.inf)
    score_changes = np.pad(score_changes, no_counterpart, constant_values=np.inf)
    distances = np.maximum(moves / MAX_MOVE, score_changes / MAX_SCORE_CHANGE)
    is_other_class = detections["labels"][rows, None] != candidates["labels"]
    distances[:, :-1][is_other_class] = np.inf

    nearest = distances.argmin(1)
    indices = np.arange(len(rows))
    distance = distances[indices, nearest]
    move = moves[indices, nearest]
    score_change = score_changes[indices, nearest]
    is_matched = distance <= 1
    largest = difference.largest
    largest["boxes"] = max(largest["boxes"], float(move[is_matched].max(initial=0)))
    largest["scores"] = max(largest["scores"], float(score_change[is_matched].max(initial=0)))

    worst = int(distance.argmax())
    if not distance[worst] <= difference.worst:
        difference.worst = float(distance[worst])
        row = rows[worst]
        box = np.rint(detections["boxes"][row]).astype(int).tolist()
        title = f"{classes[detections['labels'][row]]} {scores[row]:.4f} at {box}"
        if np.isinf(distance[worst]):
            difference.text = f"{title} is {unmatched}"
        else:
            difference.text = (
                f"{title} moved by {move[worst]:.3g} pixels and {score_change[worst]:.3g}"
            )
