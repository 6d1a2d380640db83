"""Which images and boxes does `--data` mean, and which of them are held out for evaluation?"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config.parsing import nearest_path
from common.data import partition
from common.data.huggingface import table_opener
from common.data.partition import Piece, kind_of
from common.detection.data import scenes
from common.detection.data.annotated import Annotated
from common.detection.data.annotated_files import AnnotatedFiles
from common.detection.data.annotation_cache import indexed
from common.detection.data.box_formats import BOX_FORMATS
from common.detection.data.coco_files import find_coco, read_coco
from common.detection.data.object_tables import ObjectParts
from common.detection.data.stamps import Stamps
from common.detection.data.voc_files import find_voc, read_voc, voc_parts
from common.detection.data.yolo_files import find_yolo, read_yolo
from common.errors import Refused
from common.randomness import key_of

_LARGE = (
    64 << 20
)  # bytes of annotations above which reading them leaves more memory behind than a process of its own takes
# A process of its own that leaves the index, and says why it can't.
_READ = """
import json, sys
from common.data import workers
from common.detection.data import sources
from common.errors import Refused
workers.end_with_parent()
try:
    path, wanted = json.loads(sys.argv[1])
    sources.read_folder(path, sources._Wanted(**wanted), is_own_process=True)
except Refused as refusal:
    sys.stdout.buffer.write(str(refusal).encode(errors="surrogateescape"))
"""


def load(
    data: str,
    *,
    seed: int,
    val_share: float,
    split: str = "",
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

    `split` names the part to evaluate on, as in `partition.choose`. Where the data has no part to validate on, `val_share` of
    the images is held out, chosen by `seed` and the image's path or row alone. What was mended or left out on the way is in
    the `notes` of both. With `masks` samples have them: digits, and COCO's format with segmentations.

    Raises `Refused` for what can't be found, read, or trained on.
    """
    wanted = _Wanted(data, split, seed, val_share, masks)
    train, val = _read(wanted, image_column, objects_column, box_format)
    return train, val


def load_part(
    data: str,
    *,
    split: str,
    seed: int,
    val_share: float,
    held_out: bool = False,
    image_column: str = "",
    objects_column: str = "",
    box_format: str = "",
    masks: bool = False,
) -> Annotated:
    """The images of one part, chosen as in `partition.choose_part`, for an evaluation, with the classes that are found there.

    `data` and the others are as in `load`: with its `seed` and `val_share`, `held_out` says that a model was trained on this
    data by `load`, without the held-out share; other data without parts are evaluated whole.
    """
    wanted = _Wanted(data, split, seed, val_share, masks, alone=True, held_out=held_out)
    (part,) = _read(wanted, image_column, objects_column, box_format)
    return part


@dataclass(frozen=True)
class _Wanted:
    """What is asked for: two parts of `data`, to train and to evaluate on, or `alone` one to evaluate."""

    data: str
    split: str
    seed: int
    val_share: float
    masks: bool
    alone: bool = False
    held_out: bool = False

    def pieces(self, labels: Mapping[str, str]) -> tuple[Piece, ...]:
        if self.alone:
            return partition.choose_part(self.data, labels, self.split, self.held_out)
        return partition.choose(self.data, labels, self.split)

    def sources(self, labels: Mapping[str, str], read: Callable) -> tuple[Annotated, ...]:
        """What `read(name, first)` reads of each piece, with masks where they are asked for."""

        def checked(name: str, first: Annotated | None) -> Annotated:
            source = read(name, first)
            if self.masks and not source.has_masks:
                raise Refused(
                    f"--data {self.data}: its objects are boxes without outlines, and masks are learnt from digits or a folder "
                    "in COCO's format with segmentations; give one, or choose a detector of boxes"
                )
            return source

        hold_out = partial(_split, seed=self.seed, share=self.val_share)
        return partition.read_pieces(self.pieces(labels), checked, hold_out, labels, self.val_share)


