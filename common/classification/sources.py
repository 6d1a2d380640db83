"""Sources of labelled images: reads what `--data` names, and holds out a share for evaluation.

A source holds columns (NumPy, Arrow, memory-mapped files), never one Python object per row: each data worker would
copy the memory pages of those it reads, until the machine is full.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.classification.custom_data import CustomDataset, CustomParts
from common.config.parsing import nearest_path
from common.data import data_spec, splits
from common.data.data_spec import DataSpec, Given, Parts
from common.data.digits import load_digits
from common.data.huggingface import TableParts, open_splits
from common.data.images import SUFFIXES
from common.data.source import Source, fingerprint_of, name_of, path_of, refuse_broken
from common.errors import Refused
from common.files import walk

_SHARDS = re.compile(r"\.(tar|tgz)(\.\w+)?$|::|://|^(\w+-)?streaming:|^(pipe|wds|webdataset):", re.IGNORECASE)
_NOT_YET = (
    "tar/WebDataset shards, URLs and streaming are not supported yet; "
    "extract to an image folder with one subfolder per class, or convert to parquet"
)


@dataclass(frozen=True)
class Spec(DataSpec):
    """Which labelled images a run reads."""

    label_column: str = ""
    max_broken_share: float = 1.0

    table_fields = ("image_column", "label_column")

    def check(self, source: Source) -> None:
        refuse_broken(self.data, source, self.max_broken_share)

    def strata(self, source: Source) -> np.ndarray | None:
        return None if source.multi_label else source.labels


def load(spec: Spec, custom: CustomDataset | Mapping[str, CustomDataset] | None = None) -> tuple[Source, Source]:
    """The images to train on and those to evaluate on, (train, val), with the same classes. `spec.data` is one of

    - `digits`: 1,797 handwritten digits that come with scikit-learn (a folder of that name is `./digits`);
    - a folder with `train/` and `val/`, as `splits.kind_of` knows them, each with one subfolder per class;
    - an image folder with one subfolder per class;
    - a Hugging Face data set: a folder written by `save_to_disk`, a parquet file, a folder of them or a pattern, or
      the Hub's `owner/name` or `owner/name:config`;
    - a CSV file of paths and labels, or a pattern of them.

    Data of another form are read by a `custom` data set of your own, or by one for each part: {"train": ..., "val": ...}.

    Columns are found by their type, or named; a label column may be several joined by commas, with 0 or 1 for a class each.

    `split` names the part to evaluate on, as in `splits.choose`. If the data has no part to validate on, `val_share` of
    each class is held out, chosen by `seed` and the image's path or row alone: adding a file moves at most one other of its
    class to the other side. The held-out fifth of `digits` is fixed, so that its results compare across seeds and settings.

    With `spec.alone`, both are the part to evaluate a trained model on, with the classes that are found there.

    Raises `Refused` for what can't be found, read, or trained on, and if more than `max_broken_share` of the files of a
    part are missing.
    """
    with data_spec.reading(spec.data):
        sources = spec.read(_open(spec, custom))
    return data_spec.same_everywhere(sources)


def _open(spec: Spec, custom: CustomDataset | Mapping[str, CustomDataset] | None) -> Parts[Source]:
    least = 1 if spec.alone else 2  # classes
    if custom is None:
        if _SHARDS.search(spec.data):
            raise Refused(f"--data {spec.data}: {_NOT_YET}")
        if spec.data != "digits" and (tables := open_splits(spec.data)):
            return TableParts(spec.data, tables, spec.image_column, spec.label_column, least)
    spec.refuse_columns()
    if custom is not None:
        return CustomParts(spec.data, custom, least)
    if spec.data == "digits":
        return Given(dict(zip(("train", "val"), load_digits(), strict=True)))
    path = Path(spec.data).expanduser()
    if not path.is_dir():
        found = "a file of a kind that is not known" if path.exists() else "nothing is there"
        raise Refused(
            f"--data {spec.data}: {found}; expected digits, an image folder with one subfolder per class, a save_to_disk "
            f"folder, parquet, CSV, or a Hugging Face name such as owner/name{nearest_path(path)}"
        )
    return FolderParts(Path(os.path.abspath(path)), least)


# ---- folders


@dataclass(frozen=True, eq=False)
class Folder(Source):
    """Image files in one subfolder per class, at any depth below it; class ids are the sorted names of the folders."""

    root: Path
    paths: pa.LargeBinaryArray  # below root; bytes, since a file name may be invalid text
    sizes: np.ndarray  # int64[N] bytes, -1 for a dangling link
    labels: np.ndarray
    classes: tuple[str, ...]
    origin: str = ""
    notes: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.classes, self.labels, self.sizes, self.paths)

    def name(self, index: int) -> str:
        return name_of(self.root, self.paths, index)

    def content(self, index: int) -> str:
        return path_of(self.root, self.paths, index)

    @property
    def missing(self) -> np.ndarray:
        return np.flatnonzero(self.sizes < 0)

    def draws(self, key: int) -> np.ndarray:
        """uint64[N] random numbers, each a function of its image's path and `key` alone."""
        return splits.draws_of(self.paths, key)

    def part(self, rows: np.ndarray) -> "Folder":
        paths = self.paths.take(pa.array(rows))
        return replace(self, paths=paths, sizes=self.sizes[rows], labels=self.labels[rows])


def _part_folders(root: Path) -> dict[str, Path]:
    """The folder of each part of the data, with class folders in it; {"train": root} if `root` has the class folders."""
    folders = _subfolders(root)
    kinds = {name: splits.kind_of(name) for name in folders if splits.kind_of(name)}
    if len({*kinds.values()}) > 1 or (kinds and len(kinds) == len(folders)):
        return {name: root / name for name in folders}
    for name in kinds:  # it may be the name of a class: a train is a vehicle
        inside = {*_subfolders(root / name)}
        for other in (other for other in folders if other != name):
            if len(shared := sorted(inside & {*_subfolders(root / other)})) > 1:
                raise Refused(
                    f"{root}: {name}/ and {other}/ both have the folders {shared[0]}/ and {shared[1]}/, so they seem to be "
                    "parts and not classes; name them train, val and test"
                )
    return {"train": root}


class FolderParts:
    """The parts of an image folder, or all of it as one. Raises `Refused`."""

    def __init__(self, root: Path, least_classes: int) -> None:
        self._folders, self._least = _part_folders(root), least_classes
        self.labels = {name: "the folder" if folder == root else f"{name}/" for name, folder in self._folders.items()}

    def read(self, name: str, first: Folder | None) -> Folder:
        folder = self._folders[name]
        if first is None:
            return _scan(folder, _class_folders(folder, self._least))
        if unknown := sorted(set(_subfolders(folder)) - set(first.classes)):
            raise Refused(f"{folder / unknown[0]}: a class that {first.root} does not have; add it there")
        part = _scan(folder, list(first.classes), may_be_empty=True)
        if len(part) == 0:
            raise Refused(f"{folder}: no images to evaluate on; add some, or use --data {first.root}")
        return part


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
    """Path below `root` and size of every image. Links are followed, each real folder once; a dangling link has size -1."""
    above = len(os.path.join(root, ""))
    for _, entries in walk(root / folder):
        for entry in entries:
            is_image = os.path.splitext(entry.name)[1].lower() in SUFFIXES and not entry.is_dir()
            if is_image and (entry.is_file() or entry.is_symlink()):
                yield os.fsencode(entry.path[above:]), entry.stat().st_size if entry.is_file() else -1
