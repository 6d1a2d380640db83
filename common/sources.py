"""Which images and labels does `--data` mean, and which of them are held out for evaluation?

A source holds columns (NumPy, Arrow, memory-mapped files), never a Python object a row: reading those would copy their
memory pages into every loader worker, bit by bit, until the machine is full.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from common.digits import load_digits
from common.errors import Refused, printable
from common.files import walk
from common.images import SUFFIXES
from common.labelled import VAL_NAMES, Source, fingerprint_of
from common.randomness import key_of, mix
from common.tables import Table, read_table, table_opener

_SHARDS = re.compile(r"\.(tar|tgz)(\.\w+)?$|::|://|^(\w+-)?streaming:|^(pipe|wds|webdataset):", re.IGNORECASE)
_NOT_YET = (
    "tar/WebDataset shards, URLs and streaming are not supported yet; "
    "extract to a folder with a folder a class, or convert to parquet"
)


def load(
    data: str, *, seed: int, val_share: float, image_column: str = "", label_column: str = ""
) -> tuple[Source, Source]:
    """The images to train on and those to evaluate on, (train, val), with the same classes. `data` is one of

    - `digits`: 1,797 handwritten digits that come with scikit-learn (a folder of that name is `./digits`);
    - a folder with `train/` and `val/` (or `validation/`, `valid/`, `test/`), each with a folder a class;
    - a folder with a folder a class;
    - a Hugging Face data set: a folder written by `save_to_disk`, a parquet file, a folder of them or a pattern, or
      the Hub's `owner/name` or `owner/name:config`. Columns are found by their type, or named.

    Where the data has no part of its own to evaluate on, `val_share` of each class is held out, chosen by `seed` and
    the image's path or row alone: adding a file moves at most one other of its class to the other side. The fifth held
    out of `digits` is fixed, so that its results compare across seeds and settings.

    Raises `Refused` for what can't be found, read, or trained on.
    """
    path = Path(data).expanduser()
    if _SHARDS.search(data):
        raise Refused(f"--data {data}: {_NOT_YET}")
    try:
        if data != "digits" and (opener := table_opener(data)):
            train, val = read_table(data, opener, image_column, label_column)
            return (train, val) if val else _split_rows(train, seed, val_share)
        if image_column or label_column:
            raise Refused(f"--data {data}: is no table, so leave out --image_column and --label_column")
        if data == "digits":
            return _load_digits()
        if path.is_dir():
            return _load_folder(Path(os.path.abspath(path)), seed, val_share)
    except PermissionError as error:
        raise Refused(f"--data {data}: no permission to read {error.filename}; allow it, or copy the data") from error
    except OSError as error:
        raise Refused(f"--data {data}: {error.filename or path} can't be read: {error.strerror or error}") from error
    found = "a file of a kind that is not known" if path.exists() else "nothing is there"
    raise Refused(
        f"--data {data}: {found}; expected digits, a folder with a folder a class, a save_to_disk folder, "
        "parquet, or a Hugging Face name such as owner/name"
    )


def _split_rows(table: Table, seed: int, val_share: float) -> tuple[Source, Source]:
    draws = mix(np.arange(len(table)), key_of(seed, "held out"))
    strata = np.zeros(len(table), np.int64) if table.multi_label else table.labels
    train, val = _held_out(draws, strata, val_share)
    return table.part(train), table.part(val)


def _held_out(draws: np.ndarray, strata: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows held out, each in order: of every stratum its `share` with the smallest draws.

    `draws` uint64[N], `strata` int64[N]. A stratum keeps at least one row to train on.
    """
    if not 0 < share < 1:
        raise Refused(f"--val_share {share}: must lie between 0 and 1, since the data has no part to evaluate on")
    counts = np.bincount(strata)
    by_stratum = np.lexsort((draws, strata))
    place = np.empty(len(draws), np.int64)  # of each row among its stratum, by draw
    place[by_stratum] = np.arange(len(draws)) - np.repeat(np.cumsum(counts) - counts, counts)
    out = place < np.minimum((share * counts + 0.5).astype(np.int64), counts - 1)[strata]
    if not out.any():
        raise Refused(f"--val_share {share} of at most {counts.max()} images a class holds out none; raise it")
    return np.flatnonzero(~out), np.flatnonzero(out)


