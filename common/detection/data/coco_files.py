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
from common.detection.data.annotated import AnnotatedImages, build_image_files
from common.detection.data.box_checks import RawBoxes, check_files, find_class_ids
from common.detection.data.file_stats import FileStats
from common.detection.data.folders import Folder, refuse_unreadable
from common.detection.data.masks import SHAPE_FIELDS
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
_MAX_BYTES = 2**34  # of a file, many times what any published set has
_OPTIONAL = {"width", "height", "area", "iscrowd", "supercategory", *SHAPE_FIELDS}
# Segmentations are lists or objects, counts are lists or texts: each kind gets its own column.
_RENAMED = {rb'"segmentation"(\s*:\s*\{)': rb'"rle"\1', rb'"counts"(\s*:\s*")': rb'"packed"\1'}
_WRONG_TYPE = (pa.ArrowException, TypeError, ValueError, OverflowError)
# Images, annotations, categories: the column of each field.
Columns = dict[str, dict[str, pa.Array]]

_PATTERNS = ("*.json", "annotations/*.json", "*/_annotations.coco.json")
# In a folder that is named after the split.
_FOLDER_PATTERNS = ("*/labels.json", "*/annotations/instances*.json")
_PREFIX = re.compile("^instances_")
_AFFIX = "(instances|annotations?|labels|coco)"
_AFFIXES = re.compile(f"{_AFFIX}[_.-]|[_.-]{_AFFIX}")


def find_coco_files(root: Path) -> dict[str, Path]:
    """The JSON files that may be splits, by name.

    They are train.json, annotations/train.json, annotations/instances_train*.json or
    train/_annotations.coco.json, and the same for other splits. Or else names such as
    train_annotations.json, and train/labels.json (FiftyOne) or train/annotations/instances.json.
    """
    files = _find_files(root, _PATTERNS, _PREFIX)
    if any(get_split_kind(name) for name in files):
        return files
    return _find_files(root, _PATTERNS + _FOLDER_PATTERNS, _AFFIXES)


def _find_files(root: Path, patterns: tuple[str, ...], affixes: re.Pattern[str]) -> dict[str, Path]:
    """Files by the name without affixes, or by the folder of the split."""
    files: dict[str, Path] = {}
    for pattern in patterns:
        for file in sorted(root.glob(pattern)):
            name = affixes.sub("", file.stem)
            if file.name == "_annotations.coco.json":
                name = file.parent.name
            elif pattern in _FOLDER_PATTERNS:
                name = file.relative_to(root).parts[0]
            is_of_supervisely = file.name == "meta.json"
            if is_of_supervisely or is_junk(file.name) or file in files.values():
                continue
            if name in files:
                first = files[name].relative_to(root)
                second = file.relative_to(root)
                raise Refused(f"{root}: {first}, {second} could each be {name}; keep one there")
            files[name] = file
    return files


def open_coco_folder(root: Path, files: dict[str, Path], masks: bool) -> Folder:
    return Folder(
        identity=("COCO", root, files),
        split_texts={name: str(file.relative_to(root)) for name, file in files.items()},
        origins=files,
        read_split=partial(_read_split, root, files, masks),
    )


def _read_split(
    root: Path,
    files: dict[str, Path],
    masks: bool,
    name: str,
    classes: tuple[str, ...] | None,
    stats: FileStats,
) -> AnnotatedImages:
    """A split, with these classes or else its own in the order of their ids. Raises `Refused`."""
    file = files[name]
    title = str(file)
    stats.add_files([file])
    columns = _read_json(file, masks)
    root_names = _pop_root_categories(columns)
    _refuse_repeated(file, columns)
    images = columns["images"]
    boxes = columns["annotations"]
    categories = columns["categories"]
    if not len(images["id"]):
        raise Refused(f"{file}: no images in it; it needs at least one")
    paths = images["file_name"].cast(pa.large_binary())
    source = build_image_files(_find_image_folder(root, file, paths, stats), paths)
    image_indices = _find_image_indices(file, boxes["image_id"], images["id"])
    names = categories["name"]
    classes = classes or tuple(names.take(pc.sort_indices(categories["id"])).to_pylist())
    class_names = pa.array(classes, pa.string())
    category_ids = categories["id"].take(pc.index_in(class_names, names))
    box_names = _name_boxes(boxes["category_id"], categories)
    shapes = None
    if masks:
        shape_columns = [boxes[key] for key in SHAPE_FIELDS]
        shapes = pa.StructArray.from_arrays(shape_columns, list(SHAPE_FIELDS))
    notes = []
    for root_name in root_names:
        notes.append(
            f"the category 0, {root_name}, is left out: it is above others, and no object is of it"
        )
    raw = RawBoxes(
        title=title,
        images=source,
        classes=classes,
        category_ids=_to_numpy(category_ids, -1),
        image_ids=_to_numpy(images["id"]),
        sizes=np.stack([_to_numpy(images["width"]), _to_numpy(images["height"])], axis=1),
        image_indices=image_indices,
        boxes=_to_boxes(file, boxes["bbox"]),
        labels=find_class_ids(title, source, image_indices, box_names, class_names),
        crowd=_to_numpy(boxes["iscrowd"]) != 0,
        areas=_to_numpy(boxes["area"], np.nan),
        shapes=shapes,
        notes=notes,
    )
    return check_files(raw, stats)


