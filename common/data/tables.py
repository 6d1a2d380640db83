"""Labelled images in tables (Hugging Face data sets, CSV files): finds the columns of images and
labels, reads the classes.
"""

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.data.csv_files import IMAGE_NAME, as_numbers, trim
from common.data.images import BrokenImage, has_image_suffix
from common.data.source import Columns, hash_source, sample_evenly
from common.data.splits import get_split_kind
from common.errors import Refused, make_printable
from common.files import get_file_sizes, match_files
from common.randomness import mix

if TYPE_CHECKING:
    import datasets  # imported late: it takes a second, and most runs don't need it

_NAMED = 20  # columns in a message
_LOOKED_AT = 1000  # rows that show which columns name files
_ZERO_OR_ONE = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


class Split:
    """Rows of a table that belong together; for each column its type in Arrow and its class names."""

    def __init__(self, data: str, name: str, rows: "datasets.Dataset"):
        self.data, self.name, self.rows = data, name, rows  # `data`: as `--data` names the table
        self.title, path = f"{data} {name}", Path(data).expanduser()
        # Relative paths start here.
        self.folder = os.path.abspath(path if path.is_dir() else path.parent)
        self.features = rows.features  # asked for once: `datasets` makes all of them each time
        self.kinds = {field.name: field.type for field in self.features.arrow_schema}
        inner = {
            name: getattr(feature, "feature", feature) for name, feature in self.features.items()
        }
        self.class_names = {
            name: getattr(feature, "names", None) for name, feature in inner.items()
        }
        self.notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.rows.num_rows

    @cached_property
    def file_columns(self) -> set[str]:
        """The columns of text most of whose cells are names of image files."""
        texts = [name for name, kind in self.kinds.items() if is_text(kind)]
        if not texts or not len(self):
            return set()
        table = self.rows.select_columns(texts).with_format("arrow")[
            sample_evenly(len(self), _LOOKED_AT).tolist()
        ]
        shares = {
            name: pc.mean(pc.match_substring_regex(trim(table[name]), f"{IMAGE_NAME}$")).as_py()
            for name in texts
        }
        return {name for name, share in shares.items() if (share or 0) > 0.5}

    def cells(self, column: str) -> pa.Array:
        return self.rows.select_columns([column]).with_format("arrow")[:].column(0).combine_chunks()

    def images(self, column: str) -> "datasets.Dataset":
        """The column alone, as bytes or paths."""
        import datasets

        feature, alone = self.features[column], self.rows.select_columns([column])
        if hasattr(feature, "decode"):
            return alone.cast_column(column, replace(feature, decode=False))
        if not is_text(self.kinds[column]) and not pa.types.is_integer(self.kinds[column]):
            return alone
        cells = self.cells(column)
        paths = trim(cells.cast(pa.string()))
        if column not in self.file_columns:
            paths = self._complete(paths)
        return (
            alone
            if paths.equals(cells)
            else datasets.Dataset(datasets.table.InMemoryTable(pa.table({column: paths})))
        )

    def _complete(self, ids: pa.Array) -> pa.Array:
        """The paths of the files that `ids` name without a suffix, in the table's folder or one in
        it; else `ids`.

        One of them decides, and the others are found missing if it misleads. Raises `Refused` if it
        names several files.
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
        self.notes = (f"images: {start}*{suffix}",)
        return pc.binary_join_element_wise(start, ids, suffix, "")


def part_labels(splits: dict[str, Split]) -> dict[str, str]:
    """How messages call the splits: {name: label}."""
    return {
        name: f"split {name}" if len(splits) > 1 or get_split_kind(name) != "train" else "all rows"
        for name in splits
    }


def is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_bytes(kind: pa.DataType) -> bool:
    """True if cells are bytes, or bytes beside a path."""
    is_pair = pa.types.is_struct(kind) and {"bytes", "path"} <= set(kind.names)
    return is_pair or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def listed(names: Iterable[str]) -> str:
    """The first names for a message: a table may have thousands of columns."""
    names = [*names]
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED:,} more" * (len(names) > _NAMED)


# ---- columns


def find_image(split: Split, named: str) -> str:
    """The column `named`, or the only one that has images, or that could have images."""
    from datasets import Image

    sure = [name for name, feature in split.features.items() if isinstance(feature, Image)]
    as_bytes = [name for name, kind in split.kinds.items() if is_bytes(kind)]
    texts = [name for name, kind in split.kinds.items() if is_text(kind)]
    # Ids, as of Kaggle.
    numbers = [name for name, kind in split.kinds.items() if pa.types.is_integer(kind)]
    likely = sure or as_bytes or [name for name in texts if name in split.file_columns]
    return _only(split, "image", named, likely, [*sure, *as_bytes, *texts, *numbers], split.kinds)


def find_labels(split: Split, named: str, *used: str) -> tuple[str, ...]:
    """The label column, or several of 0 and 1, named with commas between them; none of those that
    are `used` otherwise.
    """
    names = tuple(name.strip() for name in named.split(","))
    if len(names) > 1 and named not in split.kinds:
        if unknown := [name for name in names if name not in split.kinds]:
            known = listed(split.kinds)
            raise Refused(
                f"--label_column {named}: --data {split.data} has no column {unknown[0]}; it has "
                f"{known}"
            )
        return names
    kinds = {name: kind for name, kind in split.kinds.items() if name not in used}
    inner = {name: kind.value_type if is_list(kind) else kind for name, kind in kinds.items()}
    sure = [name for name in kinds if split.class_names[name]]
    ids = [name for name, kind in inner.items() if pa.types.is_integer(kind) or is_text(kind)]
    others = [
        name
        for name, kind in inner.items()
        if pa.types.is_boolean(kind) or pa.types.is_floating(kind)
    ]
    likely = sure or [name for name in ids if name not in split.file_columns] or others
    return (_only(split, "label", named, likely, ids + others, kinds),)


def _only(
    split: Split, what: str, named: str, likely: list[str], possible: list[str], kinds: dict
) -> str:
    """The column `named`, if it is one of `possible`, or the only one of `likely`."""
    described = listed(f"{name} ({kind})" for name, kind in kinds.items())
    if named and named not in possible:
        problem = f"can't be the {what} column" if named in kinds else "is no column"
        raise Refused(
            f"--{what}_column {named}: {problem} of --data {split.data}, which has {described}"
        )
    if not named and len(likely) != 1:
        problem = (
            f"{listed(likely)} could each be the {what}" if likely else f"no {what} column found"
        )
        raise Refused(
            f"--data {split.data}: {problem}; name it with --{what}_column NAME (columns: "
            f"{described})"
        )
    return named or likely[0]


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

    def name(self, index: int) -> str:
        if self.sizes is not None and isinstance(content := self._cell(index), str):
            return make_printable(os.path.join(self.folder, content))
        return f"{self.title}[{self.rows[index]}]"

    def content(self, index: int) -> str | bytes:
        cell = self._cell(index)
        if cell is None:
            raise BrokenImage("the row has no image")
        return os.path.join(self.folder, cell) if isinstance(cell, str) else cell

    def _cell(self, index: int) -> str | bytes | None:
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
        if self.sizes is not None:  # otherwise a path is only where the bytes once came from
            return hash_source(
                self.classes, self.labels, self.sizes, paths and paths.take(self.rows)
            )
        return hash_source(
            self.classes,
            self.labels,
            pc.binary_length(contents).fill_null(-1).to_numpy()[self.rows],
        )

    def listing(self) -> tuple[pa.LargeBinaryArray | None, np.ndarray]:
        contents, paths = read_contents(self.column)
        if contents is None:
            paths = paths.cast(pa.large_binary()).combine_chunks().take(pa.array(self.rows))
            return paths, np.zeros(len(paths), np.int64) if self.sizes is None else self.sizes
        return None, pc.binary_length(contents).fill_null(-1).to_numpy()[self.rows].astype(np.int64)

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
    image = find_image(splits[0], image_column)
    columns = find_labels(splits[0], label_column, image, group_column)
    require_columns(splits, image, *columns)
    classes, labels = read_labels(splits, columns, min_classes)
    tables = []
    for split, of_split in zip(splits, labels, strict=True):
        cells = split.images(image)
        images = (
            cells,
            np.arange(len(split)),
            split.title,
            split.folder,
            _file_sizes(cells, split.folder),
        )
        groups = read_groups(split, group_column)
        tables.append(
            Table(*images, labels=of_split, classes=classes, groups=groups, notes=split.notes)
        )
    return tables


def check_group(split: Split, column: str) -> None:
    """Raise `Refused` for a `--group_column` that the split does not have, or that holds lists."""
    if column not in split.kinds or pa.types.is_nested(split.kinds[column]):
        problem = "holds several values in a row" if column in split.kinds else "is no column"
        raise Refused(
            f"--group_column {column}: {problem} of --data {split.data}, which has "
            f"{listed(split.kinds)}"
        )


def read_groups(split: Split, column: str) -> np.ndarray | None:
    """int64[N], equal for rows with the same value of a column; None if `column` is empty. Raises
    `Refused`.
    """
    if not column:
        return None
    check_group(split, column)
    cells = split.cells(column)
    if cells.null_count:
        row = pc.index(cells.is_null(), True).as_py()
        raise Refused(
            f"--data {split.title}: row {row} has nothing in --group_column {column}; fill it in"
        )
    return cells.dictionary_encode().indices.to_numpy().astype(np.int64)


def read_labels(
    splits: Sequence[Split], columns: tuple[str, ...], min_classes: int
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Classes, and labels of each split, from a column of ids, names or lists, or several of 0 and
    1. Raises `Refused`.
    """
    if len(columns) > 1:
        return columns, [_zeros_and_ones(split, columns) for split in splits]
    first, name = splits[0], columns[0]
    for other in splits[1:]:
        if other.class_names[name] != first.class_names[name]:
            both = f"splits {first.name} and {other.name} name other classes in {name}"
            raise Refused(f"--data {first.data}: {both}; make them the same")
    cells = [clean_labels(split.cells(name)) for split in splits]
    classes, values = vocabulary(cells[0], first.class_names[name])
    if len(classes) < (least := 1 if is_list(first.kinds[name]) else min_classes):
        found = f"only the class {classes[0]}" if classes else "no class"
        raise Refused(f"--data {first.title}: {found} in column {name}; needs {least} or more")
    return classes, [
        _labels(split, name, of, classes, values) for split, of in zip(splits, cells, strict=True)
    ]


