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
from common.detection.data.box_checks import RawBoxes, check, find_class_ids
from common.detection.data.image_headers import header_of, headers_of_files, upright_sizes
from common.errors import Refused

# Left top width height; left top right bottom; centre width height.
BOX_FORMATS = ("xywh", "xyxy", "cxcywh")
BESIDE = ("width", "height", "image_id")
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
_FIELDS = {
    "boxes": ("bbox", "bboxes", "box", "boxes"),
    "labels": _LABELS,
    "crowd": ("iscrowd", "is_crowd", "crowd"),
    "area": ("area", "areas"),
}


def object_parts(
    splits: Mapping[str, Split], spec: Any, shards: Mapping[str, Any] | None = None
) -> DataSplits[AnnotatedImages]:
    """The splits of a table; the first one decides on columns, format and classes. Raises `Refused`.

    With `shards`, the images of each split lie there, as `common.shards.Shards`, and there is no
    column of images.
    """

    def read(names: Sequence[str]) -> list[AnnotatedImages]:
        chosen = [splits[name] for name in names]
        columns = []
        if shards is None:
            columns.append(tables.find_image_column(chosen[0], spec.image_column))
        columns.append(find_objects(chosen[0], spec.objects_column))
        tables.require_columns(chosen, *columns)
        reader = _Reader(columns[-1], spec.box_format)
        sources = []
        for name, split in zip(names, chosen, strict=True):
            if shards is None:
                images, headers = _read_images(split, columns[0])
            else:
                images, headers = shards[name], shards[name].headers
            images = replace(images, groups=tables.read_groups(split, spec.group_column))
            sources.append(reader.read(split, images, headers))
        return sources

    return DataSplits(tables.get_split_labels(dict(splits)), read)


def find_objects(split: Split, named: str) -> str:
    likely = [name for name, kind in split.kinds.items() if _fields_of(kind)]
    known = tables.format_names(split.kinds)
    if named and named not in likely:
        problem = "holds no boxes with classes" if named in split.kinds else "is no column"
        raise Refused(
            f"--objects_column {named}: {problem} of --data {split.data}, which has {known}"
        )
    if not named and not any(map(pa.types.is_nested, split.kinds.values())):
        problem = "no column holds lists of boxes and classes, the objects of an image"
        advice = "a file with a row for each box is not read: write COCO's JSON from it"
        raise Refused(f"--data {split.data}: {problem} ({known}); {advice}")
    if not named and len(likely) != 1:
        several = f"{tables.format_names(likely)} could each hold the boxes"
        problem = several if likely else "no column with boxes and their classes found"
        raise Refused(
            f"--data {split.data}: {problem}; name it with --objects_column NAME ({known})"
        )
    return named or likely[0]


def _fields_of(kind: pa.DataType) -> dict[str, str]:
    """Field names by the keys of `_FIELDS`, of a list of objects or an object of lists; else {}."""
    inner = kind.value_type if tables.is_list(kind) else kind
    there = inner.names if pa.types.is_struct(inner) else []
    found = {
        key: name for key, names in _FIELDS.items() for name in reversed(names) if name in there
    }
    return found if {"boxes", "labels"} <= found.keys() else {}


@dataclass
class _Reader:
    """Reads splits of a table, of which the first one decides on the box format and the classes."""

    column: str  # of objects
    box_format: str  # "": the only one that is possible
    class_names: tuple[str, ...] = ()
    class_values: pa.Array | None = None  # what stands for the names in the column

    def read(self, split: Split, images: Any, headers: np.ndarray) -> AnnotatedImages:
        """The annotations of `images`; `headers` int64[N, 4] as `image_headers` reads them. Raises
        `Refused`.
        """
        title = f"--data {split.title}"
        rows, columns = _list_objects(title, split.read_cells(self.column))
        labels = tables.clean_labels(columns["labels"])
        values = self._choose_classes(split, labels)
        if (
            pc.list_value_length(columns["boxes"]).fill_null(0).to_numpy(zero_copy_only=False) != 4
        ).any():
            raise Refused(f"{title}: a box in column {self.column} has other than 4 numbers")
        boxes = _to_numbers(columns["boxes"].flatten(), pa.float64(), np.nan).reshape(-1, 4)
        sizes = _read_sizes(split)
        notes = []
        if not self.box_format:
            frames = sizes if sizes.all() else upright_sizes(headers)
            self.box_format = _find_only_format(title, boxes, frames[rows])
            notes.append(f"the boxes can only be {self.box_format}")
        raw = RawBoxes(
            title=title,
            images=images,
            classes=self.class_names,
            category_ids=_to_numbers(
                values if pa.types.is_integer(values.type) else None, pa.int64(), 0
            ),
            image_ids=_read_image_ids(split),
            sizes=sizes,
            rows=rows,
            boxes=_as_xywh(boxes, self.box_format),
            labels=find_class_ids(title, images, rows, labels.cast(values.type), values),
            crowd=_to_numbers(columns.get("crowd"), pa.bool_(), False),
            areas=_to_numbers(columns.get("area"), pa.float64(), np.nan),
            upright=True,  # as `datasets` itself decodes images
            notes=notes,
        )
        return check(raw, headers)

    def _choose_classes(self, split: Split, labels: pa.Array) -> pa.Array:
        """The values of the classes in the column. Raises `Refused` if the split names others than
        the first one.
        """
        given = _class_names(split.features[self.column])
        names, values = tables.find_classes(labels, given)
        if self.class_values is None:
            self.class_names = names
            self.class_values = values
        if given and names != self.class_names:
            raise Refused(
                f"--data {split.title}: names other classes in {self.column} than train: "
                f"{', '.join(given[:5])}; make them the same"
            )
        return self.class_values


