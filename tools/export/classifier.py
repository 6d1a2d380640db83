"""Classifiers for export: a picture of any size -> probabilities; scored image by image against the recipe's evaluation."""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from common.data import Source
from common.errors import Refused
from tools.export.preprocessing import KERNELS, Preprocessing
from tools.export.proof import Vector, Verdict, chosen, pictures_of
from tools.export.verify import Session
from tools.trained import Trained

MOVED = 0.05  # an image differs if a probability moves by more, also if its top-1 stays
_FLOOR = 1e-4  # of the tolerance in probability that verify.py applies on other machines
_SPARE = 4.0  # it is at least this many times the largest difference that was measured


class Classifier(torch.nn.Module):
    """uint8[N, 3, height, width] -> float32[N, K]: probabilities that sum to 1, or one of each class for multi-label data."""

    def __init__(self, model: torch.nn.Module, preprocessing: Preprocessing, multi_label: bool):
        super().__init__()
        self.preprocessing, self.model, self.multi_label = preprocessing, model, multi_label

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return probabilities(self.model(self.preprocessing(images)), self.multi_label)


def probabilities(logits: torch.Tensor, multi_label: bool) -> torch.Tensor:
    """[N, K], of each class by itself for multi-label data, else of all classes together."""
    return logits.sigmoid() if multi_label else logits.softmax(1)


def preprocessing_of(config: dict) -> Preprocessing:
    """What timm's evaluation transform does for this data configuration. Raises `Refused` for a filter that it can't be."""
    if config["interpolation"] not in KERNELS or config["crop_pct"] > 1:
        raise Refused(
            f"the model's images are resized with {config['interpolation']} and crop_pct {config['crop_pct']}; an exported "
            f"classifier resizes with {' or '.join(KERNELS)} and a crop_pct of at most 1"
        )
    size = tuple(config["input_size"][1:])
    covered = tuple(math.floor(side / config["crop_pct"]) for side in size)
    return Preprocessing(size, covered, config["interpolation"], config["mean"], config["std"])


class Compared(NamedTuple):
    """One image by the trained and by the exported model."""

    differs: bool
    moved: float  # the largest difference in probability
    right: tuple[float, float]  # 1 if the model is right; for multi-label data the share of right decisions
    words: str


class ClassifierTask:
    """What a classifier tells the framework, see `tools.export.proof.Task`.

    `places` has the model's class id of each class of `val`, the images to evaluate. Of these, `differing` may differ.
    """

    batched = True

    def __init__(self, trained: Trained, val: Source, places: Sequence[int], accelerator: Any, differing: int = 0):
        self._model, self._normalize, self._loader = trained.build(val, accelerator.device)
        self._recipe, self._accelerator = trained.recipe, accelerator
        self._val, self._places, self._classes, self._differing = val, np.array(places), trained.classes, differing
        config = getattr(self._loader.dataset.transform, "data_config", None)
        if config is None:
            raise Refused(
                f"{trained.recipe.__file__}: evaluates images by a transform of its own, which can't be exported; use "
                "common.classification.transforms.evaluation_transform"
            )
        preprocessing = preprocessing_of(config)
        model = copy.deepcopy(self._model).to("cpu", torch.float32)
        self.module = Classifier(model, preprocessing, val.multi_label).eval()
        kind = "of each class by itself" if val.multi_label else "that sum to 1"
        self.outputs = {"probabilities": f"float32[N, {len(trained.classes)}] {kind}"}
        self.about = {
            "task": "classification",
            "classes": list(trained.classes),
            "multi_label": val.multi_label,
            "preprocessing": {
                "resized_to_cover": preprocessing.covered,
                "cropped_to": preprocessing.size,
                **{key: config[key] for key in ("interpolation", "mean", "std")},
            },
        }

    def judge(self, session: Session) -> Verdict:
        """Score every image by the exported model and by the recipe; an image differs by its top-1 or by `MOVED`.

        For multi-label data each class is a decision, and an image differs if one of them does.
        """
        count, keep, verdict = len(self._val), chosen(len(self._val)), Verdict()
        pictures, rows = pictures_of(self._val.image, count), []
        with tqdm(total=count, desc="proof", unit=" images", leave=False, disable=None) as bar:
            for batch, logits in self._recipe.predict(self._model, self._loader, self._accelerator, self._normalize):
                expected = probabilities(logits.float(), self._val.multi_label).cpu().numpy()
                for index, readable, trained in zip(batch.positions.tolist(), batch.readable, expected, strict=True):
                    bar.update()
                    picture = next(pictures)
                    if picture is None or not readable:
                        continue
                    (exported,) = session(picture)["probabilities"]
                    rows.append(self._compare(index, trained, exported))
                    if index in keep:
                        verdict.vectors.append(Vector(self._val.name(index), picture, {"probabilities": trained}))
        if not rows:
            raise Refused(f"none of the {count} validation images can be read")
        wrong = [row for row in rows if row.differs]
        largest, name = max(row.moved for row in rows), "accuracy" if self._val.multi_label else "top1"
        verdict.figures = {
            "images": len(rows),
            "unreadable": count - len(rows),
            name: float(np.mean([row.right[0] for row in rows])),
            f"{name}_exported": float(np.mean([row.right[1] for row in rows])),
            "differing": len(wrong),
            "largest_difference": largest,
        }
        verdict.tolerance = {"probabilities": max(_FLOOR, _SPARE * largest)}
        verdict.worst = [row.words for row in sorted(wrong, key=lambda row: -row.moved)]
        if len(wrong) > self._differing:
            verdict.refusal = (
                f"{len(wrong)} of {len(rows)} images differ from the trained model (--differing {self._differing})"
            )
        return verdict

    def _compare(self, index: int, trained: np.ndarray, exported: np.ndarray) -> Compared:
        moved, label = np.abs(trained - exported), self._val.labels[index]
        place = int(moved.argmax())
        if self._val.multi_label:
            decisions = trained > 0.5, exported > 0.5
            differs = bool((decisions[0] != decisions[1]).any())
            right = [float((decision[self._places] == label).mean()) for decision in decisions]
            words = f"{self._classes[place]} {trained[place]:.4f} -> {exported[place]:.4f}"
        else:
            first = int(trained.argmax()), int(exported.argmax())
            differs = first[0] != first[1]
            right = [float(top == self._places[label]) for top in first]
            words = f"{self._classes[first[0]]} {trained[first[0]]:.4f} -> {self._classes[first[1]]} {exported[first[1]]:.4f}"
        # Not `>`: a NaN differs, too.
        differs |= not moved[place] <= MOVED
        return Compared(differs, float(moved[place]), (right[0], right[1]), f"{self._val.name(index)}: {words}")
