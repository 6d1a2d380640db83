"""Labelled images in tables, such as Hugging Face data sets and CSV files.

The columns of images and labels are found by their types, and classes are read from the labels.
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.data.csv_files import IMAGE_NAME, parse_integers, trim
from common.data.images import BrokenImage, has_image_suffix
from common.data.source import Columns, hash_source, sample_evenly
from common.data.splits import get_split_kind
from common.errors import Refused, make_printable
from common.files import get_file_sizes, match_files
from common.randomness import mix

if TYPE_CHECKING:
    import datasets  # imported late: it takes a second, and most runs don't need it

_MAX_NAMES = 20  # of columns, in a message
_NUM_SAMPLE_ROWS = 1000  # that show which columns name files
_MASK_NAME = re.compile("mask|label|annotation|seg|(?<![a-z])gt(?![a-z])", re.IGNORECASE)
_BINARY_VALUES = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


class Split:
    """Rows of a table that belong together; for each column its type in Arrow and its class names.

    `data` names the table as `--data` does.
    """

    def __init__(self, data: str, name: str, rows: "datasets.Dataset"):
        self.data = data
        self.name = name
        self.rows = rows
        self.title = f"{data} {name}"
        path = Path(data).expanduser()
        # Relative paths start here.
        self.folder = os.path.abspath(path if path.is_dir() else path.parent)
        self.features = rows.features  # read once: `datasets` makes all of them each time
        self.kinds = {field.name: field.type for field in self.features.arrow_schema}
        self.class_names: dict[str, list[str] | None] = {}
        for column, feature in self.features.items():
            inner = getattr(feature, "feature", feature)
            self.class_names[column] = getattr(inner, "names", None)
        self.notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.rows.num_rows

    def find_columns(
        self, is_kind: Callable[[pa.DataType], bool], used: Sequence[str] = ()
    ) -> list[str]:
        """The columns of types for which `is_kind` is true, without those that are `used` otherwise."""
        return [name for name, kind in self.kinds.items() if is_kind(kind) and name not in used]

    @cached_property
    def file_columns(self) -> set[str]:
        """The columns of text most of whose cells are names of image files."""
        text_columns = self.find_columns(is_text)
        if not text_columns or not len(self):
            return set()
        indices = sample_evenly(len(self), _NUM_SAMPLE_ROWS).tolist()
        table = self.rows.select_columns(text_columns).with_format("arrow")[indices]
        file_columns = set()
        for name in text_columns:
            is_image = pc.match_substring_regex(trim(table[name]), f"{IMAGE_NAME}$")
            share = pc.mean(is_image).as_py()
            if share is not None and share > 0.5:
                file_columns.add(name)
        return file_columns

    def read_cells(self, column: str) -> pa.Array:
        """The cells of a column, in memory."""
        return self.rows.select_columns([column]).with_format("arrow")[:].column(0).combine_chunks()

    def select_images(self, column: str) -> "datasets.Dataset":
        """The column of images without the others, as bytes or paths."""
        import datasets

        feature = self.features[column]
        images = self.rows.select_columns([column])
        if hasattr(feature, "decode"):
            return images.cast_column(column, replace(feature, decode=False))
        if not is_text(self.kinds[column]) and not pa.types.is_integer(self.kinds[column]):
            return images
        cells = self.read_cells(column)
        paths = trim(cells.cast(pa.string()))
        if column not in self.file_columns:
            paths = self._complete_paths(paths)
        if paths.equals(cells):
            return images
        return datasets.Dataset(datasets.table.InMemoryTable(pa.table({column: paths})))

    def _complete_paths(self, ids: pa.Array) -> pa.Array:
        """The paths of the files that `ids` name without a suffix; `ids` if there are no such files.

        They lie in the table's folder or one in it. One of them decides, and the others are reported
        as missing if it misleads. Raises `Refused` if it names several files.
        """
        first = str(pc.min(ids))
        folder = glob.escape(self.folder)
        name = glob.escape(first)
        files = match_files(f"{folder}/{name}.*") + match_files(f"{folder}/*/{name}.*")
        files = [file for file in files if has_image_suffix(file)]
        if len(files) > 1:
            raise Refused(
                f"--data {self.title}: {first} could be {files[0]} or {files[1]}; write paths in "
                "the table"
            )
        if not files:
            return ids
        start, suffix = files[0].rsplit(first, 1)
        self.notes += (f"images: {start}*{suffix}",)
        return pc.binary_join_element_wise(start, ids, suffix, "")


def describe_splits(splits: dict[str, Split]) -> dict[str, str]:
    """How messages call the splits: {name: label}."""
    if len(splits) == 1:
        (name,) = splits
        if get_split_kind(name) == "train":
            return {name: "all rows"}
    return {name: f"split {name}" for name in splits}


def is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string())


def is_bytes(kind: pa.DataType) -> bool:
    """True if cells are bytes, or bytes beside a path."""
    if pa.types.is_struct(kind):
        return {"bytes", "path"} <= set(kind.names)
    return kind in (pa.binary(), pa.large_binary())


def format_names(names: Iterable[str]) -> str:
    """The first names for a message: a table may have thousands of columns."""
    names = list(names)
    text = ", ".join(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        text += f" and {len(names) - _MAX_NAMES:,} more"
    return text


# ---- columns


def find_image_column(split: Split, requested: str, *used: str) -> str:
    """The column `requested`, or the only one that has images, or that could have images.

    A column that is `used` otherwise is not found. Raises `Refused`.
    """
    from datasets import Image

    possible = split.find_columns(_may_have_images, used)
    images = [name for name in possible if isinstance(split.features[name], Image)]
    binary = split.find_columns(is_bytes, used)
    if images:
        likely = images
    elif binary:
        likely = binary
    else:
        likely = [name for name in possible if name in split.file_columns]
    return _choose_column(split, "image", requested, likely, possible)


def find_mask_column(split: Split, requested: str) -> str:
    """The column `requested`, or the only one of images or their files that has the name of masks.

    Raises `Refused`.
    """
    likely = split.find_columns(is_bytes) + sorted(split.file_columns)
    likely = [name for name in likely if _MASK_NAME.search(name)]
    possible = split.find_columns(_may_have_images)
    return _choose_column(split, "mask", requested, likely, possible)


def _may_have_images(kind: pa.DataType) -> bool:
    """True for bytes, paths and ids, as of Kaggle."""
    return is_bytes(kind) or is_text(kind) or pa.types.is_integer(kind)


def find_label_columns(split: Split, requested: str, *used: str) -> tuple[str, ...]:
    """The label column, or several of 0 and 1, which `requested` names with commas between them.

    A column that is `used` otherwise is not found. Raises `Refused`.
    """
    names = tuple(name.strip() for name in requested.split(","))
    if len(names) > 1 and requested not in split.kinds:
        unknown = [name for name in names if name not in split.kinds]
        if unknown:
            raise Refused(
                f"--label_column {requested}: --data {split.data} has no column {unknown[0]}; it "
                f"has {format_names(split.kinds)}"
            )
        return names
    kinds = {name: kind for name, kind in split.kinds.items() if name not in used}
    class_labels = [name for name in kinds if split.class_names[name]]
    ids = []
    numeric = []
    for name, kind in kinds.items():
        inner = kind.value_type if is_list(kind) else kind
        if pa.types.is_integer(inner) or is_text(inner):
            ids.append(name)
        elif pa.types.is_boolean(inner) or pa.types.is_floating(inner):
            numeric.append(name)
    likely = class_labels
    if not likely:
        likely = [name for name in ids if name not in split.file_columns]
    if not likely:
        likely = numeric
    return (_choose_column(split, "label", requested, likely, ids + numeric),)


def _choose_column(
    split: Split, what: str, requested: str, likely: list[str], possible: list[str]
) -> str:
    """The column `requested`, if it is one of `possible`, or the only one of `likely`."""
    columns = format_names(f"{name} ({kind})" for name, kind in split.kinds.items())
    if requested:
        if requested in possible:
            return requested
        problem = f"can't be the {what} column" if requested in split.kinds else "is no column"
        raise Refused(
            f"--{what}_column {requested}: {problem} of --data {split.data}, which has {columns}"
        )
    if len(likely) != 1:
        problem = f"no {what} column found"
        if likely:
            problem = f"{format_names(likely)} could each be the {what}"
        raise Refused(
            f"--data {split.data}: {problem}; name it with --{what}_column NAME (columns: "
            f"{columns})"
        )
    return likely[0]


# ---- sources


@dataclass(frozen=True, eq=False)
class Table(Columns):
    """Rows of a split, memory-mapped. `datasets` decodes no image: a broken one is reported as any."""

    column: "datasets.Dataset"  # only the image column: bytes, a path, or both
    rows: np.ndarray  # int64[N]
    title: str
    folder: str  # relative paths start here
    # int64[N] bytes of files, -1 for a missing one; None if the table has bytes.
    sizes: np.ndarray | None = None

    def get_name(self, index: int) -> str:
        if self.sizes is not None:
            path = self._read_cell(index)
            if isinstance(path, str):
                return make_printable(os.path.join(self.folder, path))
        return f"{self.title}[{self.rows[index]}]"

    def get_content(self, index: int) -> str | bytes:
        cell = self._read_cell(index)
        if cell is None:
            raise BrokenImage("the row has no image")
        return os.path.join(self.folder, cell) if isinstance(cell, str) else cell

    def _read_cell(self, index: int) -> str | bytes | None:
        """The path or bytes of the image."""
        if self.sizes is not None:
            return self._paths[int(self.rows[index])].as_py()
        (cell,) = self.column[int(self.rows[index])].values()
        if isinstance(cell, dict):
            cell = cell["bytes"] if cell["bytes"] is not None else cell["path"]
        return cell

    @cached_property
    def _paths(self) -> pa.ChunkedArray:
        """The column of a table of files: `datasets` takes 15 us for a cell."""
        return read_contents(self.column)[1]

    @property
    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.sizes == -1) if self.sizes is not None else super().missing

    @cached_property
    def fingerprint(self) -> str:
        contents, paths = read_contents(self.column)
        if self.sizes is None:  # a path is then only where the bytes once came from
            return hash_source(self.classes, self.labels, _measure_bytes(contents)[self.rows])
        names = None if paths is None else paths.take(self.rows)
        return hash_source(self.classes, self.labels, self.sizes, names)

    def list_files(self) -> tuple[pa.LargeBinaryArray | None, np.ndarray]:
        contents, paths = read_contents(self.column)
        if contents is not None:
            return None, _measure_bytes(contents)[self.rows].astype(np.int64)
        paths = paths.cast(pa.large_binary()).combine_chunks().take(pa.array(self.rows))
        return paths, np.zeros(len(paths), np.int64) if self.sizes is None else self.sizes

    def hash_images(self, key: int) -> np.ndarray:
        return mix(self.rows, key)


def read_tables(
    splits: Sequence[Split],
    image_column: str,
    label_column: str,
    min_classes: int,
    group_column: str = "",
) -> list[Table]:
    """The images of each split. The first one decides on columns and classes. Raises `Refused`."""
    image = find_image_column(splits[0], image_column)
    columns = find_label_columns(splits[0], label_column, image, group_column)
    require_columns(splits, image, *columns)
    classes, labels_by_split = read_labels(splits, columns, min_classes)
    tables = []
    for split, labels in zip(splits, labels_by_split, strict=True):
        table = read_images(split, image, group_column)
        tables.append(replace(table, labels=labels, classes=classes))
    return tables


def read_images(split: Split, column: str, group_column: str = "") -> Table:
    """The images of a column, without labels. Raises `Refused`."""
    images = split.select_images(column)
    return Table(
        column=images,
        rows=np.arange(len(split)),
        title=split.title,
        folder=split.folder,
        sizes=_read_file_sizes(images, split.folder),
        labels=np.zeros(len(split), np.int64),
        classes=(),
        groups=read_groups(split, group_column),
        notes=split.notes,
    )


def check_group(split: Split, column: str) -> None:
    """Raise `Refused` for a `--group_column` that the split does not have, or that holds lists."""
    if column not in split.kinds or pa.types.is_nested(split.kinds[column]):
        problem = "holds several values in a row" if column in split.kinds else "is no column"
        raise Refused(
            f"--group_column {column}: {problem} of --data {split.data}, which has "
            f"{format_names(split.kinds)}"
        )


def read_groups(split: Split, column: str) -> np.ndarray | None:
    """int64[N], equal for rows with the same value of `column`, or None for "". Raises `Refused`."""
    if not column:
        return None
    check_group(split, column)
    cells = split.read_cells(column)
    if cells.null_count:
        row = _find_null(cells)
        raise Refused(
            f"--data {split.title}: row {row} has nothing in --group_column {column}; fill it in"
        )
    return cells.dictionary_encode().indices.to_numpy().astype(np.int64)


def read_labels(
    splits: Sequence[Split], columns: tuple[str, ...], min_classes: int
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Classes, and labels of each split as `Source.labels` has them. Raises `Refused`.

    A column has ids, names or lists of them; several columns have 0 and 1.
    """
    if len(columns) > 1:
        return columns, [_read_binary_columns(split, columns) for split in splits]
    (column,) = columns
    first = splits[0]
    for split in splits[1:]:
        if split.class_names[column] != first.class_names[column]:
            problem = f"splits {first.name} and {split.name} name other classes in {column}"
            raise Refused(f"--data {first.data}: {problem}; make them the same")
    cells_by_split = [clean_labels(split.read_cells(column)) for split in splits]
    classes, values = find_classes(cells_by_split[0], first.class_names[column])
    if is_list(first.kinds[column]):
        min_classes = 1
    if len(classes) < min_classes:
        problem = f"only the class {classes[0]}" if classes else "no class"
        raise Refused(
            f"--data {first.title}: {problem} in column {column}; needs {min_classes} or more"
        )
    labels = []
    for split, cells in zip(splits, cells_by_split, strict=True):
        labels.append(_read_class_ids(split, column, cells, classes, values))
    return classes, labels


