"""Which images and labels does `--data` mean, and which of them are held out for evaluation?

A source holds columns (NumPy, Arrow, memory-mapped files), never a Python object a row: reading those would copy their
memory pages into every loader worker, bit by bit, until the machine is full.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.classification import custom_data
from common.classification.custom_data import CustomDataset
from common.config.parsing import nearest_path
from common.data import partition
from common.data.digits import load_digits
from common.data.huggingface import Table, TableParts, table_opener
from common.data.images import SUFFIXES
from common.data.partition import Piece, draws_of_paths, held_out
from common.data.source import Source, fingerprint_of, refuse_broken
from common.errors import Refused, printable
from common.files import walk
from common.randomness import key_of, mix

_SHARDS = re.compile(r"\.(tar|tgz)(\.\w+)?$|::|://|^(\w+-)?streaming:|^(pipe|wds|webdataset):", re.IGNORECASE)
_NOT_YET = (
    "tar/WebDataset shards, URLs and streaming are not supported yet; "
    "extract to an image folder with one subfolder per class, or convert to parquet"
)


def load(
    data: str | CustomDataset | Mapping[str, CustomDataset],
    *,
    seed: int,
    val_share: float,
    split: str = "",
    image_column: str = "",
    label_column: str = "",
    max_broken_share: float = 1.0,
) -> tuple[Source, Source]:
    """The images to train on and those to evaluate on, (train, val), with the same classes. `data` is one of

    - `digits`: 1,797 handwritten digits that come with scikit-learn (a folder of that name is `./digits`);
    - a folder with `train/` and `val/`, as `partition.kind_of` knows them, each with one subfolder per class;
    - an image folder with one subfolder per class;
    - a Hugging Face data set: a folder written by `save_to_disk`, a parquet file, a folder of them or a pattern, or
      the Hub's `owner/name` or `owner/name:config`;
    - a CSV file of paths and labels, or a pattern of them;
    - an object of your own as `CustomDataset` says, or a dict of them by part: {"train": ..., "val": ...}.

    Columns are found by their type, or named; a label column may be several joined by commas, with 0 or 1 for a class each.

    `split` names the part to evaluate on, as in `partition.choose`. Where the data has no part to validate on, `val_share` of
    each class is held out, chosen by `seed` and the image's path or row alone: adding a file moves at most one other of its
    class to the other side. The fifth held out of `digits` is fixed, so that its results compare across seeds and settings.

    Raises `Refused` for what can't be found, read, or trained on, and where more than `max_broken_share` of the files of a
    part are missing.
    """
    choice = partial(partition.choose, _title(data), split=split)
    train, val = _read(data, choice, 2, seed, val_share, image_column, label_column, max_broken_share)
    return train, val


def load_part(
    data: str | CustomDataset | Mapping[str, CustomDataset],
    *,
    split: str,
    seed: int,
    val_share: float,
    held_out: bool = False,
    image_column: str = "",
    label_column: str = "",
    max_broken_share: float = 1.0,
) -> Source:
    """The images of one part, chosen as in `partition.choose_part`, for an evaluation, with the classes that are found there.

    `data` and the others are as in `load`: with its `seed` and `val_share`, `held_out` says that a model was trained on this
    data by `load`, without the held-out share; other data without parts are evaluated whole.
    """
    choice = partial(partition.choose_part, _title(data), split=split, held_out=held_out)
    (part,) = _read(data, choice, 1, seed, val_share, image_column, label_column, max_broken_share)
    return part


def _title(data: str | CustomDataset | Mapping[str, CustomDataset]) -> str:
    """The data in words."""
    if isinstance(data, Mapping):
        return ", ".join(dict.fromkeys(type(part).__name__ for part in data.values()))
    return data if isinstance(data, str) else type(data).__name__


def _read(
    data: str | CustomDataset | Mapping[str, CustomDataset],
    choice: Callable[[Mapping[str, str]], tuple[Piece, ...]],
    least: int,
    seed: int,
    val_share: float,
    image_column: str,
    label_column: str,
    max_broken_share: float,
) -> tuple[Source, ...]:
    """A source for each piece that `choice` takes of the parts that there are; the first has `least` classes or more."""
    custom = None if isinstance(data, str) else custom_data.parts_of(data)
    data = _title(data)
    path = Path(data).expanduser()
    if _SHARDS.search(data):
        raise Refused(f"--data {data}: {_NOT_YET}")
    try:
        if data != "digits" and not custom and (opener := table_opener(data)):
            table = TableParts(data, opener, image_column, label_column, least)
            labels, read, hold_out = table.labels, table.read, partial(_split_rows, seed=seed, share=val_share)
        elif image_column or label_column:
            raise Refused(f"--data {data}: is no table, so leave out --image_column and --label_column")
        elif custom:
            labels = dict.fromkeys(custom, data) if len(custom) == 1 else {name: name for name in custom}
            read = lambda name, first: custom_data.read(custom[name], first, least)  # noqa: E731
            hold_out = partial(custom_data.CustomSource.split, seed=seed, share=val_share)
        elif data == "digits":
            digits = dict(zip(("train", "val"), load_digits(), strict=True))
            labels = {name: part.origin for name, part in digits.items()}
            read, hold_out = lambda name, _: digits[name], None  # noqa: E731
        elif path.is_dir():
            root = Path(os.path.abspath(path))
            folders = _part_folders(root)
            labels = {name: "the folder" if folder == root else f"{name}/" for name, folder in folders.items()}
            read = lambda name, first: _read_folder(folders[name], first, least)  # noqa: E731
            hold_out = partial(_split_files, seed=seed, share=val_share)
        else:
            found = "a file of a kind that is not known" if path.exists() else "nothing is there"
            raise Refused(
                f"--data {data}: {found}; expected digits, an image folder with one subfolder per class, a save_to_disk "
                f"folder, parquet, CSV, or a Hugging Face name such as owner/name{nearest_path(path)}"
            )

        def checked(name: str, first: Source | None) -> Source:
            source = read(name, first)
            refuse_broken(data, source, max_broken_share)
            return source

        return partition.read_pieces(choice(labels), checked, hold_out, labels, val_share)
    except PermissionError as error:
        raise Refused(f"--data {data}: no permission to read {error.filename}; allow it, or copy the data") from error
    except OSError as error:
        raise Refused(f"--data {data}: {error.filename or path} can't be read: {error.strerror or error}") from error


def _split_rows(table: Table, seed: int, share: float) -> tuple[Table, Table]:
    draws = mix(np.arange(len(table)), key_of(seed, "held out"))
    strata = np.zeros(len(table), np.int64) if table.multi_label else table.labels
    train, val = held_out(draws, strata, share)
    return table.part(train), table.part(val)


# ---- folders


@dataclass(frozen=True, eq=False)
class Folder(Source):
    """Image files in one subfolder per class, at any depth below it; class ids are the sorted names of the folders."""

    root: Path
    paths: pa.LargeBinaryArray  # below root; bytes, since a file's name need not be valid text
    sizes: np.ndarray  # int64[N] bytes, -1 of a link that leads nowhere
    labels: np.ndarray
    classes: tuple[str, ...]
    origin: str = ""
    notes: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.classes, self.labels, self.sizes, self.paths)

    def name(self, index: int) -> str:
        return printable(f"{self.root}/{self.paths[int(index)].as_py().decode(errors='backslashreplace')}")

    def content(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.paths[int(index)].as_py()))

    @property
    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.sizes < 0)

    def part(self, rows: np.ndarray) -> "Folder":
        paths = self.paths.take(pa.array(rows))
        return replace(self, paths=paths, sizes=self.sizes[rows], labels=self.labels[rows])


def _part_folders(root: Path) -> dict[str, Path]:
    """The folders that are parts of the data, each with class folders in it; where these are in `root`, that is all of it."""
    folders = _subfolders(root)
    kinds = {name: partition.kind_of(name) for name in folders if partition.kind_of(name)}
    if len({*kinds.values()}) > 1 or kinds and len(kinds) == len(folders):
        return {name: root / name for name in folders}
    for name in kinds:  # also the name of a class: a train is a vehicle
        inside = {*_subfolders(root / name)}
        for other in (other for other in folders if other != name):
            if len(shared := sorted(inside & {*_subfolders(root / other)})) > 1:
                raise Refused(
                    f"{root}: {name}/ and {other}/ both have the folders {shared[0]}/ and {shared[1]}/, so they seem to be "
                    "parts and not classes; name them train, val and test"
                )
    return {"train": root}


def _read_folder(folder: Path, first: Folder | None, least: int) -> Folder:
    if first is None:
        return _scan(folder, _class_folders(folder, least))
    if unknown := sorted(set(_subfolders(folder)) - set(first.classes)):
        raise Refused(f"{folder / unknown[0]}: a class that {first.root} does not have; add it there")
    part = _scan(folder, list(first.classes), may_be_empty=True)
    if len(part) == 0:
        raise Refused(f"{folder}: no images to evaluate on; add some, or use --data {first.root}")
    return part


def _split_files(everything: Folder, seed: int, share: float) -> tuple[Folder, Folder]:
    train, val = held_out(draws_of_paths(everything.paths, seed), everything.labels, share)
    return everything.part(train), everything.part(val)


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _class_folders(folder: Path, least: int) -> list[str]:
    names = _subfolders(folder)
    if not names and any(folder.glob("*.tar")):
        raise Refused(f"{folder}: {_NOT_YET}")
    if len(names) < least:
        found = f"only the class folder {names[0]}/" if names else "no class folders"
        raise Refused(f"{folder}: {found}; images belong in one subfolder per class, of two classes or more")
    return names


def _scan(root: Path, classes: list[str], may_be_empty: bool = False) -> Folder:
    paths, sizes = [], []
    for name in classes:
        files = sorted(_image_files(root, name)) if (root / name).is_dir() else []
        if not files and not may_be_empty:
            raise Refused(f"{root / name}: no images in this class folder; add some (jpg, png, ...) or remove it")
        paths.append(pa.array([path for path, _ in files], pa.large_binary()))
        sizes.append(np.array([size for _, size in files], np.int64))
    labels = np.repeat(np.arange(len(classes)), [len(column) for column in paths])
    return Folder(root, pa.concat_arrays(paths), np.concatenate(sizes), labels, tuple(classes))


def _image_files(root: Path, folder: str) -> Iterator[tuple[bytes, int]]:
    """Path below `root` and size of every image; links are followed, each real folder once, and a dangling one counts."""
    above = len(os.path.join(root, ""))
    for _, entries in walk(root / folder):
        for entry in entries:
            is_image = os.path.splitext(entry.name)[1].lower() in SUFFIXES and not entry.is_dir()
            if is_image and (entry.is_file() or entry.is_symlink()):
                yield os.fsencode(entry.path[above:]), entry.stat().st_size if entry.is_file() else -1
