"""Detectors for export: scored by average precision, and detection by detection, against the
recipe's evaluation.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from common.detection.data.annotated import Annotated
from common.detection.data.masks import encode_logits, pasted
from common.detection.evaluation.metrics import Detections
from common.errors import Refused
from tools.export.detector_module import Exportable
from tools.export.proof import Apart, Outputs, Task
from tools.trained import Trained

# An image differs if a detection moves by more pixels, or changes its score by more.
MOVED_BOX, MOVED_SCORE = 1.0, 0.01
# Share of the images that may differ: rounding can change which of two nearly equal boxes is kept.
DIFFERING = 0.02
COLUMNS = ("boxes", "scores", "labels")


class DetectorTask(Task):
    """The task of a detector, for the proof."""

    limit = 0.0005  # of average precision, of boxes and of masks

    def __init__(self, trained: Trained, val: Annotated, accelerator: Any):
        super().__init__(trained, val, accelerator)
        self.most_differing = DIFFERING * len(val)
        self.ids = {class_id: number for number, class_id in enumerate(self.class_ids)}
        plain = self.batches.loader.dataset.augmentation
        self.module = Exportable(
            copy.deepcopy(self.model).to("cpu", torch.float32).eval(), plain
        ).eval()
        self.outputs = {
            "boxes": "float32[n, 4]: left, top, right, bottom in pixels of the picture",
            "scores": "float32[n] in 0..1, best first",
            "labels": "int64[n]: places in `classes`",
        }
        if trained.config.detector == "mask_rcnn":
            self.outputs["masks"] = "float32[n, 28, 28] in 0..1, each on the grid of its box"
        if trained.config.detector == "rf_detr_seg":
            self.outputs["mask_logits"] = "float32[n, h, w], each on a grid of the whole picture"
        self.about = {
            "task": "detection",
            "family": trained.config.detector,
            "classes": list(self.classes),
            "preprocessing": {
                "short_side": max(plain.short_sides),
                "long_side": None if plain.square else plain.long_side,
                "square": plain.square,
                **{key: [*self.model.pretrained_cfg[key]] for key in ("mean", "std")},
            },
        }

    def picture(self, index: int) -> np.ndarray:
        return self.val.picture(index).whole().permute(1, 2, 0).numpy()

    def expected(self) -> Iterator[dict]:
        self.both, found = (Detections(), Detections()), dict[int, dict]()
        for batch, detections in self.trained.predict(self.model, self.batches):
            for index, one in zip(batch.positions.tolist(), detections, strict=True):
                found[index] = one | {name: one[name].cpu().numpy() for name in COLUMNS}
                found[index] |= {
                    name: found[index][name].astype(np.float32) for name in ("boxes", "scores")
                }
        for index in range(len(self.val)):  # the loader has images of one shape together
            yield found.pop(index)

    def compare(self, expected: dict, found: Outputs) -> Apart:
        return compare(expected, found, self.classes)

    def count(self, index: int, expected: dict, found: Outputs | None) -> None:
        for detections, of_image in zip(self.both, (expected, found or expected), strict=True):
            detections.update([index], [self._of_data(of_image, index)])

    def results(self) -> dict[str, tuple[float, float]]:
        trained, exported = (detections.results(self.val) for detections in self.both)
        if trained["AP"] is None:
            raise Refused(
                "the validation set has no objects, so nothing can be proved with it; name "
                "another with --data"
            )
        return {
            name: (trained[name], exported[name]) for name in ("AP", "mask_AP") if name in trained
        }

    def _of_data(self, found: dict, index: int) -> dict:
        """Detections with the class ids of the data, without classes that it does not have."""
        ids = np.array([self.ids.get(label, -1) for label in found["labels"].tolist()], np.int64)
        rows = np.flatnonzero(ids >= 0)
        columns = {
            "boxes": found["boxes"][rows],
            "scores": found["scores"][rows],
            "labels": ids[rows],
        }
        result: dict[str, Any] = {
            name: torch.from_numpy(column) for name, column in columns.items()
        }
        if "rles" in found:
            result["rles"] = [found["rles"][row] for row in rows.tolist()]
        elif "masks" in found:
            masks = torch.from_numpy(found["masks"][rows])
            result["rles"] = pasted(masks, result["boxes"], self.val.sizes[index])
        elif "mask_logits" in found:
            logits = torch.from_numpy(found["mask_logits"][rows])
            result["rles"] = encode_logits(logits, self.val.sizes[index])
        return result


def compare(trained: dict, exported: Outputs, classes: Sequence[str]) -> Apart:
    """Find the counterpart of each detection, in both directions: one of its class, near in place and score.

    Detections whose score is nearly the lowest may be missing: they are at the threshold, or the
    last ones within the limit.
    """
    result = Apart({"boxes": 0.0, "scores": 0.0})
    for these, others, word in ((trained, exported, "missing"), (exported, trained, "new")):
        rows = np.flatnonzero(~(these["scores"] <= these["scores"].min(initial=1.0) + MOVED_SCORE))
        if not len(rows):
            continue
        # With a column for none at the end.
        none = ((0, 0), (0, 1))
        box = np.pad(
            np.abs(these["boxes"][rows, None] - others["boxes"]).max(-1),
            none,
            constant_values=np.inf,
        )
        score = np.pad(
            np.abs(these["scores"][rows, None] - others["scores"]), none, constant_values=np.inf
        )
        far = np.maximum(box / MOVED_BOX, score / MOVED_SCORE)
        far[:, :-1][these["labels"][rows, None] != others["labels"]] = np.inf
        nearest = np.arange(len(rows)), far.argmin(1)
        both = far[nearest] <= 1
        for name, distances in (("boxes", box), ("scores", score)):
            result.moved[name] = max(
                result.moved[name], float(distances[nearest][both].max(initial=0))
            )
        worst = int(far[nearest].argmax())
        if not far[nearest][worst] <= result.worst:
            row, result.worst = rows[worst], float(far[nearest][worst])
            place = np.rint(these["boxes"][row]).astype(int).tolist()
            what = f"{classes[these['labels'][row]]} {these['scores'][row]:.4f} at {place}"
            moved = f"moved by {box[nearest][worst]:.3g} pixels and {score[nearest][worst]:.3g}"
            result.words = (
                f"{what} is {word}" if np.isinf(far[nearest][worst]) else f"{what} {moved}"
            )
    return result
