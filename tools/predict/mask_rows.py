"""Rows of a model for segmentation, and its masks and overlays as pictures."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.data import BrokenImage
from common.errors import Refused
from common.segmentation.plots import make_colours
from tools.predict.pictures import name_picture


@dataclass(frozen=True)
class MaskRowBuilder:
    """Turns the class ids of the pixels of images into one row per image.

    A row has the image's file, width and height, and the share of each class that has pixels,
    largest first, or an error. With `masks`, a folder gets the class ids of each image as a PNG with
    a palette, which the row names; with `overlays`, another one gets the image under its colours.
    """

    source: Any  # images.Unmasked
    top: int  # the highest number of classes of an image; 0: all
    masks: Path | None
    overlays: Path | None

    def build(self, batch: Any, predictions: list[torch.Tensor]) -> Iterator[tuple[int, dict]]:
        """Yield (index of the image, row) for each image of a batch, with its ids int64[H, W]."""
        # An image's name is its index.
        errors = dict(text.split(": ", 1) for text in batch.broken)
        for index, predicted in zip(batch.positions.tolist(), predictions, strict=True):
            row: dict = {"file": self.source.files.get_name(index)}
            if str(index) in errors:
                yield index, row | {"error": errors[str(index)]}
                continue
            ids = predicted.cpu().numpy()
            row["height"], row["width"] = ids.shape
            row["predictions"] = self._list_shares(ids)
            yield index, row | self._write_pictures(index, row["file"], ids)

    def _list_shares(self, ids: np.ndarray) -> list[dict]:
        counts = np.bincount(ids.ravel(), minlength=len(self.source.classes))
        largest_first = np.argsort(-counts, kind="stable")
        shares = []
        for class_id in largest_first[: self.top or None].tolist():
            if counts[class_id]:
                share = round(counts[class_id] / ids.size, 6)
                shares.append({"class": self.source.classes[class_id], "share": share})
        return shares

    def _write_pictures(self, index: int, file: str, ids: np.ndarray) -> dict[str, str]:
        """Write the mask and the overlay of an image; returns the file of the mask for its row."""
        colours = make_colours(256 if ids.max() < 256 else int(ids.max()) + 1)
        names: dict[str, str] = {}
        try:
            if self.masks:
                path = name_picture(self.masks, index, file)
                mask = Image.fromarray(ids.astype(np.uint8 if ids.max() < 256 else np.uint16))
                if mask.mode == "L":
                    mask.putpalette(colours.tobytes())
                mask.save(path)
                names["mask"] = str(path)
            if self.overlays:
                image = self.source.load_image(index)
                overlay = Image.blend(image, Image.fromarray(colours[ids]), 0.5)
                overlay.save(name_picture(self.overlays, index, file))
        except BrokenImage:  # replaced since it was predicted
            pass
        except OSError as error:
            raise Refused(
                f"{error.filename or self.masks or self.overlays}: {error.strerror}"
            ) from None
        return names
