"""Pictures of predictions: the image with its boxes, or with its classes as a caption."""

import re
from pathlib import Path
from typing import Any

from common.classification.plots import draw_captioned
from common.data import BrokenImage
from common.detection.data.masks import decode_masks
from common.detection.evaluation.plots import draw_detections
from common.errors import Refused

_MAX_NAME = 100  # characters of an image's name that a picture's name keeps


def name_picture(folder: Path, index: int, file: str) -> Path:
    """`folder/000017_NAME.png`, for the image with this index and file."""
    name = re.sub(r"[^\w.-]", "_", Path(file).stem)
    return folder / f"{index:06d}_{name[:_MAX_NAME]}.png"


def draw_predictions(folder: Path, index: int, source: Any, row: dict) -> None:
    """Write `folder/000017_NAME.png`, for the image with this index. Raises `Refused` if that fails."""
    path = name_picture(folder, index, row["file"])
    predictions = row["predictions"]
    try:
        image = source.load_image(index)
        if "width" not in row:
            scores = [(prediction["class"], prediction["score"]) for prediction in predictions]
            draw_captioned(image, scores, path)
            return
        class_ids = {name: class_id for class_id, name in enumerate(source.classes)}
        boxes = []
        rles = []
        for prediction in predictions:
            name = prediction["class"]
            boxes.append((prediction["box"], class_ids[name], name, prediction["score"]))
            if "mask" in prediction:
                mask = prediction["mask"]
                rles.append(mask | {"counts": mask["counts"].encode()})
        draw_detections(image, boxes, decode_masks(rles, source.sizes[index]), path)
    except BrokenImage:  # replaced since it was predicted
        return
    except OSError as error:
        raise Refused(f"--draw {path}: {error.strerror}") from None
