"""Detectors for export: scored by average precision, and detection by detection, against the recipe's evaluation."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.detection import Detections
from common.detection.data.annotated import Annotated
from common.detection.data.masks import pasted
from common.errors import Refused
from tools.export.detector_module import Exportable
from tools.export.proof import Vector, Verdict, chosen, pictures_of
from tools.export.verify import Session
from tools.trained import Trained

AP_LIMIT = 0.0005  # difference of average precision, of boxes and of masks
MOVED_BOX, MOVED_SCORE = 1.0, 0.01  # an image differs if a detection moves by more pixels, or changes its score by more
DIFFERING = 0.02  # share of the images that may differ: rounding can change which of two nearly equal boxes is kept
_FLOOR, _SPARE = {"boxes": 1e-2, "scores": 1e-4}, 4.0  # verify.py tolerates these, or so many times what was measured


class DetectorTask:
    """What a detector tells the framework, see `tools.export.proof.Task`.

    `places` has the model's class id of each class of `val`, the images to evaluate.
    """

    batched = False

    def __init__(self, trained: Trained, val: Annotated, places: Sequence[int], accelerator: Any):
        self._model, self._normalize, self._loader = trained.build(val, accelerator.device)
        self._recipe, self._accelerator = trained.recipe, accelerator
        self._val, self._classes = val, trained.classes
        self._ids = {place: number for number, place in enumerate(places)}
        plain = self._loader.dataset.augmentation
        self.module = Exportable(copy.deepcopy(self._model).to("cpu", torch.float32).eval(), plain).eval()
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
            "classes": list(trained.classes),
            "preprocessing": {
                "short_side": max(plain.short_sides),
                "long_side": None if plain.square else plain.long_side,
                "square": plain.square,
                **{key: [*self._model.pretrained_cfg[key]] for key in ("mean", "std")},
            },
        }

    def judge(self, session: Session) -> Verdict:
        """Evaluate both models on every image, and look for the counterpart of each detection."""
        count, keep, verdict = len(self._val), chosen(len(self._val)), Verdict()
        trained, both = self._trained(), (Detections(), Detections())
        apart, unreadable = [], 0
        pictures = pictures_of(self._decoded, count)
        for index, picture in enumerate(tqdm(pictures, desc="proof", total=count, unit=" images", leave=False)):
            expected = exported = trained[index]
            if picture is None:  # black for the evaluation
                unreadable += 1
            else:
                found = session(picture)
                if not_finite := [name for name, column in found.items() if not np.isfinite(column).all()]:
                    raise Refused(
                        f"{self._val.name(index)}: {not_finite[0]} of the exported model are not finite numbers"
                    )
                exported = {name: torch.from_numpy(column) for name, column in found.items()}
                columns = {name: expected[name].numpy() for name in ("boxes", "scores", "labels")}
                apart.append((compare(columns, found, self._classes), self._val.name(index)))
                if index in keep and not apart[-1][0].differs:
                    verdict.vectors.append(Vector(self._val.name(index), picture, columns))
            for detections, of_image in zip(both, (expected, exported), strict=True):
                detections.update([index], [self._of_data(of_image, index)])
        if not apart:
            raise Refused(f"none of the {count} validation images can be read")
        self._conclude(verdict, both[0].results(self._val), both[1].results(self._val), apart)
        verdict.figures = {"images": len(apart), "unreadable": unreadable} | verdict.figures
        return verdict

    def _decoded(self, index: int) -> np.ndarray:
        """A picture as the evaluation decodes it."""
        return self._val.picture(index).whole().permute(1, 2, 0).numpy()

    def _conclude(self, verdict: Verdict, trained: dict, exported: dict, apart: list[tuple["Apart", str]]) -> None:
        """Figures, tolerance, and a refusal if average precision differs or too many images do."""
        if trained["AP"] is None:
            raise Refused(
                "the validation set has no objects, so nothing can be proved with it; name another with --data"
            )
        names = [name for name in ("AP", "mask_AP") if name in trained]
        for name in names:
            verdict.figures |= {name: trained[name], f"{name}_exported": exported[name]}
        wrong = [(each, name) for each, name in apart if each.differs]
        largest = {"boxes": max(each.box for each, _ in apart), "scores": max(each.score for each, _ in apart)}
        verdict.figures |= {"differing": len(wrong)}
        verdict.figures |= {f"largest_{name}_difference": value for name, value in largest.items()}
        verdict.tolerance = {name: max(_FLOOR[name], _SPARE * value) for name, value in largest.items()}
        verdict.worst = [f"{name}: {each.words}" for each, name in sorted(wrong, key=lambda row: -row[0].worst)]
        moved = [
            f"{name} is {exported[name]:.4f} instead of {trained[name]:.4f}"
            for name in names
            if not abs(exported[name] - trained[name]) <= AP_LIMIT
        ]
        if moved or len(wrong) > DIFFERING * len(apart):
            verdict.refusal = "; ".join([*moved, f"{len(wrong)} of {len(apart)} images differ from the trained model"])

    def _trained(self) -> dict[int, dict]:
        """What the trained model finds in each image, through the recipe's evaluation."""
        found = {}
        with tqdm(total=len(self._val), desc="evaluation", unit=" images", leave=False) as bar:
            for batch, detections in self._recipe.predict(
                self._model, self._loader, self._accelerator, self._normalize
            ):
                for index, of_image in zip(batch.positions.tolist(), detections, strict=True):
                    found[index] = {
                        name: column.float().cpu() if name in ("boxes", "scores") else column
                        for name, column in of_image.items()
                    }
                    found[index]["labels"] = of_image["labels"].cpu()
                bar.update(len(batch.positions))
        return found

    def _of_data(self, found: dict, index: int) -> dict:
        """Detections with the class ids of the data, without classes that it does not have."""
        ids = torch.tensor([self._ids.get(label, -1) for label in found["labels"].tolist()], dtype=torch.int64)
        rows = (ids >= 0).nonzero().flatten()
        result = {"boxes": found["boxes"][rows], "scores": found["scores"][rows], "labels": ids[rows]}
        if "masks" in found:
            result["rles"] = pasted(found["masks"][rows], result["boxes"], self._val.sizes[index])
        elif "rles" in found:
            result["rles"] = [found["rles"][row] for row in rows.tolist()]
        return result


