"""Which images and boxes does `--data` mean, and which of them are held out for evaluation?"""

import os
from pathlib import Path

import numpy as np

from common.detection import scenes
from common.detection.annotated import Annotated
from common.detection.box_formats import BOX_FORMATS
from common.detection.coco_files import find_coco, read_coco
from common.detection.object_tables import read_objects
from common.detection.voc_files import find_voc, read_voc
from common.detection.yolo_files import find_yolo, read_yolo
from common.errors import Refused
from common.randomness import key_of
from common.tables import table_opener


def load(
    data: str,
    *,
    seed: int,
    val_share: float,
    image_column: str = "",
    objects_column: str = "",
    box_format: str = "",
    masks: bool = False,
) -> tuple[Annotated, Annotated]:
    """The images to train on and those to evaluate on, (train, val), with the same classes. `data` is one of

    - `digits`: scenes of scikit-learn's handwritten digits, a fresh one for each position of the stream;
    - a folder in COCO's format: train.json and val.json, or annotations/instances_train*.json and so on;
    - a folder in the format of Pascal VOC: JPEGImages/, Annotations/ and ImageSets/Main/;
    - a folder in the format of YOLO: with a data.yaml, or images/ and labels/;
    - a Hugging Face data set with a column of objects, as in `sources.load`; `box_format` is xywh, xyxy or cxcywh.

    Where the data has no part of its own to evaluate on, `val_share` of the images is held out, chosen by `seed` and the
    image's path or row alone. What was mended or left out on the way is in the `notes` of both. With `masks` samples have
    them: digits, and COCO's format with segmentations.

    Raises `Refused` for what can't be found, read, or trained on.
    """
    path = Path(os.path.abspath(Path(data).expanduser()))
    if box_format and box_format not in BOX_FORMATS:
        raise Refused(f"--box_format {box_format}: is none of {', '.join(BOX_FORMATS)}")
    try:
        if data != "digits" and (opener := table_opener(data)):
            train, val = read_objects(data, opener, image_column, objects_column, box_format)
        elif image_column or objects_column or box_format:
            raise Refused(f"--data {data}: is no table, so leave out --image_column, --objects_column and --box_format")
        elif data == "digits":
            return scenes.load(seed, masks)
        elif found := find_coco(path):
            train, val = read_coco(path, *found, masks)
        elif folder := find_voc(path):
            train, val = read_voc(folder)
        elif folder := find_yolo(path):
            train, val = read_yolo(folder)
        else:
            found = "a folder or file of a kind that is not known" if path.exists() else "nothing is there"
            raise Refused(
                f"--data {data}: {found}; expected digits, a folder with train.json (COCO), JPEGImages/ (Pascal VOC), or "
                "data.yaml or labels/ (YOLO), or a Hugging Face data set with a column of objects"
            )
    except PermissionError as error:
        raise Refused(f"--data {data}: no permission to read {error.filename}; allow it, or copy the data") from error
    if masks and not train.has_masks:
        raise Refused(
            f"--data {data}: its objects are boxes without outlines, and masks are learnt from digits or a folder in "
            "COCO's format with segmentations; give one, or choose a detector of boxes"
        )
    return (train, val) if val is not None else _split(train, seed, val_share)


def _split(everything, seed: int, share: float) -> tuple[Annotated, Annotated]:
    if not 0 < share < 1:
        raise Refused(f"--val_share {share}: must lie between 0 and 1, since the data has no part to evaluate on")
    count = min(int(share * len(everything) + 0.5), len(everything) - 1)
    if not count:
        raise Refused(f"--val_share {share} of {len(everything)} images holds out none; raise it")
    order = np.argsort(everything.draws(key_of(seed, "held out")), kind="stable")
    train, val = (everything.part(np.sort(rows)) for rows in (order[count:], order[:count]))
    for part, name in ((train, "train on"), (val, "evaluate on")):
        if not len(part.boxes):
            raise Refused(f"--val_share {share}: none of the {len(part)} images to {name} has a box; choose another")
    return train, val
