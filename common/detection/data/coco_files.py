"""Folders with annotations in COCO's format, see https://cocodataset.org/#format-data.

Arrow reads COCO itself in seconds; Python's reader takes five times as long, and gigabytes.
"""

import codecs
import glob
import io
import json
import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from common.data.splits import get_split_kind
from common.detection.data.annotated import AnnotatedImages, image_files
from common.detection.data.box_checks import RawBoxes, check_files, find_class_ids
from common.detection.data.folders import Folder, refusing
from common.detection.data.masks import KIND
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.files import is_junk, read_bytes
from common.randomness import key_of

_KINDS = {
    "images": {
        "id": pa.int64(),
        "file_name": pa.string(),
        "width": pa.int64(),
        "height": pa.int64(),
    },
    "annotations": {
        "image_id": pa.int64(),
        "category_id": pa.int64(),
        "bbox": pa.list_(pa.float64()),  # left, top, width, height
        "area": pa.float64(),
        "iscrowd": pa.int64(),
    },
    "categories": {"id": pa.int64(), "name": pa.string(), "supercategory": pa.string()},
}
_LIMIT = 2**34  # bytes of a file, many times what any published set has
_OPTIONAL = {"width", "height", "area", "iscrowd", "supercategory", *KIND}
# Segmentations are lists or objects, counts are lists or texts: columns of their own, with own
# names.
_RENAMED = {rb'"segmentation"(\s*:\s*\{)': rb'"rle"\1', rb'"counts"(\s*:\s*")': rb'"packed"\1'}
_WRONG_TYPE = (pa.ArrowException, TypeError, ValueError, OverflowError)
# Images, annotations, categories: the column of each field.
Columns = dict[str, dict[str, pa.Array]]

_PLACES = ("*.json", "annotations/*.json", "*/_annotations.coco.json")
# In a folder that is named after the part.
_OTHER_PLACES = ("*/labels.json", "*/annotations/instances*.json")
_PREFIX = re.compile("^instances_")
_WORDS = "(instances|annotations?|labels|coco)"
_DECORATION = re.compile(f"{_WORDS}[_.-]|[_.-]{_WORDS}")


def coco_files(root: Path) -> dict[str, Path]:
    """The JSON files that may be parts, by name: train.json, annotations/train.json,
    annotations/instances_train*.json or train/_annotations.coco.json, and the same for other
    parts. Or else names such as train_annotations.json, and train/labels.json (FiftyOne) or
    train/annotations/instances.json.
    """
    files = _files_by_part(root, _PLACES, _PREFIX)
    if any(map(get_split_kind, files)):
        return files
    return _files_by_part(root, _PLACES + _OTHER_PLACES, _DECORATION)


def _files_by_part(
    root: Path, patterns: tuple[str, ...], decoration: re.Pattern[str]
) -> dict[str, Path]:
    """Files by the name without its decoration, or by the folder of the part."""
    files: dict[str, Path] = {}
    for pattern in patterns:
        for file in sorted(root.glob(pattern)):
            name = decoration.sub("", file.stem)
            if file.name == "_annotations.coco.json":
                name = file.parent.name
            elif pattern in _OTHER_PLACES:
                name = file.relative_to(root).parts[0]
            is_of_supervisely = file.name == "meta.json"
            if is_of_supervisely or is_junk(file.name) or file in files.values():
                continue
            if name in files:
                both = ", ".join(str(each.relative_to(root)) for each in (files[name], file))
                raise Refused(f"{root}: {both} could each be {name}; keep one there")
            files[name] = file
    return files


def coco_folder(root: Path, files: dict[str, Path], masks: bool) -> Folder:
    labels = {name: str(file.relative_to(root)) for name, file in files.items()}
    return Folder(("COCO", root, files), labels, files, partial(_read, root, files, masks))


