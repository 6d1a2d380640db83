"""Pictures of a segmenter: predictions beside the truth, and the confusion of pixels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.data.images import BrokenImage
from common.run.plots import Cell, confusion, describe_plot, draw_cells, format_arrow
from common.segmentation.masks import IGNORED
from common.segmentation.source import Masked

NUM_COLUMNS = 6  # of a sheet
_RIGHT = (0, 114, 178)
_WRONG = (213, 94, 0)
_UNLABELLED = (228, 228, 228)


@dataclass(frozen=True)
class Comparison:
    """An image with its truth and its prediction, class ids int16[H, W]."""

    image: np.ndarray  # uint8[H, W, 3]
    mask: np.ndarray
    predicted: np.ndarray

    @property
    def is_wrong(self) -> np.ndarray:
        """bool[H, W]: labelled pixels that are predicted as another class."""
        return (self.mask != IGNORED) & (self.mask != self.predicted)

    def format_accuracy(self) -> str:
        """The share of right pixels, as a caption."""
        num_labelled = (self.mask != IGNORED).sum()
        return f"{100 - 100 * self.is_wrong.sum() / max(1, num_labelled):.1f} % right"

    def make_panels(self) -> list[np.ndarray]:
        """Image, truth, prediction, and where these differ: uint8[H, W, 3] each."""
        truth = make_overlay(self.mask)
        is_unlabelled = truth[..., 3] == 0
        truth[is_unlabelled, :3] = _UNLABELLED
        differences = np.where(self.is_wrong[..., None], _WRONG, _RIGHT).astype(np.uint8)
        differences[is_unlabelled] = _UNLABELLED
        colours = make_colours(1 + self.predicted.max())
        return [self.image, truth[..., :3], colours[self.predicted], differences]


def compare_predictions(
    source: Masked, predictions: Mapping[int, np.ndarray], indices: Sequence[int]
) -> Iterator[tuple[int, Comparison]]:
    """Compare the predictions int16[H, W] of the images at `indices`, if there are any, with the truth."""
    for index in indices:
        if index not in predictions:  # an image that could not be read
            continue
        try:
            mask = source.load_mask(index)
            image = source.load_image(index).resize(mask.shape[::-1])
        except BrokenImage:  # replaced since it was predicted
            continue
        yield index, Comparison(np.asarray(image), mask, predictions[index])


def draw_predictions(
    source: Masked, predictions: Mapping[int, np.ndarray], indices: Sequence[int], path: Path
) -> None:
    """Draw images with their truth, their prediction int16[H, W], and where these differ."""
    columns: list[list[Cell]] = []
    for index, comparison in compare_predictions(source, predictions, indices):
        captions = ("image", "truth", "prediction", comparison.format_accuracy())
        name = source.get_name(index)
        panels = zip(comparison.make_panels(), captions, strict=True)
        columns.append([Cell(pixels, caption, name) for pixels, caption in panels])
    blank = Cell(np.full((1, 1, 3), 255, np.uint8), "", "")
    while len(columns) < NUM_COLUMNS:
        columns.append([blank] * 4)
    cells = [cell for row in zip(*columns, strict=True) for cell in row]
    headline = "differences: right blue, wrong orange; without a label grey"
    draw_cells(cells, f"{describe_plot(path)}\n{headline}", path)


def draw_worst(
    source: Masked,
    predictions: Mapping[int, np.ndarray],
    indices: Sequence[int],
    class_names: Sequence[str],
    path: Path,
) -> None:
    """Draw images with their wrong pixels in orange, captioned by the share of right ones and the
    most frequent error.
    """
    cells = []
    for index, comparison in compare_predictions(source, predictions, indices):
        is_wrong = comparison.is_wrong
        image = comparison.image.copy()
        image[is_wrong] = (image[is_wrong] + 2 * np.array(_WRONG)) // 3
        pairs = comparison.mask[is_wrong].astype(int) * len(class_names)
        pairs += comparison.predicted[is_wrong]
        true, predicted = divmod(int(np.bincount(pairs).argmax()), len(class_names))
        error = format_arrow(class_names[true], class_names[predicted])
        caption = f"{comparison.format_accuracy()}\n{error}"
        cells.append(Cell(image, caption, source.get_name(index)))
    headline = "fewest right pixels\nwrong orange; most frequent error (true → predicted)"
    draw_cells(cells, f"{describe_plot(path)}: {headline}", path)


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


def make_overlay(mask: np.ndarray) -> np.ndarray:
    """uint8[H, W, 4]: colours of class ids int16[H, W], transparent where there is no label."""
    is_labelled = mask != IGNORED
    ids = np.where(is_labelled, mask, 0)
    colours = make_colours(1 + ids.max())[ids]
    return np.dstack([colours, np.uint8(255) * is_labelled])


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
