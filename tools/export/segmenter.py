"""Models for segmentation for export: a picture of any size -> a class id for each of its pixels.

They are scored by mIoU against the recipe's evaluation, and image by image by their pixels.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.detection import BoxAugmentation
from common.segmentation.evaluation import compute_metrics
from common.segmentation.masks import IGNORED
from common.segmentation.source import Masked
from tools.export.detector_module import Preprocessing
from tools.export.formats import MAX_PIXELS
from tools.export.proof import ImageDifference, Outputs, Task
from tools.trained import TrainedModel

# An image differs if a larger share of its pixels has another class: rounding decides where two
# classes are equal.
MAX_DIFFERING_SHARE = 0.001


class Padding(nn.Module):
    """As `Preprocessing`, for pictures that keep their size."""

    def __init__(self, stride: int, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.stride = stride
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("std", torch.tensor(std)[:, None, None])

    def forward(self, picture: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        height, width = picture.shape[2:]
        size = torch.stack(
            [torch.scalar_tensor(side, dtype=torch.int64) for side in (width, height)]
        )
        num_columns, num_rows = ((size - 1) // self.stride + 1).tolist()
        for num_cells in (num_columns, num_rows):
            torch._check(num_cells >= 1)
            torch._check(num_cells <= MAX_PIXELS // self.stride)
        right = num_columns * self.stride - width
        bottom = num_rows * self.stride - height
        torch._check(right >= 0)
        torch._check(bottom >= 0)
        pixels = (picture.to(torch.float32) / 255 - self.mean) / self.std
        return F.pad(pixels, (0, right, 0, bottom)), size, size


class Exportable(nn.Module):
    """uint8[1, 3, height, width] of any size -> class ids int64[height, width]."""

    def __init__(self, model: nn.Module, short_side: int) -> None:
        super().__init__()
        self.model = model
        self.short_side = short_side
        mean = model.pretrained_cfg["mean"]
        std = model.pretrained_cfg["std"]
        self.preprocessing: nn.Module = Padding(model.stride, mean, std)
        if short_side:
            plain = BoxAugmentation(0, (short_side,), long_side=MAX_PIXELS)
            self.preprocessing = Preprocessing(plain, model.stride, mean, std)

    def forward(self, picture: Tensor) -> Tensor:
        height, width = picture.shape[2:]
        canvas, size, _ = self.preprocessing(picture)
        logits = F.interpolate(self.model(canvas), canvas.shape[2:], mode="bilinear")
        if self.short_side:
            shown_width, shown_height = size.tolist()
            torch._check(shown_width >= 1)
            torch._check(shown_height >= 1)
            torch._check(shown_width <= logits.shape[3])
            torch._check(shown_height <= logits.shape[2])
            logits = logits[:, :, :shown_height, :shown_width]
            logits = F.interpolate(logits, (height, width), mode="bilinear")
        else:
            logits = logits[:, :, :height, :width]
        return logits[0].argmax(0)


class SegmenterTask(Task):
    """The task of a model for segmentation: its export is scored against the recipe's evaluation."""

    limit = 0.0005  # of mIoU

    def __init__(self, trained: TrainedModel, val: Masked, accelerator: Any) -> None:
        super().__init__(trained, val, accelerator)
        dataset = self.batches.loader.dataset
        model = copy.deepcopy(self.model).to("cpu", torch.float32).eval()
        self.module = Exportable(model, dataset.short_side).eval()
        self.outputs = {"ids": "int64[height, width]: places in `classes`"}
        self.about = {
            "task": "segmentation",
            "classes": list(self.classes),
            "preprocessing": {
                "short_side": dataset.short_side,
                "mean": list(self.model.pretrained_cfg["mean"]),
                "std": list(self.model.pretrained_cfg["std"]),
            },
        }
        # The column of each class of the model: those of the data first.
        order = list(self.class_ids) + val.model_classes.absent_ids  # type: ignore[union-attr]
        self.columns = np.argsort(order)
        shape = (len(val.classes), len(self.classes))
        self.trained_confusion = np.zeros(shape, np.int64)
        self.exported_confusion = np.zeros(shape, np.int64)

    def read_picture(self, index: int) -> np.ndarray:
        return np.asarray(self.val.load_image(index))

    def predict(self) -> Iterator[dict | None]:
        for batch, predictions in self.trained.predict(self.model, self.batches):
            is_read = batch.sizes[0, 0] > 0
            yield {"ids": predictions[0].cpu().numpy()} if is_read else None

    def compare(self, expected: dict, outputs: Outputs) -> ImageDifference:
        if outputs["ids"].shape != expected["ids"].shape:
            return ImageDifference({"ids": 1.0}, worst=np.inf, text="the mask has another size")
        share = float((outputs["ids"] != expected["ids"]).mean())
        text = f"{share:.3%} of the pixels have another class"
        return ImageDifference({"ids": share}, worst=share / MAX_DIFFERING_SHARE, text=text)

    def record(self, index: int, expected: dict, outputs: Outputs | None) -> None:
        mask = self.val.load_mask(index)
        is_labelled = mask != IGNORED
        for confusion, arrays in (
            (self.trained_confusion, expected),
            (self.exported_confusion, outputs or expected),
        ):
            predicted = self.columns[arrays["ids"][is_labelled]]
            np.add.at(confusion, (mask[is_labelled], predicted), 1)

    def compute_results(self) -> dict[str, tuple[float, float]]:
        trained = compute_metrics(self.trained_confusion)
        exported = compute_metrics(self.exported_confusion)
        names = ("mIoU", "pixel_accuracy")
        return {name: (trained[name], exported[name]) for name in names}