def require_columns(splits: Sequence[Split], *names: str) -> None:
    """Raise `Refused` if a split lacks columns that the first one has."""
    for split in splits[1:]:
        missing = [name for name in names if name not in split.kinds]
        if missing:
            raise Refused(
                f"--data {split.data}: split {split.name} has no column {min(missing)}, which "
                f"{splits[0].name} has"
            )


def read_contents(column: "datasets.Dataset") -> tuple[Any, Any]:
    """Bytes and paths of a column of images, as chunked arrays; None if it has no bytes, or no paths."""
    cells = column.with_format("arrow")[:].column(0)
    if is_text(cells.type):
        return None, cells
    if not pa.types.is_struct(cells.type):
        return cells, None
    contents = pc.struct_field(cells, "bytes")
    paths = pc.struct_field(cells, "path")
    if contents.null_count == len(contents):
        return None, paths
    return contents, paths


def _measure_bytes(contents: pa.ChunkedArray) -> np.ndarray:
    """The number of bytes of each image, -1 for a missing one."""
    return pc.binary_length(contents).fill_null(-1).to_numpy()


def _read_file_sizes(column: "datasets.Dataset", folder: str) -> np.ndarray | None:
    """int64[N]: bytes of each file, -1 for a missing one; None if the column has bytes."""
    contents, paths = read_contents(column)
    if contents is not None:
        return None
    return np.array(get_file_sizes(_iterate_files(paths, folder)), np.int64)


