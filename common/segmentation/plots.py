"""Pictures of a segmenter: predictions beside the truth, and the confusion of pixels."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from common.data.images import BrokenImage
from common.run.plots import Cell, confusion, describe_plot, draw_cells
from common.segmentation.masks import IGNORED
from common.segmentation.source import Masked

NUM_COLUMNS = 6  # of a sheet
_RIGHT = (0, 114, 178)
_WRONG = (213, 94, 0)
_UNLABELLED = (228, 228, 228)


def draw_predictions(
    source: Masked, predictions: Mapping[int, np.ndarray], class_names: Sequence[str], path: Path
) -> None:
    """Draw images with their truth, their prediction int16[H, W], and where these differ."""
    colours = make_colours(len(class_names) + 1)
    columns: list[list[Cell]] = []
    for index, predicted in sorted(predictions.items()):
        try:
            image = np.asarray(source.load_image(index))
            mask = source.load_mask(index)
        except BrokenImage:  # replaced since it was predicted
            continue
        is_labelled = mask != IGNORED
        is_right = mask == predicted
        truth = colours[np.where(is_labelled, mask, 0)]
        truth[~is_labelled] = _UNLABELLED
        differences = np.full(truth.shape, _UNLABELLED, np.uint8)
        differences[is_labelled] = _WRONG
        differences[is_right] = _RIGHT
        accuracy = is_right.sum() / max(1, is_labelled.sum())
        name = source.get_name(index)
        columns.append(
            [
                Cell(image, "image", name),
                Cell(truth, "truth", name),
                Cell(colours[predicted], "prediction", name),
                Cell(differences, f"{100 * accuracy:.1f} % right", name),
            ]
        )
    blank = Cell(np.full((1, 1, 3), 255, np.uint8), "", "")
    while len(columns) < NUM_COLUMNS:
        columns.append([blank] * 4)
    cells = [cell for row in zip(*columns, strict=True) for cell in row]
    headline = "differences: right blue, wrong orange; without a label grey"
    draw_cells(cells, f"{describe_plot(path)}\n{headline}", path)


def draw_confusion(counts: np.ndarray, class_names: Sequence[str], path: Path) -> None:
    """Draw int64[K, C + 1] pixels, classes by predictions, as a square matrix."""
    side = counts.shape[1]
    square = np.zeros((side, side), np.int64)
    square[: len(counts)] = counts
    if not square[:, -1].any():  # nothing was unreadable
        square = square[:-1, :-1]
    right = np.trace(square)
    total = square.sum()
    share = f" ({100 * right / total:.2f} %)" if total else ""
    headline = f"{right:,} of {total:,} pixels right{share}"
    confusion(square, class_names, path, headline)


def make_colours(num_classes: int) -> np.ndarray:
    """Colours uint8[num_classes, 3], black first: Pascal VOC's, which spread the bits of the id."""
    ids = np.arange(num_classes)
    colours = np.zeros((num_classes, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (((ids >> (3 * bit + channel)) & 1) << (7 - bit)).astype(
                np.uint8
            )
    return colours
