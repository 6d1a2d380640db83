"""Sources of images with boxes: reads what `--data` names, and holds out a share for evaluation."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.config.parsing import nearest_path
from common.data import data_spec, splits, workers
from common.data.data_spec import DataSpec, Given
from common.data.huggingface import open_splits
from common.data.splits import kind_of
from common.detection.data import annotation_cache, scenes
from common.detection.data.annotated import Annotated
from common.detection.data.annotated_files import AnnotatedFiles
from common.detection.data.box_formats import BOX_FORMATS
from common.detection.data.coco_files import find_coco, read_coco
from common.detection.data.object_tables import ObjectParts
from common.detection.data.stamps import Stamps
from common.detection.data.voc_files import find_voc, read_voc, voc_parts
from common.detection.data.yolo_files import find_yolo, read_yolo
from common.errors import Refused

# Bytes of annotations above which a process of its own reads them: all memory that this takes is free again at its end.
_LARGE = 64 << 20
_COMMAND = (sys.executable, "-P", "-m", "common.detection.data.sources")


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

    with data_spec.reading(spec.data):
        if spec.data != "digits" and (tables := open_splits(spec.data)):
            parts = ObjectParts(spec.data, tables, spec.image_column, spec.objects_column, spec.box_format)
            found = spec.read(parts)
        else:
            spec.refuse_columns()
            of_digits = zip(("train", "val"), scenes.load(spec.seed, spec.masks), strict=True)
            found = spec.read(Given(dict(of_digits))) if spec.data == "digits" else _load_folder(spec)
    return data_spec.same_everywhere(found)


def _load_folder(spec: Spec) -> tuple[AnnotatedFiles, ...]:
    path = Path(os.path.abspath(Path(spec.data).expanduser()))
    if folder := _find(path, spec.masks):
        return _read(folder, spec)
    found = "a folder or file of a kind that is not known" if path.exists() else "nothing is there"
    raise Refused(
        f"--data {spec.data}: {found}; expected digits, a folder with train.json (COCO), JPEGImages/ (Pascal VOC), or "
        f"data.yaml or labels/ (YOLO), or a Hugging Face data set with a column of objects{nearest_path(path)}"
    )


@dataclass
class _Folder:
    """A folder in a known format, not read yet."""

    path: Path
    what: object  # its `repr` says all that decides what is read
    origins: dict[str, Path]  # of each part, the file or folder with its annotations
    labels: dict[str, str]
    read_part: Callable[[str, AnnotatedFiles | None, Stamps], AnnotatedFiles]
    stamps: Stamps = field(default_factory=Stamps)  # of all files that are looked at

    def read(self, name: str, first: AnnotatedFiles | None) -> AnnotatedFiles:
        return self.read_part(name, first, self.stamps)


def _read(folder: _Folder, spec: Spec, is_apart: bool = False) -> tuple[AnnotatedFiles, ...]:
    """The sources, from the annotation cache or read again: large ones in a process of its own, unless this is it."""
    pieces = spec.pieces(folder.labels)
    origin = folder.origins[pieces[0].name]
    held_out = (spec.seed, spec.val_share) if any(piece.side != splits.WHOLE for piece in pieces) else None
    file = annotation_cache.file_of((folder.what, spec.masks, pieces, held_out), origin)
    if file and (found := annotation_cache.load(file)):
        return found
    is_large = origin.is_file() and origin.stat().st_size > _LARGE
    if file and is_large and not is_apart and annotation_cache.is_writable(file.parent):
        _read_apart(folder.path, spec)
        if found := annotation_cache.load(file):
            return found
    parts = spec.read(folder)
    if file:
        annotation_cache.keep(file, parts, folder.stamps)
    return parts


def _read_apart(path: Path, spec: Spec) -> None:
    """Read a folder in another process, which leaves the cache. If that fails, its work is done in this one."""
    done = subprocess.run(
        [*_COMMAND, json.dumps([str(path), asdict(spec)])],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    if not done.returncode and (refusal := done.stdout.decode(errors="surrogateescape").strip()):
        raise Refused(refusal)


def main() -> None:
    """What that process does: leaves the cache, or prints why the data are refused."""
    workers.end_with_parent()
    path, spec = json.loads(sys.argv[1])
    try:
        _read(_find(Path(path), spec["masks"]), Spec(**spec), is_apart=True)
    except Refused as refusal:
        sys.stdout.buffer.write(str(refusal).encode(errors="surrogateescape"))


def _find(path: Path, masks: bool) -> _Folder | None:
    files = find_coco(path)
    kinds = [*map(kind_of, files)]
    if any(kind.startswith("train") for kind in kinds):
        return _coco_folder(path, files, masks)
    if voc := find_voc(path):
        lists = voc_parts(voc)
        labels = {name: str(file.relative_to(voc)) if file else "all images" for name, file in lists.items()}
        origins = dict.fromkeys(lists, voc / "Annotations")
        return _Folder(
            path, ("VOC", voc, lists), origins, labels, lambda name, *others: read_voc(voc, lists[name], *others)
        )
    if yolo := find_yolo(path):
        labels = {
            name: ", ".join(os.path.relpath(place, path) for place in places) for name, places in yolo.parts.items()
        }
        origins = {name: places[0] for name, places in yolo.parts.items()}
        return _Folder(path, ("YOLO", yolo), origins, labels, lambda *arguments: read_yolo(yolo, *arguments))
    if len(files) == 1 and not any(kinds):
        files = dict.fromkeys(["train"], *files.values())
    return _coco_folder(path, files, masks) if any(map(kind_of, files)) else None


def _coco_folder(path: Path, files: dict[str, Path], masks: bool) -> _Folder:
    labels = {name: str(file.relative_to(path)) for name, file in files.items()}
    read = lambda name, first, stamps: read_coco(path, files[name], first, masks, stamps)  # noqa: E731
    return _Folder(path, ("COCO", path, files), files, labels, read)


if __name__ == "__main__":
    main()