def _iterate_files(paths: pa.ChunkedArray, folder: str) -> Iterator[str]:
    """The file of each path; "" for a row without one."""
    for chunk in paths.chunks:  # never a list of all paths
        for path in chunk.to_pylist():
            yield os.path.join(folder, path) if path else ""


def _find_null(cells: pa.Array) -> int:
    """The first row without a value."""
    return pc.index(cells.is_null(), True).as_py()


# ---- labels


def _read_binary_columns(split: Split, columns: Sequence[str]) -> np.ndarray:
    """bool[N, C] from columns of 0 and 1 of any type."""
    labels = np.zeros((len(split), len(columns)), bool)
    table = split.rows.select_columns(list(columns)).with_format("arrow")[:]
    value_set = pa.array(list(_BINARY_VALUES))
    values = np.array(list(_BINARY_VALUES.values()))
    for class_id, column in enumerate(columns):
        cells = table[column].combine_chunks()
        texts = trim(pc.utf8_lower(cells.cast(pa.string())))
        indices = pc.index_in(texts, value_set=value_set).fill_null(-1).to_numpy()
        is_unknown = indices < 0
        if is_unknown.any():
            row = int(is_unknown.argmax())
            problem = f"row {row} has {cells[row].as_py()!r} in column {column}"
            raise Refused(
                f"--data {split.title}: {problem}; each of several label columns must hold 0 or 1"
            )
        labels[:, class_id] = values[indices]
    return labels


