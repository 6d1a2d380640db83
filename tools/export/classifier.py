"""Classifiers for export: a picture of any size -> probabilities."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from common.data import Source
from common.errors import Refused
from tools.export.preprocessing import KERNELS, Preprocessing
from tools.export.proof import ImageDifference, Outputs, Task
from tools.trained import TrainedModel

# An image differs if a probability moves by more, also if its top-1 stays.
MAX_DIFFERENCE = 0.05


class Classifier(torch.nn.Module):
    """uint8[N, 3, height, width] -> float32[N, K], probabilities.

    They sum to 1, or are of each class by itself for multi-label data.
    """

    def __init__(self, model: torch.nn.Module, preprocessing: Preprocessing, multi_label: bool):
        super().__init__()
        self.preprocessing = preprocessing
        self.model = model
        self.multi_label = multi_label

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return compute_probabilities(self.model(self.preprocessing(images)), self.multi_label)


def compute_probabilities(logits: torch.Tensor, multi_label: bool) -> torch.Tensor:
    """[N, K], of each class by itself for multi-label data, else of all classes together."""
    return logits.sigmoid() if multi_label else logits.softmax(1)


def build_preprocessing(config: dict) -> Preprocessing:
    """Build what timm's evaluation transform does for this data configuration.

    Raises `Refused` for channels and filters that it can't have.
    """
    num_channels = config["input_size"][0]
    if num_channels != 3:
        raise Refused(
            f"the model takes images of {num_channels} channels, and an exported model takes RGB "
            "pictures, of 3; use its best/ in torch"
        )
    if config["interpolation"] not in KERNELS or config["crop_pct"] > 1:
        raise Refused(
            f"the model's images are resized with {config['interpolation']} and crop_pct "
            f"{config['crop_pct']}; an exported classifier resizes with {' or '.join(KERNELS)} "
            "and a crop_pct of at most 1"
        )
    height, width = config["input_size"][1:]
    crop_pct = config["crop_pct"]
    return Preprocessing(
        size=(height, width),
        covered=(math.floor(height / crop_pct), math.floor(width / crop_pct)),
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
        crop_mode=config.get("crop_mode"),
    )


class ClassifierTask(Task):
    """The task of a classifier: its export is scored image by image against the recipe's evaluation.

    At most `max_differing` images may differ: in their top-1, or by `MAX_DIFFERENCE`. For
    multi-label data each class is a decision, and an image differs if one of them does.
    """

    batched = True

    def __init__(
        self, trained: TrainedModel, val: Source, accelerator: Any, max_differing: int = 0
    ):
        super().__init__(trained, val, accelerator)
        config = getattr(self.batches.loader.dataset.transform, "data_config", None)
        if config is None:
            raise Refused(
                f"{trained.recipe.__file__}: evaluates images by a transform of its own, which "
                "can't be exported; use common.classification.transforms.EvalTransform"
            )
        self.max_differing = max_differing
        preprocessing = build_preprocessing(config)
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
                "crop_mode": config.get("crop_mode"),
                "interpolation": config.get("interpolation"),
                "mean": config.get("mean"),
                "std": config.get("std"),
            },
        }

    def read_picture(self, index: int) -> np.ndarray:
        return np.asarray(self.val.load_image(index))

    def predict(self) -> Iterator[dict | None]:
        # Share of right decisions of the trained and of the exported model, for each image.
        self.accuracies: list[tuple[float, float]] = []
        for batch, logits in self.trained.predict(self.model, self.batches):
            probabilities = compute_probabilities(logits.float(), self.val.multi_label)
            for row, is_readable in zip(probabilities.cpu().numpy(), batch.readable, strict=True):
                yield {"probabilities": row} if is_readable else None

    def compare(self, expected: dict, outputs: Outputs) -> ImageDifference:
        trained = expected["probabilities"]
        exported = outputs["probabilities"]
        differences = np.abs(trained - exported)
        if self.val.multi_label:
            trained_class = exported_class = int(differences.argmax())
            has_other_decision = bool(((trained > 0.5) != (exported > 0.5)).any())
        else:
            trained_class = int(trained.argmax())
            exported_class = int(exported.argmax())
            has_other_decision = trained_class != exported_class
        largest = float(differences.max())
        return ImageDifference(
            largest={"probabilities": largest},
            worst=math.inf if has_other_decision else largest / MAX_DIFFERENCE,
            text=(
                f"{self.classes[trained_class]} {trained[trained_class]:.4f} -> "
                f"{self.classes[exported_class]} {exported[exported_class]:.4f}"
            ),
        )

    def record(self, index: int, expected: dict, outputs: Outputs | None) -> None:
        if outputs:
            trained = self._compute_accuracy(index, expected["probabilities"])
            exported = self._compute_accuracy(index, outputs["probabilities"])
            self.accuracies.append((trained, exported))

    def _compute_accuracy(self, index: int, probabilities: np.ndarray) -> float:
        label = self.val.labels[index]
        if self.val.multi_label:
            decisions = (probabilities > 0.5)[list(self.class_ids)]
            return (decisions == label).mean()
        return probabilities.argmax() == self.class_ids[label]

    def compute_results(self) -> dict[str, tuple[float, float]]:
        trained, exported = np.mean(self.accuracies, 0).tolist()
        return {"accuracy" if self.val.multi_label else "top1": (trained, exported)}