def _read(
    root: Path,
    files: dict[str, Path],
    masks: bool,
    name: str,
    classes: tuple[str, ...] | None,
    stamps: Stamps,
) -> AnnotatedImages:
    """A part, with these classes or else its own in the order of their ids. Raises `Refused`."""
    file = files[name]
    title = str(file)
    stamps.take_files([file])
    columns = _read_json(file, masks)
    root_names = _pop_root_categories(columns)
    _refuse_repeated(file, columns)
    images, boxes, categories = (columns[key] for key in _KINDS)
    if not len(images["id"]):
        raise Refused(f"{file}: no images in it; it needs at least one")
    paths = images["file_name"].cast(pa.large_binary())
    source = image_files(_find_image_folder(root, file, paths, stamps), paths)
    rows = _find_image_rows(file, boxes["image_id"], images["id"])
    names = categories["name"]
    classes = classes or tuple(names.take(pc.sort_indices(categories["id"])).to_pylist())
    class_names = pa.array(classes, pa.string())
    unlisted = pc.binary_join_element_wise(
        "category_id", boxes["category_id"].cast(pa.string()), " "
    )
    box_names = pc.coalesce(
        names.take(pc.index_in(boxes["category_id"], categories["id"])), unlisted
    )
    raw = RawBoxes(
        title=title,
        images=source,
        classes=classes,
        category_ids=_to_numbers(categories["id"].take(pc.index_in(class_names, names)), -1),
        image_ids=_to_numbers(images["id"]),
        sizes=np.stack([_to_numbers(images["width"]), _to_numbers(images["height"])], axis=1),
        rows=rows,
        boxes=_to_boxes(file, boxes["bbox"]),
        labels=find_class_ids(title, source, rows, box_names, class_names),
        crowd=_to_numbers(boxes["iscrowd"]) != 0,
        areas=_to_numbers(boxes["area"], np.nan),
        shapes=pa.StructArray.from_arrays([boxes[key] for key in KIND], list(KIND))
        if masks
        else None,
        notes=[
            f"the category 0, {name}, is left out: it is above others, and no object is of it"
            for name in root_names
        ],
    )
    return check_files(raw, stamps)


def _pop_root_categories(columns: Columns) -> list[str]:
    """Take out the category that Roboflow adds above all others, which may have the name of one.
    Returns its name.
    """
    categories = columns["categories"]
    categories["name"] = pc.utf8_trim_whitespace(categories["name"])
    ids, names, parents = (column.to_numpy(zero_copy_only=False) for column in categories.values())
    is_root = (ids == 0) & (parents == "none") & np.isin(names, np.append(parents, names[ids != 0]))
    is_root &= ~np.isin(ids, columns["annotations"]["category_id"])
    columns["categories"] = {
        field: column.filter(pa.array(~is_root)) for field, column in categories.items()
    }
    return names[is_root].tolist()


def _refuse_repeated(file: Path, columns: Columns) -> None:
    """Raise `Refused` if images or categories share what must be their own."""
    for key, field in (("images", "id"), ("categories", "id"), ("categories", "name")):
        values = columns[key][field].to_numpy(zero_copy_only=False)
        distinct, counts = np.unique(values, return_counts=True)
        if (counts > 1).any():
            value = distinct[counts.argmax()]
            ids = ", ".join(
                map(str, columns[key]["id"].filter(pa.array(values == value))[:5].to_pylist())
            )
            raise Refused(
                f"{file}: {counts.max()} {key} with the {field} {value}; give each its own (ids "
                f"{ids})"
            )


def _find_image_rows(file: Path, owners: pa.Array, image_ids: pa.Array) -> np.ndarray:
    """int64[M]: the index in `image_ids` of each annotation's image."""
    rows = _to_numbers(pc.index_in(owners, image_ids), -1).astype(np.int64)
    is_stray = rows < 0
    if is_stray.any():
        first = int(is_stray.argmax())
        raise Refused(
            f"{file}: {is_stray.sum():,} annotations of images that are not in it, first "
            f"annotations[{first}] with image_id {owners[first]}; remove them"
        )
    return rows


def _to_boxes(file: Path, column: pa.ListArray) -> np.ndarray:
    """float64[M, 4], NaN for what is missing."""
    is_wrong = pc.list_value_length(column).to_numpy() != 4
    if is_wrong.any():
        first = int(is_wrong.argmax())
        raise Refused(
            f"{file}: annotations[{first}] has a bbox of other than 4 numbers: left, top, width, "
            "height"
        )
    return _to_numbers(column.flatten(), np.nan).reshape(-1, 4)


def _to_numbers(column: pa.Array, missing: float = 0) -> np.ndarray:
    return column.fill_null(missing).to_numpy(zero_copy_only=False).copy()