def clean_labels(cells: pa.Array) -> pa.Array:
    """Labels, or lists of them, in the form of a CSV file's.

    Texts are trimmed, and null if they are empty. True is a text, and 1.0 is 1.
    """
    if is_list(cells.type):
        lengths = pc.list_value_length(cells).fill_null(0).to_numpy()
        offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
        values = clean_labels(pc.list_flatten(cells))
        return pa.ListArray.from_arrays(offsets, values, mask=cells.is_null())
    if pa.types.is_boolean(cells.type):
        return pc.if_else(cells, "True", "False")
    if pa.types.is_floating(cells.type):
        return parse_integers(pc.if_else(pc.is_nan(cells), None, cells).cast(pa.string()))
    return trim(cells) if is_text(cells.type) else cells


def find_classes(cells: pa.Array, names: list[str] | None) -> tuple[tuple[str, ...], pa.Array]:
    """Class names and their values in a column: `names`, or else the distinct values, sorted."""
    if names:
        return tuple(names), pa.array(range(len(names)), pa.int64())
    labels = pc.list_flatten(cells) if is_list(cells.type) else cells
    values = pc.unique(labels).drop_null()
    values = values.take(pc.sort_indices(values))
    if pa.types.is_integer(values.type) and values.to_pylist() != [-1, 1]:  # which are two classes
        zero = pa.scalar(0, values.type)  # another negative number means that the label is missing
        values = values.filter(pc.greater_equal(values, zero))
    return tuple(str(value) for value in values.to_pylist()), values


