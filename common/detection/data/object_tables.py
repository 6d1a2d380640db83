"""Hugging Face data sets with a column of objects: finds the columns, the box format and the classes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.data import tables
from common.data.shard_index import Rows
from common.data.shards import Shards
from common.data.tables import Split, Table
from common.detection.data.annotated import AnnotatedImages
from common.detection.data.box_checks import FoundBoxes, check
from common.detection.data.image_headers import header_of, headers_of_bytes, headers_of_files, upright_sizes
from common.errors import Refused

BOX_FORMATS = ("xywh", "xyxy", "cxcywh")  # left top width height; left top right bottom; centre width height
_BOXES = ("bbox", "bboxes", "box", "boxes")
_LABELS = ("category", "categories", "category_id", "label", "labels", "class", "class_id", "class_label")
_BESIDE = ("width", "height", "image_id")
_CROWD = ("iscrowd", "is_crowd", "crowd")


class ShardRows(Split):
    """A part of shards: its table has what is known of images, which lie elsewhere."""

    def __init__(self, data: str, name: str, source: Shards):
        import datasets

        super().__init__(data, name, datasets.Dataset(datasets.table.InMemoryTable(source.index.rows)))
        self.source = source


def shard_rows(objects: str) -> Rows:
    """What of samples in shards is kept: the objects, and what `_read_split` asks for beside them."""

    def find(split: Split, _image: str) -> list[str]:
        return [find_objects(split, objects), *(name for name in _BESIDE if name in split.kinds)]

    return Rows(find, (objects or "objects", *_BESIDE), header_of)


@dataclass
class ObjectParts:
    """The splits of a table. The first one that is read decides on columns, box format and classes. Raises `Refused`.

    Data sets do not say what the four numbers of a box mean. Without `box_format`, the boxes of the
    first split must leave one choice: as left, top, width, height some would exceed their image, or
    as corners some would have no positive size.
    """

    splits: dict[str, Split]
    image_column: str
    objects_column: str
    box_format: str

    @property
    def labels(self) -> dict[str, str]:
        return tables.part_labels(self.splits)

    def read(self, names: Sequence[str]) -> list[AnnotatedImages]:
        splits = [self.splits[name] for name in names]
        image = "" if isinstance(splits[0], ShardRows) else tables.find_image(splits[0], self.image_column)
        objects = find_objects(splits[0], self.objects_column)
        tables.require_columns(splits, *filter(None, (image, objects)))
        found, box_format, classes = [], self.box_format, None
        for split in splits:
            source, box_format, classes = _read_split(split, image, objects, box_format, classes)
            found.append(source)
        return found


def find_objects(split: Split, named: str) -> str:
    likely = [name for name, kind in split.kinds.items() if _fields_of(kind)]
    known = tables.listed(split.kinds)
    if named and named not in likely:
        problem = "holds no boxes with classes" if named in split.kinds else "is no column"
        raise Refused(f"--objects_column {named}: {problem} of --data {split.data}, which has {known}")
    if not named and len(likely) != 1:
        several = f"{tables.listed(likely)} could each hold the boxes"
        problem = several if likely else "no column with boxes and their classes found"
        raise Refused(f"--data {split.data}: {problem}; name it with --objects_column NAME ({known})")
    return named or likely[0]


def _fields_of(kind: pa.DataType) -> dict[str, str] | None:
    """{"boxes": field name, "labels": ..., "crowd": ..., "area": ...} of a list of objects or an object of lists; else None."""
    inner = kind.value_type if tables.is_list(kind) else kind
    if not pa.types.is_struct(inner):
        return None
    wanted = {"boxes": _BOXES, "labels": _LABELS, "crowd": _CROWD, "area": ("area", "areas")}
    found = {key: next((name for name in names if name in inner.names), None) for key, names in wanted.items()}
    return found if found["boxes"] and found["labels"] else None


def _read_split(
    split: Split, image: str, objects: str, box_format: str, classes: tuple | None
) -> tuple[AnnotatedImages, str, tuple]:
    """The split, the format of its boxes, and its classes: names and the values that the column has for them."""
    title = split.title
    rows, columns = _objects(title, split.cells(objects))
    images, headers = _images(split, image)
    given = _class_names(split.features[objects])
    if classes is None:
        classes = _vocabulary(given, columns["labels"])
    elif (named := _vocabulary(given, columns["labels"])[0]) != classes[0] and given:
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
        box_format = _only_format(title, boxes, (sizes if sizes.all() else upright_sizes(headers))[rows])
        notes = (f"{title}: the boxes can only be {box_format}",)
    crowd, areas = (columns.get(key) for key in ("crowd", "area"))
    found = FoundBoxes(
        title=f"--data {title}",
        images=images,
        classes=names,
        category_ids=values.to_numpy() if pa.types.is_integer(values.type) else None,
        image_ids=_image_ids(split),
        sizes=sizes,
        rows=rows,
        boxes=_as_xywh(boxes, box_format),
        labels=labels,
        crowd=crowd.cast(pa.bool_()).fill_null(False).to_numpy(zero_copy_only=False) if crowd else None,
        areas=areas.cast(pa.float64()).fill_null(np.nan).to_numpy() if areas else None,
        upright=True,  # as `datasets` itself decodes images
    )
    source = check(found, headers)
    return replace(source, notes=notes + source.notes), box_format, classes


def _images(split: Split, image: str) -> tuple[Any, np.ndarray]:
    """The images of a split, and int64[N, 4] as `image_headers` reads them."""
    if isinstance(split, ShardRows):
        return split.source, split.source.index.headers
    column, none = split.images(image), np.zeros(len(split), np.int64)
    cells = column.with_format("arrow")[:].column(0).combine_chunks()
    if pa.types.is_struct(cells.type):
        contents, paths = pc.struct_field(cells, "bytes"), pc.struct_field(cells, "path")
        cells = paths if contents.null_count == len(contents) else contents
    if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
        headers = headers_of_files(split.folder, cells.fill_null("").cast(pa.large_binary()))
    else:
        headers = headers_of_bytes(cells)
    return Table(column, np.arange(len(split)), split.title, split.folder, labels=none, classes=()), headers


def _objects(title: str, cells: pa.Array) -> tuple[np.ndarray, dict[str, pa.Array]]:
    """The row of each object, and the columns of all objects; a cell is a list of objects or an object of lists."""
    names = {key: name for key, name in _fields_of(cells.type).items() if name}
    if tables.is_list(cells.type):
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


def _class_names(objects: Any) -> list[str] | None:
    """The names of a ClassLabel among the objects."""
    inner = getattr(objects, "feature", objects)
    feature = next((inner[name] for name in _LABELS if name in inner), None)
    return getattr(getattr(feature, "feature", feature), "names", None)


def _vocabulary(names: list[str] | None, labels: pa.Array) -> tuple[tuple[str, ...], pa.Array]:
    """Class names and their values in the column: as ClassLabel says, otherwise the values found, sorted."""
    if names:
        return tuple(names), pa.array(range(len(names)), pa.int64())
    values = pc.unique(labels).drop_null()
    values = values.take(pc.sort_indices(values))
    return tuple(str(value) for value in values.to_pylist()), values


def _sizes(split: Split) -> np.ndarray:
    if not {"width", "height"} <= split.kinds.keys():
        return np.zeros((len(split), 2), np.int64)
    return np.stack([split.cells(side).cast(pa.int64()).fill_null(0).to_numpy() for side in ("width", "height")], 1)


def _image_ids(split: Split) -> np.ndarray | None:
    """The column image_id, if it holds distinct numbers."""
    if "image_id" in split.kinds:
        ids = split.cells("image_id")
        if pa.types.is_integer(ids.type) and not ids.null_count and pc.count_distinct(ids).as_py() == len(ids):
            return ids.to_numpy().astype(np.int64)
    return None


def _as_xywh(boxes: np.ndarray, box_format: str) -> np.ndarray:
    """[M, 4] in a box format -> left, top, width, height."""
    first, last = boxes[:, :2], boxes[:, 2:]
    if box_format == "xyxy":
        return np.concatenate([first, last - first], axis=1)
    return boxes if box_format == "xywh" else np.concatenate([first - last / 2, last], axis=1)


def _only_format(title: str, boxes: np.ndarray, sizes: np.ndarray) -> str:
    """xywh or xyxy, if the other is impossible. Raises `Refused` if both or neither are possible."""
    if not len(boxes):
        return "xywh"  # as good as any: that there are no boxes is refused elsewhere
    if boxes.max() <= 1:
        raise Refused(f"--data {title}: boxes are in shares of the image (0 to 1); give them in pixels")
    is_readable = (sizes > 0).all(axis=1)
    could_be = []
    if (boxes[:, :2] + boxes[:, 2:] <= sizes + 1)[is_readable].all():
        could_be.append("xywh")
    if (boxes[:, 2:] >= boxes[:, :2]).all():
        could_be.append("xyxy")
    if len(could_be) != 1:
        problem = "could be either" if could_be else "fit neither"
        raise Refused(
            f"--data {title}: the boxes {problem} of xywh (left, top, width, height) and xyxy (left, top, right, bottom); "
            f"say which with --box_format, one of {', '.join(BOX_FORMATS)}"
        )
    return could_be[0]