# ---- digits


@dataclass(frozen=True, eq=False)
class Digits(Source):
    """Handwritten digits of the UCI set (Alpaydin & Kaynak, 1998), grey, enlarged once from 8x8 to 32x32 pixels.

    Enlarged, since a random crop of 8x8 pixels could only move by an eighth of the image.
    """

    pixels: np.ndarray  # uint8[N, 32, 32]
    rows: np.ndarray  # int64[N] in scikit-learn's order
    labels: np.ndarray
    classes: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.classes, self.labels, self.pixels)

    def name(self, index: int) -> str:
        return f"digits[{self.rows[index]}]"

    def content(self, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index])


def _load_digits() -> tuple[Source, Source]:
    digits = load_digits()
    small = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8], from 0..16
    large = [Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC) for image in small]
    pixels, labels = np.stack([np.asarray(image) for image in large]), digits.target.astype(np.int64)
    classes = tuple(str(name) for name in digits.target_names)
    draws = mix(np.arange(len(labels)), key_of("digits"))

    def part(rows: np.ndarray) -> Digits:
        return Digits(pixels[rows], rows, labels[rows], classes)

    train, val = _held_out(draws, labels, share=0.2)
    return part(train), part(val)


# ---- folders


@dataclass(frozen=True, eq=False)
class Folder(Source):
    """Image files in a folder a class, at any depth below it; class ids are the sorted names of the folders."""

    root: Path
    paths: pa.LargeBinaryArray  # below root; bytes, since a file's name need not be valid text
    sizes: np.ndarray  # int64[N] bytes
    labels: np.ndarray
    classes: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.classes, self.labels, self.sizes, self.paths)

    def name(self, index: int) -> str:
        return printable(f"{self.root}/{self.paths[int(index)].as_py().decode(errors='backslashreplace')}")

    def content(self, index: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.paths[int(index)].as_py()))

    def part(self, rows: np.ndarray) -> "Folder":
        return Folder(self.root, self.paths.take(pa.array(rows)), self.sizes[rows], self.labels[rows], self.classes)


def _load_folder(root: Path, seed: int, val_share: float) -> tuple[Source, Source]:
    folders = _subfolders(root)
    val_name = next((name for name in VAL_NAMES if name in folders), None)
    if "train" in folders and val_name:
        classes = _class_folders(root / "train")
        if unknown := sorted(set(_subfolders(root / val_name)) - set(classes)):
            raise Refused(f"{root / val_name / unknown[0]}: a class that {root / 'train'} does not have; add it there")
        train, val = _scan(root / "train", classes), _scan(root / val_name, classes, may_be_empty=True)
        if len(val) == 0:
            raise Refused(f"{root / val_name}: no images to evaluate on; add some, or use --data {root / 'train'}")
        return train, val
    if folders and set(folders) <= {"train", *VAL_NAMES}:
        raise Refused(f"{root}: only {', '.join(folders)}/; needs train/ and val/, or use --data {root / folders[0]}")
    everything = _scan(root, _class_folders(root))
    hashes = (hashlib.blake2b(path.as_py(), digest_size=8).digest() for path in everything.paths)
    draws = mix(np.frombuffer(b"".join(hashes), "<u8"), key_of(seed, "held out"))
    train, val = _held_out(draws, everything.labels, val_share)
    return everything.part(train), everything.part(val)


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _class_folders(folder: Path) -> list[str]:
    names = _subfolders(folder)
    if not names and any(folder.glob("*.tar")):
        raise Refused(f"{folder}: {_NOT_YET}")
    if len(names) < 2:
        found = f"only the class folder {names[0]}/" if names else "no class folders"
        raise Refused(f"{folder}: {found}; images belong in a folder a class, of two classes or more")
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
                yield os.fsencode(entry.path[above:]), entry.stat().st_size if entry.is_file() else 0