def _read_class_ids(
    split: Split, column: str, cells: pa.Array, classes: tuple[str, ...], values: pa.Array
) -> np.ndarray:
    """int64[N] class ids of cells, or bool[N, C] of lists; `values` are those of `classes`."""
    title = f"--data {split.title}"
    if cells.null_count:
        raise Refused(
            f"{title}: row {_find_null(cells)} has no label in column {column} (null); remove the "
            "row or label it"
        )
    labels = cells
    rows = np.arange(len(cells))
    if is_list(cells.type):
        labels = pc.list_flatten(cells)
        rows = pc.list_parent_indices(cells).to_numpy()
    indices = pc.index_in(labels.cast(values.type), value_set=values)
    class_ids = indices.fill_null(-1).to_numpy().astype(np.int64)
    if (class_ids < 0).any():
        i = int(np.argmin(class_ids))
        expected = ", ".join(classes[:10])
        if split.class_names[column]:
            expected = f"0 to {len(classes) - 1}"
        raise Refused(
            f"{title}: row {rows[i]} has label {labels[i].as_py()!r} in column {column}, "
            f"but the {len(classes)} classes are {expected}; remove the row or correct it"
        )
    if not is_list(cells.type):
        return class_ids
    is_of_class = np.zeros((len(cells), len(classes)), bool)
    is_of_class[rows, class_ids] = True
    advice = (
        f"in column {column}; a row lists the ids or names of the classes it shows, not a 0 or 1 "
        "for each"
    )
    num_labels = np.bincount(rows, minlength=len(cells))
    is_repeated = num_labels > is_of_class.sum(axis=1)
    if is_repeated.any():
        raise Refused(f"{title}: row {is_repeated.argmax()} has a class twice {advice}")
    has_binary_classes = classes in (("0", "1"), ("False", "True"))
    if has_binary_classes and not split.class_names[column] and is_of_class.all():  # such as [0, 1]
        raise Refused(f"{title}: row 0, as each one, has both classes {advice}")
    return is_of_class