def require_columns(splits: Sequence[Split], *names: str) -> None:
    """Raise `Refused` if a split lacks columns that the first one has."""
    for split in splits[1:]:
        if missing := {*names} - split.kinds.keys():
            has = f"which {splits[0].name} has"
            raise Refused(
                f"--data {split.data}: split {split.name} has no column {min(missing)}, {has}"
            )


def read_contents(column: "datasets.Dataset") -> tuple[Any, Any]:
    """Bytes and paths of a column of images, as chunked arrays; None if it has no bytes, or no paths."""
    cells = column.with_format("arrow")[:].column(0)
    if pa.types.is_struct(cells.type):
        contents = pc.struct_field(cells, "bytes")
        return None if contents.null_count == len(contents) else contents, pc.struct_field(
            cells, "path"
        )
    return (None, cells) if is_text(cells.type) else (cells, None)


def _file_sizes(column: "datasets.Dataset", folder: str) -> np.ndarray | None:
    """int64[N]: bytes of each file, -1 for a missing one; None if the column has bytes."""
    contents, paths = read_contents(column)
    if contents is not None:
        return None
    names = (name for chunk in paths.chunks for name in chunk.to_pylist())
    return np.array(
        get_file_sizes(os.path.join(folder, name) if name else "" for name in names), np.int64
    )


