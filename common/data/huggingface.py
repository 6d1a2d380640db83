"""Hugging Face data sets and CSV files: opens their splits, and finds the image and label columns."""

import glob
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.config.parsing import nearest_path
from common.data.csv_files import read_csv
from common.data.images import SUFFIXES, BrokenImage
from common.data.source import Source, fingerprint_of
from common.data.splits import kind_of, start_of
from common.errors import Refused, printable
from common.files import check_regular, sizes_of
from common.randomness import mix

if TYPE_CHECKING:
    import datasets  # imported late below: it takes a second, and most runs don't need it

_SEPARATORS = ",;| "  # of tags in a text
_NAMED = 20  # columns in a message
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[\w.-]+))?")
_SMALL, _ROOM, _MOST_TIMES = 2**26, 2**30, 100  # see `_refuse_bomb`: bytes of a file, of its rows, and rows per file
_HUB_TIMEOUT = 5.0  # seconds until the Hub counts as unreachable; `datasets` alone would retry for 23 s and more


@dataclass(frozen=True, eq=False)
class Table(Source):
    """Rows of a split, memory-mapped. Images are decoded here, not in `datasets`, so that a broken one is reported as any."""

    column: "datasets.Dataset"  # only the image column: bytes, a path, or both
    rows: np.ndarray  # int64[N]
    labels: np.ndarray
    classes: tuple[str, ...]
    title: str
    folder: str  # relative paths start here
    sizes: np.ndarray | None = None  # int64[N] bytes of files, -1 for a missing one; None if the table has all images
    origin: str = ""
    notes: tuple[str, ...] = ()

    def name(self, index: int) -> str:
        if self.sizes is not None and isinstance(content := self._cell(index), str):
            return printable(os.path.join(self.folder, content))
        return f"{self.title}[{self.rows[index]}]"

    def content(self, index: int) -> str | bytes:
        cell = self._cell(index)
        if cell is None:
            raise BrokenImage("the row has no image")
        return os.path.join(self.folder, cell) if isinstance(cell, str) else cell

    def _cell(self, index: int) -> str | bytes | None:
        """The path or bytes of the image."""
        (cell,) = self.column[int(self.rows[index])].values()
        if isinstance(cell, dict):
            cell = cell["bytes"] if cell["bytes"] is not None else cell["path"]
        return cell

    @property
    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.sizes == -1) if self.sizes is not None else np.zeros(0, np.int64)

    def near(self, index: int) -> str:
        if not isinstance(cell := self._cell(index), str):
            return ""
        folder, cell = glob.escape(self.folder), glob.escape(cell)
        patterns = (f"{folder}/*/{cell}", f"{folder}/{cell}.*", f"{folder}/*/{cell}.*")
        found = None
        with suppress(OSError, ValueError):  # a cell may hold anything
            found = next((file for pattern in patterns for file in glob.iglob(pattern)), None)
        return " (paths start from the folder of the table" + (f"; {printable(found)} is there)" if found else ")")

    @cached_property
    def fingerprint(self) -> str:
        contents, paths = _contents(self.column)
        if self.sizes is not None:  # otherwise a path is only where the bytes once came from
            return fingerprint_of(self.classes, self.labels, self.sizes, paths and paths.take(self.rows))
        return fingerprint_of(self.classes, self.labels, pc.binary_length(contents).to_numpy()[self.rows])

    def draws(self, key: int) -> np.ndarray:
        """uint64[N] random numbers, each a function of its row and `key` alone."""
        return mix(self.rows, key)

    def part(self, rows: np.ndarray) -> "Table":
        sizes = None if self.sizes is None else self.sizes[rows]
        return replace(self, rows=self.rows[rows], labels=self.labels[rows], sizes=sizes)


def _opener(data: str) -> Callable[[], dict[str, Any]] | None:
    """What opens `data` as {split: datasets.Dataset}; None if it is neither a Hugging Face data set nor CSV."""
    path = Path(data).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return lambda: _open_saved(path)
        has_parquet = any(file for place in ("", "data/", "train/") for file in path.glob(f"{place}*.parquet"))
        return (lambda: _open_parquet(path, sorted(path.rglob("*.parquet")))) if has_parquet else None
    opener = {".parquet": _open_parquet, ".csv": _open_csv, ".tsv": _open_csv}.get(path.suffix.lower())
    if opener:
        files = sorted(Path(file) for file in glob.glob(str(path)))
        return (lambda: opener(path.parent, files)) if files else None
    hub = None if path.exists() else _HUB_NAME.fullmatch(data)
    return (lambda: _open_hub(hub["name"], hub["config"])) if hub else None