def _read_images(split: Split, image: str) -> tuple[Any, np.ndarray]:
    """The images of a split, and int64[N, 4] as `image_headers` reads them."""
    column = split.select_images(image)
    contents, paths = tables.read_contents(column)
    if contents is None:
        headers = headers_of_files(
            split.folder, paths.fill_null("").cast(pa.large_binary()).combine_chunks()
        )
    else:
        headers = np.array([header_of(cell.as_py() or b"") for cell in contents], np.int64).reshape(
            -1, 4
        )
    none = np.zeros(len(split), np.int64)
    return Table(
        column, np.arange(len(split)), split.title, split.folder, labels=none, classes=()
    ), headers


def _read_sizes(split: Split) -> np.ndarray:
    """int64[N, 2] width and height, if the split has these columns; else zeros."""
    if not {"width", "height"} <= split.kinds.keys():
        return np.zeros((len(split), 2), np.int64)
    return np.stack(
        [_to_numbers(split.read_cells(side), pa.int64(), 0) for side in ("width", "height")], axis=1
    )


def _list_objects(title: str, cells: pa.Array) -> tuple[np.ndarray, dict[str, pa.Array]]:
    """The row of each object, and columns of all objects; cells are lists of objects or objects of lists."""
    names = _fields_of(cells.type)
    if tables.is_list(cells.type):
        flat = cells.flatten()
        return pc.list_parent_indices(cells).to_numpy().astype(np.int64), {
            k: flat.field(n) for k, n in names.items()
        }
    lists = {key: pc.struct_field(cells, name) for key, name in names.items()}
    lengths = {
        key: pc.list_value_length(column).fill_null(0).to_numpy() for key, column in lists.items()
    }
    for key, counts in lengths.items():
        if (differs := counts != lengths["boxes"]).any():
            row = int(differs.argmax())
            raise Refused(
                f"{title}: row {row} has {lengths['boxes'][row]} boxes and {counts[row]} of "
                f"{names[key]}"
            )
    return np.repeat(np.arange(len(cells)), lengths["boxes"]), {
        key: column.flatten() for key, column in lists.items()
    }


def _class_names(objects: Any) -> list[str] | None:
    """The names of a ClassLabel among the objects."""
    inner = getattr(objects, "feature", objects)
    feature = next((inner[name] for name in _LABELS if name in inner), None)
    return getattr(getattr(feature, "feature", feature), "names", None)


def _to_numbers(column: pa.Array | None, kind: pa.DataType, missing: float) -> Any:
    """The numbers of a column; None if there is no such column."""
    if column is None:
        return None
    return column.cast(kind).fill_null(missing).to_numpy(zero_copy_only=False)


def _read_image_ids(split: Split) -> Any:
    """The column image_id, if it holds distinct numbers; else none."""
    if "image_id" in split.kinds:
        ids = split.read_cells("image_id")
        if (
            pa.types.is_integer(ids.type)
            and not ids.null_count
            and pc.count_distinct(ids).as_py() == len(ids)
        ):
            return ids.to_numpy().astype(np.int64)
    return None


def _as_xywh(boxes: np.ndarray, box_format: str) -> np.ndarray:
    """[M, 4] in a box format -> left, top, width, height."""
    first, last = boxes[:, :2], boxes[:, 2:]
    if box_format == "xyxy":
        return np.concatenate([first, last - first], axis=1)
    return boxes if box_format == "xywh" else np.concatenate([first - last / 2, last], axis=1)


def _find_only_format(title: str, boxes: np.ndarray, sizes: np.ndarray) -> str:
    """xywh or xyxy, if the other is impossible. Raises `Refused` if both or neither are possible."""
    if boxes.max(initial=0) <= 1:
        return "xywh"  # no boxes, or shares of an image, are refused later
    is_readable = (sizes > 0).all(axis=1)
    could_be = []
    if (boxes[:, :2] + boxes[:, 2:] <= sizes + 1)[is_readable].all():
        could_be.append("xywh")
    if (boxes[:, 2:] >= boxes[:, :2]).all():
        could_be.append("xyxy")
    if len(could_be) != 1:
        problem = "could be either" if could_be else "fit neither"
        raise Refused(
            f"{title}: the boxes {problem} of xywh (left, top, width, height) and xyxy (left, "
            f"top, right, bottom); say which with --box_format, one of {', '.join(BOX_FORMATS)}"
        )
    return could_be[0]
