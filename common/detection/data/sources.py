"""Sources of images with boxes: reads what `--data` names, and holds out a share for evaluation."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common.config.parsing import nearest_path
from common.data import data_spec, splits
from common.data.data_spec import DataSpec
from common.data.splits import kind_of
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

# Bytes of annotations above which a process of its own reads them: all memory that this takes is free again at its end.
_LARGE = 64 << 20
# The program of that process: it writes the cache file, or prints why the data are refused.
_READ = """
import json, sys
from pathlib import Path
from common.data import workers
from common.detection.data import sources
from common.errors import Refused
workers.end_with_parent()
try:
    path, spec = json.loads(sys.argv[1])
    sources.read_folder(Path(path), sources.Spec(**spec), is_own_process=True)
except Refused as refusal:
    sys.stdout.buffer.write(str(refusal).encode(errors="surrogateescape"))
"""


@dataclass(frozen=True)
class Spec(DataSpec):
    """Which images with boxes a run reads."""

    objects_column: str = ""
    box_format: str = ""
    masks: bool = False

    table_fields = ("image_column", "objects_column", "box_format")

    def check(self, source: Annotated) -> None:
        if self.masks and not source.has_masks:
            raise Refused(
                f"--data {self.data}: its objects are boxes without outlines, and masks are learnt from digits or a folder "
                "in COCO's format with segmentations; --copy_paste needs outlines, too; give one, or choose a detector of "
                "boxes without --copy_paste"
            )

    def hold_out(self, source: Annotated) -> tuple[Annotated, Annotated]:
        train, val = super().hold_out(source)
        for part, name in ((train, "train on"), (val, "evaluate on")):
            if not len(part.boxes):
                raise Refused(
                    f"--val_share {self.val_share}: none of the {len(part)} images to {name} has a box; choose another"
                )
        return train, val


def load(spec: Spec) -> tuple[Annotated, Annotated]:
    """The images to train on and those to evaluate on, (train, val), with the same classes. `spec.data` is one of

    - `digits`: scenes of scikit-learn's handwritten digits, a fresh one for each position of the stream;
    - a folder in COCO's format: train.json and val.json, or annotations/instances_train*.json and so on;
    - a folder in the format of Pascal VOC: JPEGImages/, Annotations/ and ImageSets/Main/;
    - a folder in the format of YOLO: with a data.yaml, or images/ and labels/;
    - a Hugging Face data set with a column of objects, as in `classification.sources`; `box_format` is xywh, xyxy or cxcywh.

    `split` names the part to evaluate on, as in `splits.choose`. If the data has no part to validate on, `val_share` of
    the images is held out, chosen by `seed` and the image's path or row alone. The `notes` of both say what was corrected or
    left out. With `masks` samples have masks: those of digits, and of COCO's format with segmentations.

    With `spec.alone`, both are the part to evaluate a trained model on, with the classes that are found there.

    Raises `Refused` for what can't be found, read, or trained on.
    """
    if spec.box_format and spec.box_format not in BOX_FORMATS:
        raise Refused(f"--box_format {spec.box_format}: is none of {', '.join(BOX_FORMATS)}")

    def table(opener: Callable[[], dict[str, Any]]):
        parts = ObjectParts(spec.data, opener, spec.image_column, spec.objects_column, spec.box_format)
        return parts.labels, parts.read

    return data_spec.load(spec, table, partial(scenes.load, spec.seed, spec.masks), partial(_load_folder, spec))


def _load_folder(spec: Spec, path: Path) -> tuple[AnnotatedFiles, ...]:
    path = Path(os.path.abspath(path))
    if found := read_folder(path, spec):
        return found
    found = "a folder or file of a kind that is not known" if path.exists() else "nothing is there"
    raise Refused(
        f"--data {spec.data}: {found}; expected digits, a folder with train.json (COCO), JPEGImages/ (Pascal VOC), or "
        f"data.yaml or labels/ (YOLO), or a Hugging Face data set with a column of objects{nearest_path(path)}"
    )


class _Folder(NamedTuple):
    """A folder in a known format, not read yet."""

    what: object  # its `repr` says all that decides what is read
    origins: dict[str, Path]  # of each part, the file or folder with its annotations
    labels: dict[str, str]
    read: Callable[[str, AnnotatedFiles | None, Stamps], AnnotatedFiles]


def read_folder(path: Path, spec: Spec, is_own_process: bool = False) -> tuple[AnnotatedFiles, ...] | None:
    """The parts of the folder at `path`, from the annotation cache or read again; None for other kinds of folders.

    Large annotations are read in a process of its own, unless this is it. Raises `Refused`.
    """
    folder = _find(path, spec.masks)
    if folder is None:
        return None
    pieces = spec.pieces(folder.labels)

    def read(stamps: Stamps) -> tuple[AnnotatedFiles, ...]:
        return spec.read(folder.labels, lambda name, first: folder.read(name, first, stamps))

    origin = folder.origins[pieces[0].name]
    is_large = origin.is_file() and origin.stat().st_size > _LARGE
    arguments = json.dumps([str(path), asdict(spec)])
    command = [sys.executable, "-P", "-c", _READ, arguments] if is_large and not is_own_process else None
    held_out = (spec.seed, spec.val_share) if any(piece.side != splits.WHOLE for piece in pieces) else None
    return indexed((folder.what, spec.masks, pieces, held_out), origin, read, command)


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