class TableParts:
    """The splits of a data set. The first one that is read decides on columns and classes. Raises `Refused`."""

    def __init__(
        self, data: str, tables: dict[str, Any], image_column: str, label_column: str, least_classes: int = 2
    ) -> None:
        self._data, self._named, self._least = data, (image_column, label_column), least_classes
        self._splits = tables
        self._first: tuple | None = None
        self.labels = split_labels(tables)

    def read(self, name: str, first: Table | None = None) -> Table:
        """The split of this name, with the columns and classes of `first` if one was read before."""
        split, title = self._splits[name], f"{self._data} {name}"
        if first is None:
            image = find_column(self._data, split, "image", self._named[0], exclude="")
            label = _find_labels(self._data, split, self._named[1], exclude=image)
            self._first = name, image, label, *(_vocabulary(split, label[0]) if len(label) == 1 else (label, None))
        first_name, image, label, classes, values = self._first
        if missing := {image, *label} - set(split.column_names):
            raise Refused(f"--data {self._data}: split {name} has no column {min(missing)}, which {first_name} has")
        column = split.select_columns([image])
        if hasattr(split.features[image], "decode"):
            column = column.cast_column(image, replace(split.features[image], decode=False))
        rows, folder = np.arange(split.num_rows), folder_of(self._data)
        sizes = _file_sizes(column, folder)
        if len(label) > 1:
            labels = _zeros_and_ones(title, split, label)
            counts = labels.sum(axis=1)
            if first is None:
                self._is_one_hot = bool((counts == 1).all())
            elif self._is_one_hot and (counts != 1).any():
                row = int((counts != 1).argmax())
                raise Refused(
                    f"--data {title}: row {row} shows {counts[row]} classes, where each of {first_name} shows one"
                )
            notes = (f"a class for each of {len(label)} columns of 0 and 1" + ", of which one is 1" * self._is_one_hot,)
            labels = labels.argmax(axis=1) if self._is_one_hot else labels
            return Table(column, rows, labels, classes, title, folder, sizes, notes=notes)
        if _names_of(split.features[label[0]]) != _names_of(self._splits[first_name].features[label[0]]):
            raise Refused(
                f"--data {self._data}: splits {first_name} and {name} name other classes in {label[0]}; make them the same"
            )
        labels = _labels(title, split, label[0], classes, values, self._least)
        notes = () if is_list(columns_of(split)[label[0]].kind) else _as_one(label[0], classes)
        return Table(column, rows, labels, classes, title, folder, sizes, notes=notes)


def open_splits(data: str) -> dict[str, Any] | None:
    """The splits by name of a Hugging Face data set or of CSV files; None of anything else. Raises `Refused`."""
    if not (opener := _opener(data)):
        return None
    try:
        with _quiet():
            return _by_column(data, opener())
    except (Refused, PermissionError):
        raise
    except Exception as error:  # `datasets` and the formats below it raise almost anything
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise Refused(f"--data {data}: can't be read as a Hugging Face data set: {reason}") from error


def split_labels(splits: dict[str, Any]) -> dict[str, str]:
    """How messages call the splits: {name: label}."""
    return {name: f"split {name}" if len(splits) > 1 or kind_of(name) != "train" else "all rows" for name in splits}


def folder_of(data: str) -> str:
    """The folder that relative paths in a table start from."""
    path = Path(data).expanduser()
    return os.path.abspath(path if path.is_dir() else path.parent)


def _by_column(data: str, splits: dict[str, Any]) -> dict[str, Any]:
    """The only split cut by its column `split`, if that holds names of parts; otherwise the splits as they are."""
    (first, *others) = splits.values()
    name = next((name for name in first.column_names if name.casefold() == "split"), None)
    if others or name is None or not _is_text(columns_of(first)[name].kind):
        return splits
    values = cells_of(first, name)
    found = pc.unique(values).to_pylist()
    if not any(kind_of(value) for value in found if value):
        return splits
    if values.null_count:
        row = pc.index(values.is_null(), True).as_py()
        raise Refused(
            f"--data {data}: row {row} has nothing in the column {name}, by which rows are parted; fill it in"
        )
    rows = {value: np.flatnonzero(pc.equal(values, value).to_numpy(zero_copy_only=False)) for value in found}
    return {value: first.select(of_value).remove_columns(name) for value, of_value in rows.items()}


