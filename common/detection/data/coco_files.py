"""Folders with annotations in COCO's format: https://cocodataset.org/#format-data.

There is one JSON file per part. Arrow reads it without a Python object per row, in seconds for COCO
itself; Python's reader takes five times as long, and gigabytes.
"""

import io
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from common.detection.data.annotated import AnnotatedImages, ImageFiles
from common.detection.data.box_checks import FoundBoxes, check_files
from common.detection.data.folders import Folder, refusing
from common.detection.data.masks import KIND
from common.detection.data.stamps import Stamps
from common.errors import Refused
from common.files import read_bytes

_KINDS = {
    "images": {"id": pa.int64(), "file_name": pa.string(), "width": pa.int64(), "height": pa.int64()},
    "annotations": {
        "image_id": pa.int64(),
        "category_id": pa.int64(),
        "bbox": pa.list_(pa.float64()),  # left, top, width, height
        "area": pa.float64(),
        "iscrowd": pa.int64(),
    },
    "categories": {"id": pa.int64(), "name": pa.string()},
}
_LIMIT = 2**34  # bytes of a file, many times what any published set has
_OPTIONAL = {"width", "height", "area", "iscrowd", *KIND}
# A segmentation is a list or an object, and its counts are a list or a text. A column has one type: each gets its own name.
_RENAMED = {rb'"segmentation"(\s*:\s*\{)': rb'"rle"\1', rb'"counts"(\s*:\s*")': rb'"packed"\1'}
_PLACES = ("*.json", "annotations/*.json", "*/_annotations.coco.json")


def coco_files(root: Path) -> dict[str, Path]:
    """The JSON files that may be parts, by name: train.json, annotations/train.json,
    annotations/instances_train*.json or train/_annotations.coco.json, and the same for other parts.
    """
    files: dict[str, Path] = {}
    for file in (file for place in _PLACES for file in sorted(root.glob(place))):
        name = file.parent.name if file.name == "_annotations.coco.json" else file.stem.removeprefix("instances_")
        if name in files:
            both = ", ".join(str(each.relative_to(root)) for each in (files[name], file))
            raise Refused(f"{root}: {both} could each be {name}; keep one there")
        files[name] = file
    return files


def coco_folder(root: Path, files: dict[str, Path], masks: bool) -> Folder:
    labels = {name: str(file.relative_to(root)) for name, file in files.items()}
    return Folder(("COCO", root, files), labels, files, partial(_read, root, files, masks))


def _read(
    root: Path, files: dict[str, Path], masks: bool, name: str, classes: tuple[str, ...] | None, stamps: Stamps
) -> AnnotatedImages:
    """A part, with these classes or else its own in the order of their ids. Raises `Refused`."""
    file = files[name]
    stamps.take_files([file])
    columns = _read_json(file, masks)
    images, boxes, categories = (columns[key] for key in _KINDS)
    paths = images["file_name"].cast(pa.large_binary())
    image_ids, category_ids = _numbers(images["id"]), _numbers(categories["id"])
    names = categories["name"].to_pylist()
    for key, field, values in (
        ("images", "id", image_ids),
        ("categories", "id", category_ids),
        ("categories", "name", np.array(names)),
    ):
        distinct, counts = np.unique(values, return_counts=True)
        if (counts > 1).any():
            value = distinct[counts.argmax()]
            raise Refused(f"{file}: {counts.max()} {key} with the {field} {value}; give each its own")
    if not len(image_ids):
        raise Refused(f"{file}: no images in it; it needs at least one")
    found_images = ImageFiles(_image_folder(root, file, paths, stamps), paths)
    rows = _places(_numbers(boxes["image_id"]), image_ids)
    if (strays := rows < 0).any():
        stray = _numbers(boxes["image_id"])[strays][0]
        raise Refused(
            f"{file}: {strays.sum():,} annotations of images that are not in it, first image_id {stray}; remove them"
        )
    if classes is None:
        classes = tuple(names[place] for place in np.argsort(category_ids))
    ids = {name: place for place, name in enumerate(classes)}
    of_category = np.array([ids.get(name, -1) for name in names], np.int64)  # the class id of each category
    class_ids = np.full(len(classes), -1)
    class_ids[of_category[of_category >= 0]] = category_ids[of_category >= 0]
    places = _places(_numbers(boxes["category_id"]), category_ids)
    labels = np.where(places < 0, -1, of_category[places] if len(of_category) else -1)
    if (unknown := labels < 0).any():
        box = int(unknown.argmax())
        is_listed = places[box] >= 0
        known = f"{names[places[box]]}, which the training part does not have" if is_listed else "not listed there"
        raise Refused(
            f"{file}: {unknown.sum():,} boxes of an unknown class, first of {found_images.name(int(rows[box]))}: "
            f"category_id {_numbers(boxes['category_id'])[box]} is {known}; add it to categories, or remove the boxes"
        )
    if (lengths := pc.list_value_length(boxes["bbox"]).to_numpy() != 4).any():
        box = int(lengths.argmax())
        raise Refused(f"{file}: annotations[{box}] has a bbox of other than 4 numbers: left, top, width, height")
    found = FoundBoxes(
        title=str(file),
        images=found_images,
        classes=classes,
        category_ids=class_ids,
        image_ids=image_ids,
        sizes=np.stack([_numbers(images["width"], 0), _numbers(images["height"], 0)], axis=1),
        rows=rows,
        boxes=_numbers(boxes["bbox"].flatten(), np.nan).reshape(-1, 4),
        labels=labels,
        crowd=_numbers(boxes["iscrowd"], 0) != 0,
        areas=_numbers(boxes["area"], np.nan),
        shapes=pa.StructArray.from_arrays([boxes[key] for key in KIND], list(KIND)) if masks else None,
    )
    return check_files(found, stamps)