def _read(wanted: _Wanted, image_column: str, objects_column: str, box_format: str) -> tuple[Annotated, ...]:
    data = wanted.data
    path = Path(os.path.abspath(Path(data).expanduser()))
    if box_format and box_format not in BOX_FORMATS:
        raise Refused(f"--box_format {box_format}: is none of {', '.join(BOX_FORMATS)}")
    try:
        if data != "digits" and (opener := table_opener(data)):
            table = ObjectParts(data, opener, image_column, objects_column, box_format)
            return wanted.sources(table.labels, table.read)
        if image_column or objects_column or box_format:
            raise Refused(f"--data {data}: is no table, so leave out --image_column, --objects_column and --box_format")
        if data == "digits":
            made = dict(zip(("train", "val"), scenes.load(wanted.seed, wanted.masks), strict=True))
            return wanted.sources({name: part.origin for name, part in made.items()}, lambda name, _: made[name])
        if found := read_folder(str(path), wanted):
            return found
    except PermissionError as error:
        raise Refused(f"--data {data}: no permission to read {error.filename}; allow it, or copy the data") from error
    found = "a folder or file of a kind that is not known" if path.exists() else "nothing is there"
    raise Refused(
        f"--data {data}: {found}; expected digits, a folder with train.json (COCO), JPEGImages/ (Pascal VOC), or "
        f"data.yaml or labels/ (YOLO), or a Hugging Face data set with a column of objects{nearest_path(path)}"
    )


class _Folder(NamedTuple):
    """A folder in a format that is known, not read yet."""

    what: object  # what its `repr` does not tell, does not matter
    origins: dict[str, Path]  # of each part, the file or folder with its annotations
    labels: dict[str, str]
    read: Callable[[str, AnnotatedFiles | None, Stamps], AnnotatedFiles]


def read_folder(path: str, wanted: _Wanted, is_own_process: bool = False) -> tuple[AnnotatedFiles, ...] | None:
    """The parts of the folder at `path`, from the index of an earlier start or read again; None for other kinds of folders.

    Large annotations are read in a process of its own, unless this is it. Raises `Refused`.
    """
    folder = _find(Path(path), wanted.masks)
    if folder is None:
        return None
    pieces = wanted.pieces(folder.labels)

    def read(stamps: Stamps) -> tuple[AnnotatedFiles, ...]:
        return wanted.sources(folder.labels, lambda name, first: folder.read(name, first, stamps))

    origin = folder.origins[pieces[0].name]
    is_large = origin.is_file() and origin.stat().st_size > _LARGE
    arguments = json.dumps([path, asdict(wanted)])
    command = [sys.executable, "-P", "-c", _READ, arguments] if is_large and not is_own_process else None
    held_out = (wanted.seed, wanted.val_share) if any(piece.side != partition.WHOLE for piece in pieces) else None
    return indexed((folder.what, wanted.masks, pieces, held_out), origin, read, command)


def _find(path: Path, masks: bool) -> _Folder | None:
    files = find_coco(path)
    kinds = [*map(kind_of, files)]
    if any(kind.startswith("train") for kind in kinds):
        return _coco_folder(path, files, masks)
    if voc := find_voc(path):
        lists = voc_parts(voc)
        labels = {name: str(file.relative_to(voc)) if file else "all images" for name, file in lists.items()}
        origins = dict.fromkeys(lists, voc / "Annotations")
        return _Folder(("VOC", voc, lists), origins, labels, lambda name, *others: read_voc(voc, lists[name], *others))
    if yolo := find_yolo(path):
        labels = {
            name: ", ".join(os.path.relpath(place, path) for place in places) for name, places in yolo.parts.items()
        }
        origins = {name: places[0] for name, places in yolo.parts.items()}
        return _Folder(("YOLO", yolo), origins, labels, lambda *arguments: read_yolo(yolo, *arguments))
    if len(files) == 1 and not any(kinds):
        files = dict.fromkeys(["train"], *files.values())
    return _coco_folder(path, files, masks) if any(map(kind_of, files)) else None


def _coco_folder(path: Path, files: dict[str, Path], masks: bool) -> _Folder:
    labels = {name: str(file.relative_to(path)) for name, file in files.items()}
    read = lambda name, first, stamps: read_coco(path, files[name], first, masks, stamps)  # noqa: E731
    return _Folder(("COCO", path, files), files, labels, read)


def _split(everything: Annotated, seed: int, share: float) -> tuple[Annotated, Annotated]:
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