# ---- opening


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `datasets` from logging errors that it also raises, and from showing progress bars outside a terminal."""
    import datasets

    logger = logging.getLogger("datasets")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(before)


def _open_saved(path: Path) -> dict[str, Any]:
    import datasets

    check_regular(path)
    saved = datasets.load_from_disk(str(path))
    return saved if isinstance(saved, dict) else {"train": saved}


def _open_parquet(folder: Path, files: list[Path]) -> dict[str, Any]:
    import datasets

    places = {name: [str(file.absolute()) for file in its] for name, its in _splits_of(folder, files).items()}
    for file in files:
        _refuse_bomb(file)
    return datasets.load_dataset("parquet", data_files=places)


def _refuse_bomb(file: Path) -> None:
    """Raise `Refused` for a file whose rows take far more room than images could: they are compressed already.

    Columns that hold numbers of rows are counted as 8 bytes each. Values that are stored once and repeated are looked up only
    in files up to `_SMALL`, since that reads the file.
    """
    import pyarrow.parquet as pq

    size, content = file.stat().st_size, pq.ParquetFile(file)
    limit = max(_ROOM, _MOST_TIMES * size)
    groups = [content.metadata.row_group(number) for number in range(content.num_row_groups)]
    needed = max(sum(group.total_byte_size for group in groups), 8 * content.metadata.num_rows)
    if needed <= limit and size <= _SMALL:
        schema = content.metadata.schema
        texts = [
            column.path for column in map(schema.column, range(len(schema))) if column.physical_type == "BYTE_ARRAY"
        ]
        for batch in pq.ParquetFile(file, read_dictionary=texts).iter_batches(columns=texts):
            needed += sum(_unpacked_bytes(column) for column in batch.columns)
            if needed > limit:
                break
    if needed > limit:
        raise Refused(
            f"{file}: its rows take {needed / 2**30:,.1f} GiB or more, and the file {size / 2**20:,.1f} MiB: images don't "
            "shrink so much; write one image into each row"
        )


def _unpacked_bytes(column: pa.Array) -> int:
    """Bytes that the values of a column take once each repeated one is written out."""
    if pa.types.is_struct(column.type):
        return sum(map(_unpacked_bytes, column.flatten()))
    if is_list(column.type):
        return _unpacked_bytes(column.flatten())
    if not pa.types.is_dictionary(column.type):
        return column.nbytes
    return pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0


def _open_csv(folder: Path, files: list[Path]) -> dict[str, Any]:
    import datasets

    splits = {}
    table = read_csv(files, " file")  # together, so that a column has one type
    for name, its in _splits_of(folder, files).items():
        rows = table.filter(pc.is_in(table[" file"], pa.array([files.index(file) for file in its])))
        splits[name] = datasets.Dataset(datasets.table.InMemoryTable(rows.drop_columns(" file")))
    return splits


def _splits_of(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """The files of each split: the one that a file's name or folder begins with, as in `val-0000` and `test/0000`."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        check_regular(file)
        parts = (file.stem, *file.relative_to(folder).parts[:-1]) if len(files) > 1 else ()
        splits.setdefault(next(filter(None, map(start_of, parts)), "train"), []).append(file)
    return splits


def _open_hub(name: str, config: str | None) -> dict[str, Any]:
    """The splits of a data set on the Hub. If the Hub does not answer one short request, the local cache is used."""
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    why = "offline mode is on" if constants.is_offline_mode() else ""
    try:
        if not why:
            HfApi().dataset_info(name, timeout=_HUB_TIMEOUT)
    except RepositoryNotFoundError as error:
        raise Refused(
            f"--data {name}: nothing of this name is here or on the Hugging Face Hub; "
            "check the spelling, or run `hf auth login` if it is private"
        ) from error
    except Exception as error:  # the client's HTTP library raises errors of its own
        why = " ".join(str(error).split()) or type(error).__name__
    if not why:
        return datasets.load_dataset(name, config)
    try:
        with _offline(datasets.config, constants):
            return datasets.load_dataset(name, config)
    except (ConnectionError, FileNotFoundError) as error:
        raise Refused(
            f"--data {name}: nothing of this name is here or in the cache of the Hugging Face Hub, "
            f"which can't be reached ({why}); give an existing folder, or download the data set first{nearest_path(Path(name))}"
        ) from error


@contextmanager
def _offline(*modules: Any) -> Iterator[None]:
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


