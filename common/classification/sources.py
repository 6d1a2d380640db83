"""Sources of labelled images: reads the data of `--data`, and holds out a share for evaluation."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.classification.custom_data import CustomDataset, open_custom
from common.config.parsing import nearest_path
from common.data import data_spec, splits
from common.data.data_spec import DataSpec, Given, Parts
from common.data.digits import load_digits
from common.data.huggingface import open_table
from common.data.images import SUFFIXES
from common.data.source import Files, Source, refuse_broken
from common.data.tables import part_labels, read_tables
from common.errors import Refused
from common.files import holds_runs, walk

__all__ = ["Source", "Spec", "load"]


@dataclass(frozen=True)
class Spec(DataSpec):
    """Which labelled images a run reads."""

    label_column: str = ""
    max_broken_share: float = 1.0

    table_fields = ("image_column", "label_column")

    @property
    def min_classes(self) -> int:
        return 1 if self.alone else 2


def load(spec: Spec, custom: CustomDataset | Mapping[str, CustomDataset] | None = None) -> tuple[Source, Source]:
    """The images to train on and to evaluate on, with the same classes. `spec.data` is one of

    - `digits`: 1,797 handwritten digits that come with scikit-learn (a folder of that name is `./digits`);
    - shards, as `shards.find` knows them;
    - an image folder with one subfolder per class, or a folder of such parts, as `splits.kind_of` knows them;
    - a Hugging Face data set, Parquet or CSV files, as `huggingface.open_table` knows them.

    Data of another form are read by a `custom` data set of your own, or by one for each part: {"train": ..., "val": ...}.

    `split` names the part to evaluate on, as in `splits.choose`. If there is none, `val_share` of each class is held out,
    chosen by `seed` and the image's path or row alone; of `digits` always the same fifth. With `spec.alone`, both are the
    part to evaluate a trained model on.

    Raises `Refused` for data that can't be found, read, or trained on, and if more than `max_broken_share` of a part is
    missing.
    """
    from common.data.shards import shard_parts, shared  # imports torch

    shards = shard_parts(spec) if custom is None else None
    with data_spec.reading(spec.data):
        parts = shards or _open(spec, custom)
        pieces = spec.pieces(parts.labels)
        undivided = data_spec.read(parts, pieces)
        for source in undivided.values():
            refuse_broken(spec.data, source, spec.max_broken_share)
        sources = spec.divide(parts.labels, pieces, undivided)
    return data_spec.same_everywhere(shared(sources, spec.shard_memory))


def _open(spec: Spec, custom: CustomDataset | Mapping[str, CustomDataset] | None) -> Parts:
    """The parts of the data, not read yet. Raises `Refused`."""
    is_digits = custom is None and spec.data == "digits"
    if custom is None and not is_digits and (table := open_table(spec.data)):
        columns = spec.image_column, spec.label_column, spec.min_classes
        return Parts(part_labels(table), lambda names: read_tables([table[name] for name in names], *columns))
    spec.refuse_columns()
    if custom is not None:
        return open_custom(custom, spec.min_classes)
    if is_digits:
        return Given(dict(zip(("train", "val"), load_digits(), strict=True)))
    root = Path(os.path.abspath(Path(spec.data).expanduser()))
    if not root.is_dir():
        found = "a file of a kind that is not known" if root.exists() else "nothing is there"
        raise Refused(
            f"--data {spec.data}: {found}; expected digits, an image folder with one subfolder per class, a save_to_disk "
            f"folder, parquet, CSV, or a Hugging Face name such as owner/name{nearest_path(root)}"
        )
    folders = _part_folders(root)
    runs = sorted(path.name for path in root.iterdir() if path.is_dir() and holds_runs(path))
    notes = (f"left out: runs of these recipes in {', '.join(runs)}/",) if runs else ()
    labels = {name: "the folder" if folder == root else f"{name}/" for name, folder in folders.items()}

    def read_parts(names: Sequence[str]) -> list[Files]:
        sources = _read_folders([folders[name] for name in names], spec.min_classes)
        return [replace(source, notes=source.notes + notes) for source in sources]

    return Parts(labels, read_parts)


# ---- folders


def _read_folders(folders: Sequence[Path], min_classes: int) -> list[Files]:
    """The images of each folder. Classes are the class folders of the first. Raises `Refused`."""
    first, *others = folders
    classes = _subfolders(first)
    if len(classes) < min_classes:
        found = f"only the class folder {classes[0]}/" if classes else "no class folders"
        raise Refused(f"{first}: {found}; images belong in one subfolder per class, of two classes or more")
    for folder in others:
        if unknown := sorted({*_subfolders(folder)} - {*classes}):
            raise Refused(f"{folder / unknown[0]}: a class that {first} does not have; add it there")
    sources = [_scan(folder, classes) for folder in folders]
    for name, count in zip(classes, sources[0].class_counts, strict=True):
        if not count:
            raise Refused(f"{first / name}: no images in this class folder; add some (jpg, png, ...) or remove it")
    for folder, source in zip(others, sources[1:], strict=True):
        if not len(source):
            raise Refused(f"{folder}: no images to evaluate on; add some, or use --data {first}")
    return sources


def _part_folders(root: Path) -> dict[str, Path]:
    """The folder of each part of the data; {"train": root} if `root` has the class folders."""
    folders = _subfolders(root)
    kinds = {name: splits.kind_of(name) for name in folders if splits.kind_of(name)}
    if len({*kinds.values()}) > 1 or (kinds and len(kinds) == len(folders)):
        return {name: root / name for name in folders}
    for name in kinds:  # it may be the name of a class: a train is a vehicle
        inside = {*_subfolders(root / name)}
        for other in (other for other in folders if other != name):
            if len(shared := sorted(inside & {*_subfolders(root / other)})) > 1:
                both = f"{name}/ and {other}/ both have the folders {shared[0]}/ and {shared[1]}/"
                advice = "they seem to be parts and not classes; name them train, val and test"
                raise Refused(f"{root}: {both}, so {advice}")
    return {"train": root}


def _subfolders(folder: Path) -> list[str]:
    """The names of the folders that may be classes or parts."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    return [name for name in names if not holds_runs(folder / name)]


def _scan(root: Path, classes: list[str]) -> Files:
    paths, sizes = [], []
    for name in classes:
        files = sorted(_image_files(root, name)) if (root / name).is_dir() else []
        paths.append(pa.array([path for path, _ in files], pa.large_binary()))
        sizes.append(np.array([size for _, size in files], np.int64))
    labels = np.repeat(np.arange(len(classes)), [*map(len, paths)])
    return Files(str(root), pa.concat_arrays(paths), np.concatenate(sizes), labels=labels, classes=tuple(classes))


def _image_files(root: Path, folder: str) -> Iterator[tuple[bytes, int]]:
    """Path below `root` and size of every image, -1 for a dangling link. Links are followed."""
    above = len(os.path.join(root, ""))
    for _, entries in walk(root / folder):
        for entry in entries:
            is_image = os.path.splitext(entry.name)[1].lower() in SUFFIXES and not entry.is_dir()
            if is_image and (entry.is_file() or entry.is_symlink()):
                yield os.fsencode(entry.path[above:]), entry.stat().st_size if entry.is_file() else -1