def _find_image_folder(root: Path, file: Path, paths: pa.LargeBinaryArray, stamps: Stamps) -> str:
    """The first folder, beside the file or named after it, that has the first or the last image."""
    stem = file.stem.removeprefix("instances_")
    part = stem.rstrip("0123456789")
    names = [
        file.parent,
        *(root / above / name for name in (stem, part, "") for above in ("", "images")),
    ]
    names += [root / stem / "images", root / part / "images"]
    parents = [file.parent, file.parent.parent][: len(file.relative_to(root).parts)]
    others = (_DECORATION.sub("", file.stem), "data", "images", "img")
    names += [parent / name for parent in parents for name in others]
    ends = [os.fsdecode(paths[place].as_py()) for place in (0, -1)]
    for folder in dict.fromkeys(names):
        stamps.take_files(folder / end for end in ends)  # a file may appear there later
        if any(os.path.lexists(folder / end) for end in ends):
            return os.path.abspath(folder)
    looked = ", ".join(str(folder.relative_to(root)) for folder in dict.fromkeys(names))
    alike = next(root.rglob(glob.escape(os.path.basename(ends[0]))), None)
    advice = f"; {alike} is alike: move the images, or correct file_name" if alike else ""
    raise Refused(f"{file}: its image {ends[0]} is missing; looked in {root} at {looked}{advice}")


# ---- reading


def _read_json(file: Path, masks: bool) -> Columns:
    """{images, annotations, categories: {field: column}}; optional fields may be null."""
    fields_of = _KINDS | {"annotations": _KINDS["annotations"] | (KIND if masks else {})}
    kinds = {key: pa.list_(pa.struct(list(fields.items()))) for key, fields in fields_of.items()}
    with refusing(file, "JSON"):
        text = read_bytes(file, _LIMIT).removeprefix(codecs.BOM_UTF8)
    if masks:
        # Only keys match: a quote inside a text has a backslash before it.
        for old, new in _RENAMED.items():
            text = re.sub(old, new, text)
    columns: Columns = {}
    try:
        table = pyarrow.json.read_json(
            io.BytesIO(text),
            pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            pyarrow.json.ParseOptions(
                pa.schema(list(kinds.items())), True, unexpected_field_behavior="ignore"
            ),
        )
        if len(table) != 1 or any(column.null_count for column in table.columns):
            raise pa.ArrowInvalid("not one object with all keys")
        for key, fields in fields_of.items():
            entries = table[key].combine_chunks().flatten()
            columns[key] = {field: entries.field(field) for field in fields}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError):
        # More than Arrow can read (2 GiB, NaN), other types, or a mistake, which it would not name.
        columns = _read_slowly(file, text, fields_of)
    for key, fields in columns.items():
        for field, column in fields.items():
            if field not in _OPTIONAL and column.null_count:
                first = pc.index(column.is_null(), True).as_py()
                raise Refused(
                    f"{file}: {column.null_count:,} entries of {key} lack {field}, first "
                    f"{key}[{first}]"
                )
    return columns


def _read_slowly(file: Path, text: bytes, fields_of: dict[str, dict]) -> Columns:
    """As Arrow reads them, with "1", true and 1.0 as 1. Raises `Refused` with the first value of a
    wrong type.
    """
    with refusing(file, "JSON"):
        content = json.loads(text)
    if not isinstance(content, dict):
        raise Refused(
            f"{file}: holds a list, not COCO's object of images, annotations and categories"
        )
    columns: Columns = {}
    for key, fields in fields_of.items():
        entries = content.get(key)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise Refused(
                f"{file}: lacks the key {key} with a list of objects, which annotations in COCO's "
                "format have"
            )
        columns[key] = {}
        for field, kind in fields.items():
            values = [entry.get(field) for entry in entries]
            columns[key][field] = _convert(f"{file}: {key}", field, values, kind)
    return columns


def _convert(title: str, field: str, values: list, kind: pa.DataType) -> pa.Array:
    """The values of a field in one type; one by one, if they are of several. Raises `Refused`."""
    with suppress(*_WRONG_TYPE):
        return pa.array(values, kind if pa.types.is_struct(kind) else None).cast(kind)
    converted = []
    for number, value in enumerate(values):
        if field == "segmentation" and value and not isinstance(value[0], list):
            value = [value]  # one polygon
        try:
            converted.append(pa.scalar(value).cast(kind).as_py())
        except _WRONG_TYPE:
            if not (field.endswith("id") and isinstance(value, (str, int))):
                problem = "which is not of the type that COCO's format has there; correct it"
                raise Refused(f"{title}[{number}]: {field} is {value!r:.60}, {problem}") from None
            # Stands for an id that is no number of 64 bits.
            converted.append(key_of(str(value)) >> 1)
    return pa.array(converted, kind)