# ---- labels


def _zeros_and_ones(split: Split, names: Sequence[str]) -> np.ndarray:
    """bool[N, C] from columns of 0 and 1 of any type."""
    matrix = np.zeros((len(split), len(names)), bool)
    table = split.rows.select_columns([*names]).with_format("arrow")[:]
    for place, name in enumerate(names):
        cells = table[name].combine_chunks()
        words = trim(pc.utf8_lower(cells.cast(pa.string())))
        found = pc.index_in(words, value_set=pa.array([*_ZERO_OR_ONE])).fill_null(-1).to_numpy()
        if (found < 0).any():
            row = int((found < 0).argmax())
            problem = f"row {row} has {cells[row].as_py()!r} in column {name}"
            raise Refused(
                f"--data {split.title}: {problem}; each of several label columns must hold 0 or 1"
            )
        matrix[:, place] = np.array([*_ZERO_OR_ONE.values()])[found]
    return matrix


def clean_labels(cells: pa.Array) -> pa.Array:
    """Labels, or lists of them, as of a CSV file: texts are trimmed, and null if empty; True is a
    text, and 1.0 is 1.
    """
    if is_list(cells.type):
        lengths = pc.list_value_length(cells).fill_null(0).to_numpy()
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return pa.ListArray.from_arrays(
            offsets, clean_labels(pc.list_flatten(cells)), mask=cells.is_null()
        )
    if pa.types.is_boolean(cells.type):
        return pc.if_else(cells, "True", "False")
    if pa.types.is_floating(cells.type):
        return as_numbers(pc.if_else(pc.is_nan(cells), None, cells).cast(pa.string()))
    return trim(cells) if is_text(cells.type) else cells


