"""Sources of labelled images: reads the data of `--data`, and holds out a share for evaluation."""

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from common.classification.custom_data import CustomDataset, open_custom
from common.config.origin import Origin
from common.config.parsing import suggest_names, suggest_path
from common.data import data_spec, splits
from common.data.data_spec import DataSpec, DataSplits, LoadedSplits
from common.data.digits import load_digits
from common.data.huggingface import open_table
from common.data.images import UNREAD_ADVICE, has_image_suffix, is_image_file
from common.data.notes import Notes
from common.data.source import Files, Source, encode_paths, refuse_broken
from common.data.tables import get_split_labels, read_tables
from common.errors import Refused
from common.files import MEDIUM, get_file_sizes, has_run_folders, is_junk, read_text, walk

__all__ = ["Source", "Spec", "load", "load_data"]

# Folders that would hardly be classes if all have the same folders inside.
_FOLD = re.compile(
    r"(fold|split|subset|part|set|cv|cam|camera|scanner|device|view|site|lab|hospital|cent(er|re)"
    r"|session|batch|run|round|year|month|week|day|patient|subject|person|video|scene)s?"
    r"[ _-]*(\d+|[a-z])|(\d+[ _-]*)?(fold|part|set)|(19|20)\d\d",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Spec(DataSpec):
    """Which labelled images a run reads."""

    label_column: str = ""
    max_broken_share: float = 1.0

    table_fields = ("image_column", "label_column")

    @property
    def min_classes(self) -> int:
        return 1 if self.is_eval_only else 2


def load_data(
    config: Any,
    weights: Origin | None = None,
    custom: CustomDataset | Mapping[str, CustomDataset] | None = None,
    any_classes: bool = False,
) -> tuple[Source, Source]:
    """The images to train on and to evaluate on, which the flags name; see `load` for `custom`.

    With the `weights` of --eval_only, both are the images to evaluate them on: the first has the
    model's classes, the second the data's, matched by name. With `any_classes` a model of
    embeddings is evaluated on classes that it does not know.
    """
    train, val = load(Spec.from_config(config, weights), custom)
    if weights is None or any_classes:
        return train, val
    return data_spec.match_classes(weights, config.data, val)


def load(
    spec: Spec, custom: CustomDataset | Mapping[str, CustomDataset] | None = None
) -> tuple[Source, Source]:
    """The images to train on and to evaluate on, with the same classes. `spec.data` is one of

    - `digits`: 1,797 handwritten digits that come with scikit-learn (a folder of that name is `./digits`);
    - shards, as `DataSpec.is_sharded` knows them;
    - an image folder with one subfolder per class, or of such splits, as `get_split_kind` knows them;
    - a Hugging Face data set, Parquet or CSV files, as `huggingface.open_table` knows them.

    Data of another form are read by a `custom` data set of your own, or by one for each part:
    {"train": ..., "val": ...}.

    `split` names the part to evaluate on, as in `splits.choose_subsets`. If there is none, `val_share` of
    each class is held out, chosen by `seed` and the image's path or row alone; of `digits` always
    the same fifth. With `spec.is_eval_only`, both are the part to evaluate a trained model on.

    Raises `Refused` for data that can't be found, read, or trained on, and if more than
    `max_broken_share` of a part is missing.
    """
    if custom is None and spec.is_sharded():
        sources = _load_shards(spec)
    else:
        with data_spec.guard_reading(spec.data):
            sources = _divide(spec, _open(spec, custom))
    return data_spec.check_train_and_val(sources)


def _load_shards(spec: Spec) -> tuple[Source, ...]:
    """The sources of shards. A collective. Raises `Refused`."""
    # Imported here, since most data are no shards.
    from common.shards import open_parts, share_blocks

    parts = open_parts(spec)
    with data_spec.guard_reading(spec.data):
        sources = _divide(spec, parts)
    return share_blocks(sources, spec.shard_memory)


def _divide(spec: Spec, parts: DataSplits) -> tuple[Any, ...]:
    """The parts that are used; one of them divided, if there is none to evaluate on. Raises `Refused`."""
    subsets = spec.choose_subsets(parts.labels)
    undivided = data_spec.read_splits(parts, subsets)
    for source in undivided.values():
        refuse_broken(spec.data, source, spec.max_broken_share)
    return spec.divide(parts.labels, subsets, undivided)


def _open(spec: Spec, custom: CustomDataset | Mapping[str, CustomDataset] | None) -> DataSplits:
    """The parts of the data, not read yet. Raises `Refused`."""
    is_digits = custom is None and spec.data == "digits"
    if custom is None and not is_digits and (table := open_table(spec.data)):
        columns = spec.image_column, spec.label_column, spec.min_classes, spec.group_column
        return DataSplits(
            get_split_labels(table),
            lambda names: read_tables([table[name] for name in names], *columns),
        )
    spec.refuse_columns()
    if custom is not None:
        return open_custom(custom, spec.min_classes)
    if is_digits:
        return LoadedSplits(dict(zip(("train", "val"), load_digits(), strict=True)))
    root = Path(os.path.abspath(Path(spec.data).expanduser()))
    if not root.is_dir():
        found = "a file of a kind that is not known" if root.exists() else "nothing is there"
        raise Refused(
            f"--data {spec.data}: {found}; expected digits, an image folder with one subfolder "
            "per class, a save_to_disk folder, parquet, CSV, or a Hugging Face name such as "
            f"owner/name{suggest_path(root)}"
        )
    folders = _part_folders(root)
    runs = sorted(path.name for path in root.iterdir() if path.is_dir() and has_run_folders(path))
    notes = (f"left out: runs of these recipes in {', '.join(runs)}/",) if runs else ()
    labels = {
        name: "the folder" if folder == root else f"{name}/" for name, folder in folders.items()
    }

    def read_parts(names: Sequence[str]) -> list[Files]:
        sources = _read_folders([folders[name] for name in names], spec.min_classes)
        return [replace(source, notes=source.notes + notes) for source in sources]

    return DataSplits(labels, read_parts)


# ---- folders


def _read_folders(folders: Sequence[Path], min_classes: int) -> list[Files]:
    """The images of each folder. Classes are the class folders of the first. Raises `Refused`."""
    first, *others = folders
    folder_by_class = _class_folders(first)
    classes = list(folder_by_class.values())
    if len(classes) < min_classes:
        found = f"only the class folder {classes[0]}/" if classes else "no class folders"
        raise Refused(
            f"{first}: {found}; images belong in one subfolder per class, of two classes or more"
        )
    sources = [_scan(first, classes, classes)]
    for name, count in zip(classes, sources[0].class_counts, strict=True):
        if not count:
            raise Refused(
                f"{first / name}: no images in this class folder; add some (jpg, png, ...) or "
                "remove it"
            )
    for folder in others:
        names = _class_folders(folder)
        unknown = sorted(names.keys() - folder_by_class.keys())
        if unknown == ["images"] and (folder / "val_annotations.txt").is_file():
            sources.append(_read_annotations(folder / "val_annotations.txt", classes))
            continue
        if len(unknown) == len(names):
            _refuse_heap(folder, first / classes[0])
        if unknown:
            name = names[unknown[0]]
            advice = f"add it there{suggest_names(name, classes)}"
            raise Refused(f"{folder / name}: a class that {first} does not have; {advice}")
        source = _scan(folder, [names.get(name, name) for name in folder_by_class], classes)
        if not len(source):
            raise Refused(f"{folder}: no images to evaluate on; add some, or use --data {first}")
        sources.append(source)
    return sources


def _class_folders(folder: Path) -> dict[str, str]:
    """The names of the subfolders, by the names as people see them: composed letters, no spaces at
    the ends.
    """
    names: dict[str, str] = {}
    for name in _subfolders(folder):
        shown = unicodedata.normalize("NFC", name).strip()
        if shown in names:
            advice = "they differ in spaces or in composed letters: join them"
            raise Refused(
                f"{folder}: {names[shown]!a} and {name!a} look like the same class; {advice}"
            )
        names[shown] = name
    return names


def _refuse_heap(folder: Path, class_folder: Path) -> None:
    """Raise `Refused` for images that lie in one folder for all classes, as ImageNet's and Tiny
    ImageNet's do.
    """
    for heap in (folder, folder / "images"):
        count = sum(map(has_image_suffix, os.listdir(heap))) if heap.is_dir() else 0
        if count:
            raise Refused(
                f"{heap}: {count:,} images in one folder for all classes; move each into the "
                f"folder of its class, named as {class_folder} (ImageNet: by the ground truth of "
                "its devkit), or list them in a CSV file"
            )


def _read_annotations(file: Path, classes: list[str]) -> Files:
    """The images beside Tiny ImageNet's list, whose lines are a name in images/, its class and a box."""
    lines = [line.split("\t") for line in read_text(file, MEDIUM).splitlines()]
    ids = {name: number for number, name in enumerate(classes)}
    for row, line in enumerate(lines, start=1):
        if len(line) < 2 or line[1] not in ids:
            raise Refused(
                f"{file}: line {row} must be a name and a class of the training data, with a tab "
                "between"
            )
    root = file.parent / "images"
    sizes = np.array(get_file_sizes(str(root / line[0]) for line in lines), np.int64)
    paths = encode_paths(line[0] for line in lines)
    labels = np.array([ids[line[1]] for line in lines], np.int64)
    return Files(str(root), paths, sizes, labels=labels, classes=tuple(classes))


def _part_folders(root: Path) -> dict[str, Path]:
    """The folder of each part of the data; {"train": root} if `root` has the class folders."""
    folders = _subfolders(root)
    kinds = {name: splits.get_split_kind(name) for name in folders if splits.get_split_kind(name)}
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
        names = sorted(
            entry.name for entry in entries if entry.is_dir() and not is_junk(entry.name)
        )
    return [name for name in names if not has_run_folders(folder / name)]


def _scan(root: Path, folders: Sequence[str], classes: list[str]) -> Files:
    """The images of a folder for each class, some of which may not exist. Raises `Refused`."""
    paths = []
    sizes = []
    notes = Notes(str(root), "images")
    inner: dict[str, set[str]] = {}  # names of the folders with images in each class folder
    for folder in folders:
        class_notes = Notes(str(root / folder), "images")
        inner[folder] = set()
        files = (
            sorted(_image_files(root, folder, class_notes, inner[folder]))
            if (root / folder).is_dir()
            else []
        )
        class_notes.format_lines(len(files) + class_notes.num_left_out, UNREAD_ADVICE)
        notes.merge(class_notes)
        paths.append(pa.array([path for path, _ in files], pa.large_binary()))
        sizes.append(np.array([size for _, size in files], np.int64))
    labels = np.repeat(np.arange(len(classes)), [*map(len, paths)])
    lines = notes.format_lines(len(labels) + notes.num_left_out, UNREAD_ADVICE) + _check_inner(
        root, inner
    )
    source = Files(
        str(root),
        pa.concat_arrays(paths),
        np.concatenate(sizes),
        labels=labels,
        classes=tuple(classes),
    )
    return replace(source, notes=lines + _note_archives(root))


def _note_archives(root: Path) -> tuple[str, ...]:
    """A note if tars lie beside the class folders: they are not read."""
    tars = sorted(root.glob("[!.]*.tar"))
    return (
        (f"{len(tars)} *.tar beside the class folders are not read, first {tars[0].name}",)
        if tars
        else ()
    )


def _image_files(
    root: Path, folder: str, notes: Notes, inner: set[str]
) -> Iterator[tuple[bytes, int]]:
    """Path below `root` and size of every image, -1 for a dangling link. Links are followed.

    `inner` gets the names of the folders with images that lie in `folder`.
    """
    above = len(os.path.join(root, ""))
    for place, entries in walk(root / folder):
        if any(entry.is_file() for entry in entries):
            inner.update(place[above:].split("/")[1:2])
        for entry in entries:
            if entry.is_file():
                if is_image_file(entry.path, notes):
                    yield os.fsencode(entry.path[above:]), entry.stat().st_size
            elif entry.is_symlink() and not entry.is_dir() and has_image_suffix(entry.name):
                yield os.fsencode(entry.path[above:]), -1


def _check_inner(root: Path, inner: Mapping[str, set[str]]) -> tuple[str, ...]:
    """A note about folders that all class folders have. Raises `Refused` if these or the class
    folders seem to be parts.
    """
    for folder, names in inner.items():
        parts = sorted(name for name in names if splits.get_split_kind(name))
        if len({splits.get_split_kind(name) for name in parts}) > 1:
            problem = f"has {parts[0]}/ and {parts[1]}/ in it, whose images would be mixed"
            raise Refused(
                f"{root / folder}: {problem}; put parts above the classes: "
                f"{root / parts[0] / folder}"
            )
    common = sorted(set.intersection(*inner.values()))
    if len(common) < 2:
        return ()
    problem = f"{', '.join(list(inner)[:3])} each have {common[0]}/ and {common[1]}/ in them"
    if len(inner) > 1 and all(map(_FOLD.fullmatch, inner)):
        advice = "name them train and val, or join them, to hold out a share"
        raise Refused(
            f"{root}: {problem}, so they seem to be folds, years or the like and not classes; "
            f"{advice}"
        )
    return (
        f"the classes {problem}: if those are the classes, name the folders above train and val",
    )
