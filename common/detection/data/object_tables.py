"""Hugging Face data sets with a column of objects: finds the columns, the box format and the classes."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from common.data import huggingface
from common.detection.data.annotated import Annotations, FixedImages
from common.detection.data.box_checks import FoundBoxes, check
from common.detection.data.box_formats import as_xywh, only_format
from common.detection.data.image_headers import headers_of_bytes, headers_of_files, upright_sizes
from common.errors import Refused

if TYPE_CHECKING:
    import datasets

_BOXES = ("bbox", "bboxes", "box", "boxes")
_LABELS = ("category", "categories", "category_id", "label", "labels", "class", "class_id", "class_label")
_CROWD = ("iscrowd", "is_crowd", "crowd")


@dataclass(frozen=True, eq=False)
class AnnotatedTable(FixedImages):
    """Rows of a split with their boxes. Satisfies `Annotated`."""

    images: huggingface.Table
    byte_counts: np.ndarray  # int64[N] size of each image
    origin: str = ""

    @cached_property
    def fingerprint(self) -> str:
        return self.hash(None, self.byte_counts)

    def name(self, index: int) -> str:
        return self.images.name(index)

    def content(self, index: int) -> str | bytes | Image.Image:
        return self.images.content(index)

    def part(self, rows: np.ndarray) -> "AnnotatedTable":
        columns = self.columns_of(rows)
        return replace(self, **columns, images=self.images.part(rows), byte_counts=self.byte_counts[rows])

    def draws(self, key: int) -> np.ndarray:
        """uint64[N] random numbers, each a function of its row and `key` alone."""
        return self.images.draws(key)


class ObjectParts:
    """The splits of a data set. The first one that is read decides on columns, box format and classes. Raises `Refused`.

    Data sets do not say what the four numbers of a box mean. Without `box_format`, the boxes of the first split must leave
    one choice: as left, top, width, height some would exceed their image, or as corners some would have no positive size.
    """

    def __init__(
        self, data: str, tables: dict[str, Any], image_column: str, objects_column: str, box_format: str
    ) -> None:
        self._data, self._named, self._box_format = data, (image_column, objects_column), box_format
        self._splits = tables
        self._first: tuple | None = None
        self.labels = huggingface.split_labels(tables)

    def read(self, name: str, first: AnnotatedTable | None) -> AnnotatedTable:
        """The split of this name, with the columns, box format and classes of `first` if one was read before."""
        split, title, folder = self._splits[name], f"{self._data} {name}", huggingface.folder_of(self._data)
        if first is None:
            image = huggingface.find_column(self._data, split, "image", self._named[0], exclude="")
            objects = _find_objects(self._data, split, self._named[1])
            found, box_format, classes = _read_split(title, split, image, objects, folder, self._box_format, None)
            self._first = name, image, objects, box_format, classes
            return found
        first_name, image, objects, *others = self._first
        if missing := {image, objects} - set(split.column_names):
            raise Refused(f"--data {self._data}: split {name} has no column {missing.pop()}, which {first_name} has")
        return _read_split(title, split, image, objects, folder, *others)[0]


def _find_objects(data: str, split: "datasets.Dataset", named: str) -> str:
    likely = [name for name, column in huggingface.columns_of(split).items() if _fields_of(column.kind)]
    if named and named not in likely:
        problem = "holds no boxes with classes" if named in split.column_names else "is no column"
        raise Refused(
            f"--objects_column {named}: {problem} of --data {data}, which has {huggingface.listed(split.column_names)}"
        )
    if not named and len(likely) != 1:
        problem = (
            f"{huggingface.listed(likely)} could each hold the boxes"
            if likely
            else "no column with boxes and their classes found"
        )
        raise Refused(
            f"--data {data}: {problem}; name it with --objects_column NAME ({huggingface.listed(split.column_names)})"
        )
    return named or likely[0]


def _fields_of(kind: pa.DataType) -> dict[str, str] | None:
    """{"boxes": field name, "labels": ..., "crowd": ..., "area": ...} of a list of objects or an object of lists; else None."""
    inner = kind.value_type if huggingface.is_list(kind) else kind
    if not pa.types.is_struct(inner):
        return None
    wanted = {"boxes": _BOXES, "labels": _LABELS, "crowd": _CROWD, "area": ("area", "areas")}
    found = {key: next((name for name in names if name in inner.names), None) for key, names in wanted.items()}
    return found if found["boxes"] and found["labels"] else None


def _read_split(
    title: str, split: "datasets.Dataset", image: str, objects: str, folder: str, box_format: str, classes: tuple | None
) -> tuple[AnnotatedTable, str, tuple]:
    """The split, the format of its boxes, and its classes: names and the values that the column has for them."""
    rows, columns = _objects(title, huggingface.cells_of(split, objects))
    column = split.select_columns([image])
    if hasattr(split.features[image], "decode"):
        column = column.cast_column(image, replace(split.features[image], decode=False))
    none = np.zeros(split.num_rows, np.int64)
    images = huggingface.Table(column, np.arange(split.num_rows), none, (), title, folder)
    headers = _headers(column, folder)
    if classes is None:
        classes = _vocabulary(split.features[objects], columns["labels"])
    elif (named := _vocabulary(split.features[objects], columns["labels"])[0]) != classes[0] and _names(split, objects):
        raise Refused(
            f"--data {title}: names other classes in {objects} than train: {', '.join(named[:5])}; make them the same"
        )
    names, values = classes
    labels = (
        pc.index_in(columns["labels"].cast(values.type), value_set=values).fill_null(-1).to_numpy().astype(np.int64)
    )
    if (unknown := labels < 0).any():
        box = int(unknown.argmax())
        raise Refused(
            f"--data {title}: {unknown.sum():,} boxes of an unknown class, first row {rows[box]} with "
            f"{columns['labels'][box].as_py()!r}; the classes are {', '.join(names[:10])}"
        )
    boxes = columns["boxes"]
    if (pc.list_value_length(boxes).fill_null(0).to_numpy(zero_copy_only=False) != 4).any():
        raise Refused(f"--data {title}: a box in column {objects} has other than 4 numbers")
    boxes = boxes.flatten().cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False).reshape(-1, 4)
    sizes = _sizes(split)
    notes = ()
    if not box_format:
        box_format = only_format(title, boxes, (sizes if sizes.all() else upright_sizes(headers))[rows])
        notes = (f"{title}: the boxes can only be {box_format}",)
    crowd, areas = (columns.get(key) for key in ("crowd", "area"))
    found = FoundBoxes(
        title=f"--data {title}",
        classes=names,
        category_ids=values.to_numpy() if pa.types.is_integer(values.type) else np.arange(len(names)),
        image_ids=_image_ids(split),
        sizes=sizes,
        rows=rows,
        boxes=as_xywh(boxes, box_format),
        labels=labels,
        crowd=crowd.cast(pa.bool_()).fill_null(False).to_numpy(zero_copy_only=False)
        if crowd
        else np.zeros(len(rows), bool),
        areas=areas.cast(pa.float64()).fill_null(np.nan).to_numpy() if areas else np.full(len(rows), np.nan),
        name=images.name,
        upright=True,  # as `datasets` itself decodes images
    )
    annotations = check(found, headers)
    every = {field.name: getattr(annotations, field.name) for field in fields(Annotations)}
    every["notes"] = notes + every["notes"]
    return AnnotatedTable(**every, images=images, byte_counts=headers[:, 3]), box_format, classes


def _objects(title: str, cells: pa.Array) -> tuple[np.ndarray, dict[str, pa.Array]]:
    """The row of each object, and the columns of all objects; a cell is a list of objects or an object of lists."""
    names = {key: name for key, name in _fields_of(cells.type).items() if name}
    if huggingface.is_list(cells.type):
        flat = cells.flatten()
        return pc.list_parent_indices(cells).to_numpy().astype(np.int64), {k: flat.field(n) for k, n in names.items()}
    lists = {key: pc.struct_field(cells, name) for key, name in names.items()}
    lengths = {key: pc.list_value_length(column).fill_null(0).to_numpy() for key, column in lists.items()}
    for key, counts in lengths.items():
        if (differs := counts != lengths["boxes"]).any():
            row = int(differs.argmax())
            raise Refused(
                f"--data {title}: row {row} has {lengths['boxes'][row]} boxes and {counts[row]} of {names[key]}"
            )
    return np.repeat(np.arange(len(cells)), lengths["boxes"]), {key: column.flatten() for key, column in lists.items()}


def _headers(column: "datasets.Dataset", folder: str) -> np.ndarray:
    cells = column.with_format("arrow")[:].column(0).combine_chunks()
    if pa.types.is_struct(cells.type):
        contents, paths = pc.struct_field(cells, "bytes"), pc.struct_field(cells, "path")
        cells = paths if contents.null_count == len(contents) else contents
    if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
        return headers_of_files(folder, cells.fill_null("").cast(pa.large_binary()))
    return headers_of_bytes(cells)


def _label_feature(objects: Any) -> Any:
    inner = getattr(objects, "feature", objects)
    feature = next((inner[name] for name in _LABELS if name in inner), None)
    return getattr(feature, "feature", feature)


def _names(split: "datasets.Dataset", objects: str) -> list[str] | None:
    return getattr(_label_feature(split.features[objects]), "names", None)


def _vocabulary(objects: Any, labels: pa.Array) -> tuple[tuple[str, ...], pa.Array]:
    """Class names and their values in the column: as ClassLabel says, otherwise the values found, sorted."""
    if names := getattr(_label_feature(objects), "names", None):
        return tuple(names), pa.array(range(len(names)), pa.int64())
    values = pc.unique(labels).drop_null()
    values = values.take(pc.sort_indices(values))
    return tuple(str(value) for value in values.to_pylist()), values


def _sizes(split: "datasets.Dataset") -> np.ndarray:
    if not {"width", "height"} <= set(split.column_names):
        return np.zeros((split.num_rows, 2), np.int64)
    columns = [
        huggingface.cells_of(split, name).cast(pa.int64()).fill_null(0).to_numpy() for name in ("width", "height")
    ]
    return np.stack(columns, axis=1)


def _image_ids(split: "datasets.Dataset") -> np.ndarray:
    """The column image_id, if it holds distinct numbers, else the row numbers."""
    if "image_id" in split.column_names:
        ids = huggingface.cells_of(split, "image_id")
        if pa.types.is_integer(ids.type) and not ids.null_count and pc.count_distinct(ids).as_py() == len(ids):
            return ids.to_numpy().astype(np.int64)
    return np.arange(split.num_rows)
