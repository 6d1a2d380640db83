"""Classifiers for export: a picture of any size -> probabilities; scored image by image against the
recipe's evaluation.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from common.data import Source
from common.errors import Refused
from tools.export.preprocessing import KERNELS, Preprocessing
from tools.export.proof import Apart, Outputs, Task
from tools.trained import TrainedModel

MOVED = 0.05  # an image differs if a probability moves by more, also if its top-1 stays


class Classifier(torch.nn.Module):
    """uint8[N, 3, height, width] -> float32[N, K]: probabilities that sum to 1, or one of each
    class for multi-label data.
    """

    def __init__(self, model: torch.nn.Module, preprocessing: Preprocessing, multi_label: bool):
        super().__init__()
        self.preprocessing, self.model, self.multi_label = preprocessing, model, multi_label

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return probabilities(self.model(self.preprocessing(images)), self.multi_label)


def probabilities(logits: torch.Tensor, multi_label: bool) -> torch.Tensor:
    """[N, K], of each class by itself for multi-label data, else of all classes together."""
    return logits.sigmoid() if multi_label else logits.softmax(1)


def preprocessing_of(config: dict) -> Preprocessing:
    """What timm's evaluation transform does for this data configuration. Raises `Refused` for a
    filter that it can't be.
    """
    if config["interpolation"] not in KERNELS or config["crop_pct"] > 1:
        raise Refused(
            f"the model's images are resized with {config['interpolation']} and crop_pct "
            f"{config['crop_pct']}; an exported classifier resizes with {' or '.join(KERNELS)} "
            "and a crop_pct of at most 1"
        )
    size = tuple(config["input_size"][1:])
    covered = tuple(math.floor(side / config["crop_pct"]) for side in size)
    return Preprocessing(
        size,
        covered,
        config["interpolation"],
        config["mean"],
        config["std"],
        config.get("crop_mode"),
    )


class ClassifierTask(Task):
    """The task of a classifier, for the proof. So many images as `differing` may differ: in their
    top-1, or by `MOVED`.

    For multi-label data each class is a decision, and an image differs if one of them does.
    """

    batched = True

    def __init__(self, trained: TrainedModel, val: Source, accelerator: Any, differing: int = 0):
        super().__init__(trained, val, accelerator)
        config = getattr(self.batches.loader.dataset.transform, "data_config", None)
        if config is None:
            raise Refused(
                f"{trained.recipe.__file__}: evaluates images by a transform of its own, which "
                "can't be exported; use common.classification.transforms.EvalTransform"
            )
        self.most_differing = differing
        preprocessing = preprocessing_of(config)
        model = copy.deepcopy(self.model).to("cpu", torch.float32)
        self.module = Classifier(model, preprocessing, val.multi_label).eval()
        kind = "of each class by itself" if val.multi_label else "that sum to 1"
        self.outputs = {"probabilities": f"float32[N, {len(self.classes)}] {kind}"}
        self.about = {
            "task": "classification",
            "classes": list(self.classes),
            "multi_label": val.multi_label,
            "preprocessing": {
                "resized_to_cover": preprocessing.covered,
                "cropped_to": preprocessing.size,
                **{key: config.get(key) for key in ("crop_mode", "interpolation", "mean", "std")},
            },
        }

    def picture(self, index: int) -> np.ndarray:
        return np.asarray(self.val.image(index))

    def expected(self) -> Iterator[dict | None]:
        # Of the trained and of the exported model, image by image.
        self.right: list[list[float]] = []
        for batch, logits in self.trained.predict(self.model, self.batches):
            rows = probabilities(logits.float(), self.val.multi_label).cpu().numpy()
            for row, readable in zip(rows, batch.readable, strict=True):
                yield {"probabilities": row} if readable else None

    def compare(self, expected: dict, found: Outputs) -> Apart:
        trained, exported = expected["probabilities"], found["probabilities"]
        moved = np.abs(trained - exported)
        if self.val.multi_label:
            first = second = int(moved.argmax())
            differs = bool(((trained > 0.5) != (exported > 0.5)).any())
        else:
            first, second = int(trained.argmax()), int(exported.argmax())
            differs = first != second
        words = (
            f"{self.classes[first]} {trained[first]:.4f} -> {self.classes[second]} "
            f"{exported[second]:.4f}"
        )
        largest = float(moved.max())
        return Apart({"probabilities": largest}, math.inf if differs else largest / MOVED, words)

    def count(self, index: int, expected: dict, found: Outputs | None) -> None:
        label = self.val.labels[index]
        rows = [one["probabilities"] for one in (expected, found) if one]
        if found and self.val.multi_label:
            self.right.append([((row > 0.5)[list(self.class_ids)] == label).mean() for row in rows])
        elif found:
            self.right.append([row.argmax() == self.class_ids[label] for row in rows])

    def results(self) -> dict[str, tuple[float, float]]:
        trained, exported = np.mean(self.right, 0).tolist()
        return {"accuracy" if self.val.multi_label else "top1": (trained, exported)}