@dataclass
class Apart:
    """How the detections of the exported model in one image differ from the trained one's."""

    box: float = 0.0  # largest distance of an edge in pixels, of detections that both have
    score: float = 0.0
    worst: float = 0.0  # of the detection that has the farthest counterpart; above 1 it has none
    words: str = ""  # about that detection

    @property
    def differs(self) -> bool:
        return not self.worst <= 1


def compare(trained: dict[str, np.ndarray], exported: dict[str, np.ndarray], classes: Sequence[str]) -> Apart:
    """Find the counterpart of each detection, in both directions: one of its class, near in place and score.

    Detections whose score is nearly the lowest may be missing: they are at the threshold, or the last ones within the limit.
    """
    result = Apart()
    for these, others, word in ((trained, exported, "missing"), (exported, trained, "new")):
        rows = np.flatnonzero(~(these["scores"] <= these["scores"].min(initial=1.0) + MOVED_SCORE))
        if not len(rows):
            continue
        # With a column for none at the end.
        none = ((0, 0), (0, 1))
        box = np.pad(np.abs(these["boxes"][rows, None] - others["boxes"]).max(-1), none, constant_values=np.inf)
        score = np.pad(np.abs(these["scores"][rows, None] - others["scores"]), none, constant_values=np.inf)
        far = np.maximum(box / MOVED_BOX, score / MOVED_SCORE)
        far[:, :-1][these["labels"][rows, None] != others["labels"]] = np.inf
        nearest = np.arange(len(rows)), far.argmin(1)
        both = far[nearest] <= 1
        result.box = max(result.box, float(box[nearest][both].max(initial=0)))
        result.score = max(result.score, float(score[nearest][both].max(initial=0)))
        worst = int(far[nearest].argmax())
        if not far[nearest][worst] <= result.worst:
            row, result.worst = rows[worst], float(far[nearest][worst])
            place = np.rint(these["boxes"][row]).astype(int).tolist()
            what = f"{classes[these['labels'][row]]} {these['scores'][row]:.4f} at {place}"
            moved = f"moved by {box[nearest][worst]:.3g} pixels and {score[nearest][worst]:.3g}"
            result.words = f"{what} is {word}" if np.isinf(far[nearest][worst]) else f"{what} {moved}"
    return result