# ---- columns


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    """Whether cells are bytes, or bytes beside a path, as images are in a file without Hugging Face's metadata."""
    is_pair = pa.types.is_struct(kind) and {"bytes", "path"} <= set(kind.names)
    return is_pair or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _contents(column: "datasets.Dataset") -> tuple[pa.ChunkedArray | None, pa.ChunkedArray | None]:
    """Bytes and paths of a column of images; None for what it does not have."""
    cells = column.with_format("arrow")[:].column(0)
    if pa.types.is_struct(cells.type):
        return pc.struct_field(cells, "bytes"), pc.struct_field(cells, "path")
    return (None, cells) if _is_text(cells.type) else (cells, None)


def _file_sizes(column: "datasets.Dataset", folder: str) -> np.ndarray | None:
    """int64[N]: size of each image in bytes, -1 if it has neither bytes nor a file; None if all have bytes."""
    contents, paths = _contents(column)
    if contents is not None and not contents.null_count:
        return None
    sizes = np.full(len(column), -1)
    if contents is not None:
        sizes = pc.binary_length(contents).fill_null(-1).to_numpy().astype(np.int64)
    if paths is not None:
        without = np.flatnonzero(sizes < 0)
        names = (name for chunk in paths.take(pa.array(without)).chunks for name in chunk.to_pylist())
        sizes[without] = sizes_of(os.path.join(folder, name) if name else "" for name in names)
    return sizes


def is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _names_of(feature: Any) -> list[str] | None:
    """The class names of a ClassLabel, or of a list of them; None of any other feature."""
    return getattr(getattr(feature, "feature", feature), "names", None)


def find_column(data: str, split: "datasets.Dataset", what: str, named: str, exclude: str) -> str:
    """The column `named`, or the only one whose type says that it is the image or the label, or that could be it."""
    from datasets import Image as ImageFeature

    columns = {name: column for name, column in columns_of(split).items() if name != exclude}
    kinds, features = ({name: column[place] for name, column in columns.items()} for place in (0, 1))
    names_images = _image_names(split)
    if what == "image":
        sure = [name for name in kinds if isinstance(features[name], ImageFeature)]
        texts = [name for name, kind in kinds.items() if _is_text(kind)]
        likely = [name for name, kind in kinds.items() if _is_bytes(kind)]
        possible = sure + likely + texts
        likely = likely or [name for name in texts if name in names_images]
    else:
        inner = {name: kind.value_type if is_list(kind) else kind for name, kind in kinds.items()}
        sure = [name for name in kinds if _names_of(features[name])]
        possible = [name for name, kind in inner.items() if pa.types.is_integer(kind) or _is_text(kind)]
        likely = [name for name in possible if name not in names_images]
    described = listed(f"{name} ({kind})" for name, kind in kinds.items())
    if named:
        if named not in possible:
            problem = f"can't be the {what} column" if named in kinds else "is no column"
            raise Refused(f"--{what}_column {named}: {problem} of --data {data}, which has {described}")
        return named
    found = sure or likely
    if len(found) != 1:
        problem = f"{listed(found)} could each be the {what}" if found else f"no {what} column found"
        raise Refused(f"--data {data}: {problem}; name it with --{what}_column NAME (columns: {described})")
    return found[0]


def _image_names(split: "datasets.Dataset") -> set[str]:
    """The columns of text whose first cell is the name of an image file."""
    (first,) = split.with_format("arrow")[:1].to_pylist() or ({},)
    texts = {name: cell for name, cell in first.items() if isinstance(cell, str)}
    return {name for name, cell in texts.items() if os.path.splitext(cell)[1].lower() in SUFFIXES}


def _find_labels(data: str, split: "datasets.Dataset", named: str, exclude: str) -> tuple[str, ...]:
    """The label column, or several with 0 or 1 for one class each: as named, joined by commas, or all that could be labels."""
    names = tuple(name.strip() for name in named.split(","))
    if named not in split.column_names and len(names) > 1:
        if unknown := [name for name in names if name not in split.column_names]:
            raise Refused(
                f"--label_column {named}: --data {data} has no column {unknown[0]}; it has {listed(split.column_names)}"
            )
        return names
    columns = {name: column for name, column in columns_of(split).items() if name != exclude}
    numbers = tuple(
        name for name, (kind, _) in columns.items() if pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    )
    others = any(_is_text(kind) or is_list(kind) or _names_of(feature) for kind, feature in columns.values())
    if not named and len(numbers) > 1 and not others and len(split):
        with suppress(Refused):
            _zeros_and_ones("", split, numbers)
            return numbers
    return (find_column(data, split, "label", named, exclude),)


# ---- labels


class Column(NamedTuple):
    kind: pa.DataType
    feature: Any


def columns_of(split: "datasets.Dataset") -> dict[str, Column]:
    """The columns of a split. To be asked for once: `datasets` makes all features and their types anew each time."""
    features = split.features
    return {field.name: Column(field.type, features[field.name]) for field in features.arrow_schema}