def _numbers(column: pa.Array, missing: float | None = None) -> np.ndarray:
    return (column if missing is None else column.fill_null(missing)).to_numpy(zero_copy_only=False).copy()


def _places(values: np.ndarray, among: np.ndarray) -> np.ndarray:
    """int64: the index of each value in `among`, or -1."""
    return pc.fill_null(pc.index_in(pa.array(values), value_set=pa.array(among)), -1).to_numpy().astype(np.int64)


def _image_folder(root: Path, file: Path, paths: pa.LargeBinaryArray, stamps: Stamps) -> str:
    """The folder of the images: beside the file or named after it; the first one that has the first or the last image."""
    stem = file.stem.removeprefix("instances_")
    part = stem.rstrip("0123456789")
    names = [file.parent, *(root / above / name for name in (stem, part, "") for above in ("", "images"))]
    names += [root / stem / "images", root / part / "images"]
    ends = [os.fsdecode(paths[place].as_py()) for place in (0, -1)]
    for folder in dict.fromkeys(names):
        stamps.take_files(folder / end for end in ends)  # a file may appear there later
        if any(os.path.lexists(folder / end) for end in ends):
            return os.path.abspath(folder)
    looked = ", ".join(str(folder.relative_to(root)) for folder in dict.fromkeys(names))
    raise Refused(f"{file}: its image {ends[0]} is missing; looked in {root} at {looked}")


# ---- reading


def _read_json(file: Path, masks: bool) -> dict[str, dict[str, pa.Array]]:
    """{images, annotations, categories: {field: column}}; optional fields may be null."""
    fields_of = _KINDS | {"annotations": _KINDS["annotations"] | (KIND if masks else {})}
    kinds = {key: pa.list_(pa.struct(list(fields.items()))) for key, fields in fields_of.items()}
    with refusing(file, "JSON"):
        text = read_bytes(file, _LIMIT)
    if masks:
        for old, new in _RENAMED.items():  # only keys match: a quote inside a text has a backslash before it
            text = re.sub(old, new, text)
    try:
        size = len(text)
        table = pyarrow.json.read_json(
            io.BytesIO(text),
            pyarrow.json.ReadOptions(use_threads=False, block_size=size + 1),
            pyarrow.json.ParseOptions(pa.schema(list(kinds.items())), True, unexpected_field_behavior="ignore"),
        )
        if len(table) != 1:
            raise pa.ArrowInvalid("not one object")
        lists = {key: table[key].combine_chunks() for key in kinds}
        columns = {key: None if lists[key].null_count else lists[key].flatten() for key in kinds}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError):
        # More than Arrow can read (2 GiB, NaN), or a mistake, which it would not name.
        columns = _read_slowly(file, text, kinds)
    for key, fields in fields_of.items():
        if columns[key] is None:
            raise Refused(f"{file}: lacks the key {key}, which annotations in COCO's format have")
        for field in fields:
            column = columns[key].field(field)
            if field not in _OPTIONAL and column.null_count:
                first = pc.index(column.is_null(), True).as_py()
                raise Refused(f"{file}: {column.null_count:,} entries of {key} lack {field}, first {key}[{first}]")
    return {key: {field: columns[key].field(field) for field in fields} for key, fields in fields_of.items()}


def _read_slowly(file: Path, text: bytes, kinds: dict[str, pa.DataType]) -> dict[str, pa.Array | None]:
    """As Arrow reads them, with true and false as numbers. Raises `Refused` that names the first entry of a wrong type."""
    with refusing(file, "JSON"):
        content = json.loads(text)
    if not isinstance(content, dict):
        raise Refused(f"{file}: holds a list, not COCO's object of images, annotations and categories")
    columns = {}
    for key, kind in kinds.items():
        entries = content.get(key)
        rows = entries if isinstance(entries, list) else [entries]
        typed = (_typed(file, f"{key}[{place}]", entry, kind.value_type) for place, entry in enumerate(rows))
        columns[key] = None if entries is None else pa.array(list(typed), kind.value_type)
    return columns


def _typed(file: Path, place: str, entry: Any, kinds: pa.StructType) -> dict:
    row = {}
    for field, kind in ((of.name, of.type) for of in kinds):
        try:
            value = entry.get(field)
            value = int(value) if isinstance(value, bool) else value
            if isinstance(value, float) and pa.types.is_integer(kind) and not value.is_integer():
                raise TypeError  # Arrow would make 1.5 a 1
            row[field] = pa.scalar(value, kind).as_py()
        except (AttributeError, pa.ArrowException, TypeError, OverflowError):
            what = f".{field} is {value!r}" if isinstance(entry, dict) else f" is {entry!r}"
            raise Refused(f"{file}: {place}{what:.60}, not of the type {kind}") from None
    return row