def _name_boxes(category_ids: pa.Array, categories: dict[str, pa.Array]) -> pa.Array:
    """The category of each box; "category_id 7" for an id that is not listed."""
    names = categories["name"].take(pc.index_in(category_ids, categories["id"]))
    ids_as_text = category_ids.cast(pa.string())
    return pc.coalesce(names, pc.binary_join_element_wise("category_id", ids_as_text, " "))


def _pop_root_categories(columns: Columns) -> list[str]:
    """Remove the category that Roboflow adds above all others, and return its name.

    It may have the name of one of them. The list is empty without such a category.
    """
    categories = columns["categories"]
    categories["name"] = pc.utf8_trim_whitespace(categories["name"])
    ids = categories["id"].to_numpy(zero_copy_only=False)
    names = categories["name"].to_numpy(zero_copy_only=False)
    parents = categories["supercategory"].to_numpy(zero_copy_only=False)
    is_parent = np.isin(names, np.append(parents, names[ids != 0]))
    is_used = np.isin(ids, columns["annotations"]["category_id"])
    is_root = (ids == 0) & (parents == "none") & is_parent & ~is_used
    selected = pa.array(~is_root)
    columns["categories"] = {name: column.filter(selected) for name, column in categories.items()}
    return names[is_root].tolist()


def _refuse_repeated(file: Path, columns: Columns) -> None:
    """Raise `Refused` if images or categories share an id or a name."""
    for key, field in (("images", "id"), ("categories", "id"), ("categories", "name")):
        values = columns[key][field].to_numpy(zero_copy_only=False)
        distinct, counts = np.unique(values, return_counts=True)
        if (counts > 1).any():
            value = distinct[counts.argmax()]
            ids = columns[key]["id"].filter(pa.array(values == value))[:5].to_pylist()
            raise Refused(
                f"{file}: {counts.max()} {key} with the {field} {value}; give each its own (ids "
                f"{', '.join(str(each) for each in ids)})"
            )


def _find_image_indices(file: Path, owners: pa.Array, image_ids: pa.Array) -> np.ndarray:
    """int64[M]: the index in `image_ids` of each annotation's image."""
    indices = _to_numpy(pc.index_in(owners, image_ids), -1).astype(np.int64)
    is_stray = indices < 0
    if is_stray.any():
        first = int(is_stray.argmax())
        raise Refused(
            f"{file}: {is_stray.sum():,} annotations of images that are not in it, first "
            f"annotations[{first}] with image_id {owners[first]}; remove them"
        )
    return indices


def _to_boxes(file: Path, column: pa.ListArray) -> np.ndarray:
    """float64[M, 4], NaN for what is missing."""
    is_wrong = pc.list_value_length(column).to_numpy() != 4
    if is_wrong.any():
        first = int(is_wrong.argmax())
        raise Refused(
            f"{file}: annotations[{first}] has a bbox of other than 4 numbers: left, top, width, "
            "height"
        )
    return _to_numpy(column.flatten(), np.nan).reshape(-1, 4)


def _to_numpy(column: pa.Array, missing: float = 0) -> np.ndarray:
    return column.fill_null(missing).to_numpy(zero_copy_only=False).copy()