def listed(names: Iterable[str]) -> str:
    """The first names for a message: a table may have thousands of columns."""
    names = [*names]
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED:,} more" * (len(names) > _NAMED)


def cells_of(split: "datasets.Dataset", column: str) -> pa.Array:
    return split.select_columns([column]).with_format("arrow")[:].column(0).combine_chunks()


def _vocabulary(split: "datasets.Dataset", column: str) -> tuple[tuple[str, ...], pa.Array]:
    """Class names and their values in the column: as ClassLabel says, otherwise the values found, sorted."""
    feature = split.features[column]
    if names := _names_of(feature):
        classes, values = tuple(names), pa.array(range(len(names)), pa.int64())
    else:
        cells = cells_of(split, column)
        values = pc.unique(pc.list_flatten(cells) if is_list(cells.type) else cells).drop_null()
        if pa.types.is_integer(values.type):
            values = values.filter(
                pc.greater_equal(values, 0)
            )  # a negative number always means that the label is missing
        values = values.take(pc.sort_indices(values))
        classes = tuple(str(value) for value in values.to_pylist())
    return classes, values


def _as_one(column: str, classes: tuple[str, ...]) -> tuple[str, ...]:
    """A note if names of classes seem to be several tags each: they are made of fewer words than there are classes."""
    for separator in _SEPARATORS:
        joined = [name for name in classes if separator in name.strip()]
        if joined and len({word for name in classes for word in name.split(separator)}) < len(classes):
            return (
                f"{column}: each text is one class, also {joined[0]!r}; if these are several tags, give a column of 0 and 1 "
                "for each tag, or a list",
            )
    return ()


_OF_ZERO_OR_ONE = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


def _zeros_and_ones(title: str, split: "datasets.Dataset", names: tuple[str, ...]) -> np.ndarray:
    """bool[N, C] from columns of 0 and 1 of any type."""
    matrix = np.zeros((split.num_rows, len(names)), bool)
    table = split.select_columns([*names]).with_format("arrow")[:]
    for place, column in enumerate(names):
        cells = table[column].combine_chunks()
        words = pc.utf8_lower(cells.cast(pa.string()))
        found = pc.index_in(words, value_set=pa.array([*_OF_ZERO_OR_ONE])).fill_null(-1).to_numpy()
        if (found < 0).any():
            row = int((found < 0).argmax())
            raise Refused(
                f"--data {title}: row {row} has {cells[row].as_py()!r} in column {column}; "
                "each of several label columns must hold 0 or 1"
            )
        matrix[:, place] = np.array([*_OF_ZERO_OR_ONE.values()])[found]
    return matrix


def _labels(
    title: str, split: "datasets.Dataset", column: str, classes: tuple[str, ...], values: pa.Array, least: int
) -> np.ndarray:
    """int64[N] class ids, or bool[N, C] of a column of lists. Every label must be one of `values`."""
    cells = cells_of(split, column)
    several = is_list(cells.type)
    if len(classes) < (least := 1 if several else least):
        found = f"only the class {classes[0]}" if classes else "no class"
        raise Refused(f"--data {title}: {found} in column {column}; needs {least} or more")
    if cells.null_count:
        row = pc.index(cells.is_null(), True).as_py()
        raise Refused(f"--data {title}: row {row} has no label in column {column} (null); remove the row or label it")
    flat = pc.list_flatten(cells) if several else cells
    rows = pc.list_parent_indices(cells).to_numpy() if several else np.arange(len(flat))
    ids = pc.index_in(flat.cast(values.type), value_set=values).fill_null(-1).to_numpy().astype(np.int64)
    if (ids < 0).any():
        first = int(np.argmin(ids))
        range_text = f"0 to {len(classes) - 1}" if _names_of(split.features[column]) else ", ".join(classes[:10])
        raise Refused(
            f"--data {title}: row {rows[first]} has label {flat[first].as_py()!r} in column {column}, "
            f"but the {len(classes)} classes are {range_text}; remove the row or correct it"
        )
    if not several:
        return ids
    matrix = np.zeros((len(cells), len(classes)), bool)
    matrix[rows, ids] = True
    twice = np.flatnonzero(np.bincount(rows, minlength=len(cells)) > matrix.sum(axis=1))
    if twice.size:
        raise Refused(
            f"--data {title}: row {twice[0]} has a class twice in column {column}; "
            "a row lists the classes it shows, not a 0 or 1 for each"
        )
    return matrix
