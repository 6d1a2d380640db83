"""Hugging Face data sets with a column of objects: finds the columns, the box format and the classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.data import tables
from common.data.data_spec import DataSplits
from common.data.tables import Split, Table
from common.detection.data.annotated import AnnotatedImages
from common.detection.data.box_checks import RawBoxes, check_boxes, find_class_ids
from common.detection.data.image_headers import (
    compute_upright_sizes,
    read_file_headers,
    read_header,
)
from common.errors import Refused

# Left top width height; left top right bottom; centre width height.
BOX_FORMATS = ("xywh", "xyxy", "cxcywh")
EXTRA_COLUMNS = ("width", "height", "image_id")
_LABELS = (
    "category",
    "categories",
    "category_id",
    "label",
    "labels",
    "class",
    "class_id",
    "class_label",
)
# Names that data sets give to the fields of an object; the first one that is there counts.
_FIELDS = {
    "boxes": ("bbox", "bboxes", "box", "boxes"),
    "labels": _LABELS,
    "crowd": ("iscrowd", "is_crowd", "crowd"),
    "area": ("area", "areas"),
}


def open_object_tables(
    splits: Mapping[str, Split], spec: Any, shards: Mapping[str, Any] | None = None
) -> DataSplits[AnnotatedImages]:
    """The splits of a table; the first one decides on columns, format and classes. Raises `Refused`.

    With `shards`, the images of each split lie there, as `common.shards.Shards`, and there is no
    column of images.
    """

    def read(names: Sequence[str]) -> list[AnnotatedImages]:
        selected = [splits[name] for name in names]
        image_column = ""
        columns = []
        if shards is None:
            image_column = tables.find_image_column(selected[0], spec.image_column)
            columns.append(image_column)
        objects_column = find_objects(selected[0], spec.objects_column)
        columns.append(objects_column)
        tables.require_columns(selected, *columns)
        reader = _Reader(objects_column, spec.box_format)
        sources = []
        for name, split in zip(names, selected, strict=True):
            if shards is None:
                images, headers = _read_images(split, image_column)
            else:
                images = shards[name]
                headers = images.headers
            images = replace(images, groups=tables.read_groups(split, spec.group_column))
            sources.append(reader.read(split, images, headers))
        return sources

    return DataSplits(tables.describe_splits(dict(splits)), read)


def find_objects(split: Split, column: str) -> str:
    """The column of objects: `column`, or if that is empty the only one with boxes and classes.

    Raises `Refused`.
    """
    candidates = [name for name, kind in split.kinds.items() if _match_fields(kind)]
    all_columns = tables.format_names(split.kinds)
    if column:
        if column not in candidates:
            problem = "holds no boxes with classes" if column in split.kinds else "is no column"
            raise Refused(
                f"--objects_column {column}: {problem} of --data {split.data}, which has "
                f"{all_columns}"
            )
        return column
    if not any(pa.types.is_nested(kind) for kind in split.kinds.values()):
        problem = "no column holds lists of boxes and classes, the objects of an image"
        advice = "a file with a row for each box is not read: write COCO's JSON from it"
        raise Refused(f"--data {split.data}: {problem} ({all_columns}); {advice}")
    if len(candidates) != 1:
        problem = "no column with boxes and their classes found"
        if candidates:
            problem = f"{tables.format_names(candidates)} could each hold the boxes"
        raise Refused(
            f"--data {split.data}: {problem}; name it with --objects_column NAME ({all_columns})"
        )
    return candidates[0]


def _match_fields(kind: pa.DataType) -> dict[str, str]:
    """Field names by the keys of `_FIELDS`, of a list of objects or an object of lists; else {}."""
    struct = kind.value_type if tables.is_list(kind) else kind
    if not pa.types.is_struct(struct):
        return {}
    fields = {}
    for key, names in _FIELDS.items():
        name = next((name for name in names if name in struct.names), None)
        if name is not None:
            fields[key] = name
    has_objects = "boxes" in fields and "labels" in fields
    return fields if has_objects else {}


@dataclass
class _Reader:
    """Reads splits of a table, of which the first one decides on the box format and the classes."""

    column: str  # of objects
    box_format: str  # "": the only one that is possible
    class_names: tuple[str, ...] = ()
    class_values: pa.Array | None = None  # what stands for the names in the column

    def read(self, split: Split, images: Any, headers: np.ndarray) -> AnnotatedImages:
        """The annotations of `images`. Raises `Refused`.

        `headers` int64[N, 4] are as `image_headers` reads them.
        """
        title = f"--data {split.title}"
        image_indices, columns = _flatten_objects(title, split.read_cells(self.column))
        labels = tables.clean_labels(columns["labels"])
        values = self._choose_classes(split, labels)
        lengths = pc.list_value_length(columns["boxes"]).fill_null(0)
        if (lengths.to_numpy(zero_copy_only=False) != 4).any():
            raise Refused(f"{title}: a box in column {self.column} has other than 4 numbers")
        boxes = _to_numpy(columns["boxes"].flatten(), pa.float64(), np.nan).reshape(-1, 4)
        sizes = _read_sizes(split)
        notes = []
        if not self.box_format:
            image_sizes = sizes if sizes.all() else compute_upright_sizes(headers)
            self.box_format = _find_only_format(title, boxes, image_sizes[image_indices])
            notes.append(f"the boxes can only be {self.box_format}")
        category_ids = values if pa.types.is_integer(values.type) else None
        labels = labels.cast(values.type)
        raw = RawBoxes(
            title=title,
            images=images,
            classes=self.class_names,
            category_ids=_to_numpy(category_ids, pa.int64(), 0),
            image_ids=_read_image_ids(split),
            sizes=sizes,
            image_indices=image_indices,
            boxes=_convert_to_xywh(boxes, self.box_format),
            labels=find_class_ids(title, images, image_indices, labels, values),
            crowd=_to_numpy(columns.get("crowd"), pa.bool_(), False),
            areas=_to_numpy(columns.get("area"), pa.float64(), np.nan),
            upright=True,  # as `datasets` itself decodes images
            notes=notes,
        )
        return check_boxes(raw, headers)

    def _choose_classes(self, split: Split, labels: pa.Array) -> pa.Array:
        """The values of the classes in the column.

        Raises `Refused` if the split names others than the first one.
        """
        split_names = _get_class_names(split.features[self.column])
        names, values = tables.find_classes(labels, split_names)
        if self.class_values is None:
            self.class_names = names
            self.class_values = values
        if split_names and names != self.class_names:
            raise Refused(
                f"--data {split.title}: names other classes in {self.column} than train: "
                f"{', '.join(split_names[:5])}; make them the same"
            )
        return self.class_values


def _read_images(split: Split, image_column: str) -> tuple[Any, np.ndarray]:
    """The images of a split, and int64[N, 4] as `image_headers` reads them."""
    column = split.select_images(image_column)
    contents, paths = tables.read_contents(column)
    if contents is None:
        paths = paths.fill_null("").cast(pa.large_binary()).combine_chunks()
        headers = read_file_headers(split.folder, paths)
    else:
        rows = [read_header(content.as_py() or b"") for content in contents]
        headers = np.array(rows, np.int64).reshape(-1, 4)
    indices = np.arange(len(split))
    zeros = np.zeros(len(split), np.int64)
    images = Table(column, indices, split.title, split.folder, labels=zeros, classes=())
    return images, headers


def _read_sizes(split: Split) -> np.ndarray:
    """int64[N, 2] width and height, if the split has these columns; else zeros."""
    if "width" not in split.kinds or "height" not in split.kinds:
        return np.zeros((len(split), 2), np.int64)
    widths = _to_numpy(split.read_cells("width"), pa.int64(), 0)
    heights = _to_numpy(split.read_cells("height"), pa.int64(), 0)
    return np.stack([widths, heights], axis=1)


def _flatten_objects(title: str, cells: pa.Array) -> tuple[np.ndarray, dict[str, pa.Array]]:
    """The row of each object, and columns of all objects.

    Cells are lists of objects or objects of lists.
    """
    fields = _match_fields(cells.type)
    if tables.is_list(cells.type):
        objects = cells.flatten()
        rows = pc.list_parent_indices(cells).to_numpy().astype(np.int64)
        return rows, {key: objects.field(name) for key, name in fields.items()}
    columns = {}
    lengths = {}
    for key, name in fields.items():
        lists = pc.struct_field(cells, name)
        lengths[key] = pc.list_value_length(lists).fill_null(0).to_numpy()
        columns[key] = lists.flatten()
    num_boxes = lengths["boxes"]
    for key, name in fields.items():
        differs = lengths[key] != num_boxes
        if differs.any():
            row = int(differs.argmax())
            raise Refused(
                f"{title}: row {row} has {num_boxes[row]} boxes and {lengths[key][row]} of {name}"
            )
    return np.repeat(np.arange(len(cells)), num_boxes), columns


def _get_class_names(objects: Any) -> list[str] | None:
    """The names of a ClassLabel among the objects."""
    struct = getattr(objects, "feature", objects)
    feature = next((struct[name] for name in _LABELS if name in struct), None)
    return getattr(getattr(feature, "feature", feature), "names", None)


def _to_numpy(column: pa.Array | None, kind: pa.DataType, missing: float) -> Any:
    """The values of a column; None if there is no such column."""
    if column is None:
        return None
    return column.cast(kind).fill_null(missing).to_numpy(zero_copy_only=False)


def _read_image_ids(split: Split) -> Any:
    """The column image_id, if it holds distinct integers; else None."""
    if "image_id" not in split.kinds:
        return None
    ids = split.read_cells("image_id")
    if not pa.types.is_integer(ids.type) or ids.null_count:
        return None
    if pc.count_distinct(ids).as_py() != len(ids):
        return None
    return ids.to_numpy().astype(np.int64)


def _convert_to_xywh(boxes: np.ndarray, box_format: str) -> np.ndarray:
    """[M, 4] in a box format -> left, top, width, height."""
    if box_format == "xywh":
        return boxes
    if box_format == "xyxy":
        corners = boxes[:, :2]
        sides = boxes[:, 2:] - corners
    else:
        sides = boxes[:, 2:]
        corners = boxes[:, :2] - sides / 2
    return np.concatenate([corners, sides], axis=1)


def _find_only_format(title: str, boxes: np.ndarray, sizes: np.ndarray) -> str:
    """xywh or xyxy, if the other is impossible. Raises `Refused` if both or neither are possible."""
    if boxes.max(initial=0) <= 1:
        return "xywh"  # no boxes, or shares of an image, are refused later
    is_readable = (sizes > 0).all(axis=1)
    formats = []
    if (boxes[:, :2] + boxes[:, 2:] <= sizes + 1)[is_readable].all():
        formats.append("xywh")
    if (boxes[:, 2:] >= boxes[:, :2]).all():
        formats.append("xyxy")
    if len(formats) != 1:
        problem = "could be either" if formats else "fit neither"
        raise Refused(
            f"{title}: the boxes {problem} of xywh (left, top, width, height) and xyxy (left, "
            f"top, right, bottom); say which with --box_format, one of {', '.join(BOX_FORMATS)}"
        )
    return formats[0]