def _find_image_folder(root: Path, file: Path, paths: pa.LargeBinaryArray, stats: FileStats) -> str:
    """The first folder, beside the file or named after it, that has the first or the last image."""
    first_path = os.fsdecode(paths[0].as_py())
    last_path = os.fsdecode(paths[-1].as_py())
    folders = _list_image_folders(root, file)
    for folder in folders:
        candidates = [folder / first_path, folder / last_path]
        stats.add_files(candidates)  # a file may appear there later
        if any(os.path.lexists(path) for path in candidates):
            return os.path.abspath(folder)
    searched = ", ".join(str(folder.relative_to(root)) for folder in folders)
    message = f"{file}: its image {first_path} is missing; looked in {root} at {searched}"
    similar = next(root.rglob(glob.escape(os.path.basename(first_path))), None)
    if similar:
        message += f"; {similar} is alike: move the images, or correct file_name"
    raise Refused(message)


def _list_image_folders(root: Path, file: Path) -> list[Path]:
    """The folders in which the images of an annotation file may be, each once, likely ones first."""
    stem = file.stem.removeprefix("instances_")
    split = stem.rstrip("0123456789")
    folders = [file.parent]
    for name in (stem, split, ""):
        folders += [root / name, root / "images" / name]
    folders += [root / stem / "images", root / split / "images"]
    parents = [file.parent, file.parent.parent][: len(file.relative_to(root).parts)]
    for parent in parents:
        for name in (_AFFIXES.sub("", file.stem), "data", "images", "img"):
            folders.append(parent / name)
    return list(dict.fromkeys(folders))


# ---- reading


def _read_json(file: Path, masks: bool) -> Columns:
    """{images, annotations, categories: {field: column}}; optional fields may be null."""
    fields_by_key = dict(_KINDS)
    if masks:
        fields_by_key["annotations"] = _KINDS["annotations"] | SHAPE_FIELDS
    kinds = {}
    for key, fields in fields_by_key.items():
        kinds[key] = pa.list_(pa.struct(list(fields.items())))
    with refuse_unreadable(file, "JSON"):
        text = read_bytes(file, _MAX_BYTES).removeprefix(codecs.BOM_UTF8)
    if masks:
        # Only keys match: a quote inside a text has a backslash before it.
        for pattern, replacement in _RENAMED.items():
            text = re.sub(pattern, replacement, text)
    columns: Columns = {}
    try:
        table = pyarrow.json.read_json(
            io.BytesIO(text),
            pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            pyarrow.json.ParseOptions(
                explicit_schema=pa.schema(list(kinds.items())),
                newlines_in_values=True,
                unexpected_field_behavior="ignore",
            ),
        )
        if len(table) != 1 or any(column.null_count for column in table.columns):
            raise pa.ArrowInvalid("not one object with all keys")
        for key, fields in fields_by_key.items():
            entries = table[key].combine_chunks().flatten()
            columns[key] = {field: entries.field(field) for field in fields}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OverflowError):
        # More than Arrow can read (2 GiB, NaN), other types, or a mistake, which it would not name.
        columns = _read_slowly(file, text, fields_by_key)
    for key, fields in columns.items():
        for field, column in fields.items():
            if field not in _OPTIONAL and column.null_count:
                first = pc.index(column.is_null(), True).as_py()
                raise Refused(
                    f"{file}: {column.null_count:,} entries of {key} lack {field}, first "
                    f"{key}[{first}]"
                )
    return columns


def _read_slowly(file: Path, text: bytes, fields_by_key: dict[str, dict]) -> Columns:
    """As Arrow reads them, with "1", true and 1.0 as 1.

    Raises `Refused` with the first value of a wrong type.
    """
    with refuse_unreadable(file, "JSON"):
        content = json.loads(text)
    if not isinstance(content, dict):
        raise Refused(
            f"{file}: holds a list, not COCO's object of images, annotations and categories"
        )
    columns: Columns = {}
    for key, fields in fields_by_key.items():
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
    for i, value in enumerate(values):
        if field == "segmentation" and value and not isinstance(value[0], list):
            value = [value]  # one polygon
        try:
            converted.append(pa.scalar(value).cast(kind).as_py())
        except _WRONG_TYPE:
            if not (field.endswith("id") and isinstance(value, (str, int))):
                problem = "which is not of the type that COCO's format has there; correct it"
                raise Refused(f"{title}[{i}]: {field} is {value!r:.60}, {problem}") from None
            # Stands for an id that is no integer of 64 bits.
            converted.append(key_of(str(value)) >> 1)
    return pa.array(converted, kind)