def vocabulary(cells: pa.Array, names: list[str] | None) -> tuple[tuple[str, ...], pa.Array]:
    """Class names and their values in a column: `names`, or else the values found, sorted."""
    if names:
        return tuple(names), pa.array(range(len(names)), pa.int64())
    values = pc.unique(pc.list_flatten(cells) if is_list(cells.type) else cells).drop_null()
    values = values.take(pc.sort_indices(values))
    if pa.types.is_integer(values.type) and values.to_pylist() != [-1, 1]:  # which are two classes
        zero = pa.scalar(0, values.type)  # another negative number means that the label is missing
        values = values.filter(pc.greater_equal(values, zero))
    return tuple(str(value) for value in values.to_pylist()), values


def _labels(
    split: Split, column: str, cells: pa.Array, classes: tuple[str, ...], values: pa.Array
) -> np.ndarray:
    """int64[N] class ids, or bool[N, C] of a column of lists, of labels that are all in `values`."""
    several = is_list(cells.type)
    start = f"--data {split.title}: row"
    if cells.null_count:
        row = pc.index(cells.is_null(), True).as_py()
        raise Refused(
            f"{start} {row} has no label in column {column} (null); remove the row or label it"
        )
    flat = pc.list_flatten(cells) if several else cells
    rows = pc.list_parent_indices(cells).to_numpy() if several else np.arange(len(flat))
    ids = (
        pc.index_in(flat.cast(values.type), value_set=values)
        .fill_null(-1)
        .to_numpy()
        .astype(np.int64)
    )
    if (ids < 0).any():
        wrong = int(np.argmin(ids))
        known = f"0 to {len(classes) - 1}" if split.class_names[column] else ", ".join(classes[:10])
        raise Refused(
            f"{start} {rows[wrong]} has label {flat[wrong].as_py()!r} in column {column}, "
            f"but the {len(classes)} classes are {known}; remove the row or correct it"
        )
    if not several:
        return ids
    matrix = np.zeros((len(cells), len(classes)), bool)
    matrix[rows, ids] = True
    twice = np.flatnonzero(np.bincount(rows, minlength=len(cells)) > matrix.sum(axis=1))
    advice = (
        f"in column {column}; a row lists the ids or names of the classes it shows, not a 0 or 1 "
        "for each"
    )
    if twice.size:
        raise Refused(f"{start} {twice[0]} has a class twice {advice}")
    # Such as [0, 1]
    if (
        classes in (("0", "1"), ("False", "True"))
        and not split.class_names[column]
        and matrix.all()
    ):
        raise Refused(f"{start} 0, as each one, has both classes {advice}")
    return matrix
