"""Which images and boxes does `--data` mean, and which of them are held out for evaluation?"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.detection import scenes
from common.detection.annotated import Annotated
from common.detection.annotated_files import AnnotatedFiles
from common.detection.box_formats import BOX_FORMATS
from common.detection.coco_files import find_coco, read_coco
from common.detection.index import indexed
from common.detection.object_tables import read_objects
from common.detection.stamps import Stamps
from common.detection.voc_files import find_voc, read_voc, voc_parts
from common.detection.yolo_files import find_yolo, read_yolo
from common.errors import Refused
from common.randomness import key_of
from common.tables import table_opener

_LARGE = (
    64 << 20
)  # bytes of annotations above which reading them leaves more memory behind than a process of its own takes
# A process of its own that leaves the index, and says why it can't.
_READ = """
import json, sys
from common import data_workers
from common.detection import sources
from common.errors import Refused
data_workers.end_with_parent()
try:
    sources.read_folder(**json.loads(sys.argv[1]), is_own_process=True)
except Refused as refusal:
    sys.stdout.buffer.write(str(refusal).encode(errors="surrogateescape"))
"""


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
        elif parts := read_folder(str(path), data, seed, val_share, masks):
            return parts
        else:
            found = "a folder or file of a kind that is not known" if path.exists() else "nothing is there"
            raise Refused(
                f"--data {data}: {found}; expected digits, a folder with train.json (COCO), JPEGImages/ (Pascal VOC), or "
                "data.yaml or labels/ (YOLO), or a Hugging Face data set with a column of objects"
            )
    except PermissionError as error:
        raise Refused(f"--data {data}: no permission to read {error.filename}; allow it, or copy the data") from error
    return _parts(data, train, val, seed, val_share, masks)


@dataclass(frozen=True)
class _Folder:
    """A folder in a format that is known, not read yet."""

    what: object  # what its `repr` does not tell, does not matter
    origin: Path  # the file or folder with the annotations
    has_val: bool
    read: Callable[[Stamps], tuple[AnnotatedFiles, AnnotatedFiles | None]]


def read_folder(
    path: str, data: str, seed: int, val_share: float, masks: bool, is_own_process: bool = False
) -> tuple[AnnotatedFiles, AnnotatedFiles] | None:
    """Both parts of the folder at `path`, as the index of an earlier start has them or read anew; None for other folders.

    Large annotations are read in a process of its own, unless this is it. Raises `Refused`.
    """
    folder = _find(Path(path), masks)
    if folder is None:
        return None

    def read(stamps: Stamps) -> tuple[AnnotatedFiles, AnnotatedFiles]:
        return _parts(data, *folder.read(stamps), seed, val_share, masks)

    arguments = {"path": path, "data": data, "seed": seed, "val_share": val_share, "masks": masks}
    is_large = folder.origin.is_file() and folder.origin.stat().st_size > _LARGE
    command = [sys.executable, "-P", "-c", _READ, json.dumps(arguments)] if is_large and not is_own_process else None
    split = None if folder.has_val else (seed, val_share)
    return indexed((folder.what, masks, split), folder.origin, read, command)


def _find(path: Path, masks: bool) -> _Folder | None:
    if coco := find_coco(path):
        has_val = coco[1] is not None
        return _Folder(("COCO", path, coco), coco[0], has_val, lambda stamps: read_coco(path, *coco, masks, stamps))
    if voc := find_voc(path):
        has_val = voc_parts(voc)[1] is not None
        return _Folder(("VOC", voc), voc / "Annotations", has_val, lambda stamps: read_voc(voc, stamps))
    if yolo := find_yolo(path):
        return _Folder(("YOLO", yolo), yolo.train[0], bool(yolo.val), lambda stamps: read_yolo(yolo, stamps))
    return None


def _parts(data: str, train, val, seed: int, val_share: float, masks: bool) -> tuple[Annotated, Annotated]:
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
