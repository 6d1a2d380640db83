"""Pictures of predictions: the image with its boxes, or with its classes as a caption."""

from pathlib import Path
from typing import Any

from common.classification.plots import draw_captioned
from common.data import BrokenImage
from common.detection.data.masks import decode_masks
from common.detection.evaluation.plots import draw_detections
from common.errors import Refused

_LONGEST = 100  # characters of an image's name that a picture's name keeps


def draw(folder: Path, index: int, source: Any, row: dict) -> None:
    """Write `folder/000017_NAME.png`, for the image with this number. Raises `Refused` if that fails."""
    name = "".join(
        letter if letter.isalnum() or letter in "-_." else "_" for letter in Path(row["file"]).stem
    )
    path, found = folder / f"{index:06d}_{name[:_LONGEST]}.png", row["predictions"]
    try:
        image = source.image(index)
        if "width" in row:
            numbers = {name: number for number, name in enumerate(source.classes)}
            boxes = [
                (one["box"], numbers[one["class"]], one["class"], one["score"]) for one in found
            ]
            rles = [
                one["mask"] | {"counts": one["mask"]["counts"].encode()}
                for one in found
                if "mask" in one
            ]
            draw_detections(image, boxes, decode_masks(rles, source.sizes[index]), path)
        else:
            draw_captioned(image, [(one["class"], one["score"]) for one in found], path)
    except BrokenImage:  # replaced since it was predicted
        return
    except OSError as error:
        raise Refused(f"--draw {path}: {error.strerror}") from None
