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
from common.data.tables import Split, describe_splits, read_tables
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
    - an image folder with one subfolder per class, or of splits, as `get_split_kind` knows them;
    - a Hugging Face data set, Parquet or CSV files, as `huggingface.open_table` knows them.

    Data of another form are read by a `custom` data set of your own, or by one for each split:
    {"train": ..., "val": ...}.

    `split` names the split to evaluate on, as in `splits.choose_subsets`. If there is none, `val_share` of
    each class is held out, chosen by `seed` and the image's path or row alone; of `digits` always
    the same fifth. With `spec.is_eval_only`, both are the split to evaluate a trained model on.

    Raises `Refused` for data that can't be found, read, or trained on, and if more than
    `max_broken_share` of a split is missing.
    """
    if custom is None and spec.is_sharded():
        sources = _load_shards(spec)
    else:
        with data_spec.guard_reading(spec.data):
            sources = _read_sources(spec, _open(spec, custom))
    return data_spec.check_train_and_val(sources)


def _load_shards(spec: Spec) -> tuple[Source, ...]:
    """The sources of shards. A collective. Raises `Refused`."""
    # Imported here, since most data are no shards.
    from common.shards import open_splits, share_blocks

    parts = open_splits(spec)
    with data_spec.guard_reading(spec.data):
        sources = _read_sources(spec, parts)
    return share_blocks(sources, spec.shard_memory)


def _read_sources(spec: Spec, parts: DataSplits) -> tuple[Any, ...]:
    """The splits that are used; one of them divided, if there is none to evaluate on. Raises `Refused`."""
    subsets = spec.choose_subsets(parts.split_texts)
    undivided = data_spec.read_splits(parts, subsets)
    for source in undivided.values():
        refuse_broken(spec.data, source, spec.max_broken_share)
    return spec.divide(parts.split_texts, subsets, undivided)


def _open(spec: Spec, custom: CustomDataset | Mapping[str, CustomDataset] | None) -> DataSplits:
    """The splits of the data, not read yet. Raises `Refused`."""
    is_digits = custom is None and spec.data == "digits"
    if custom is None and not is_digits:
        table = open_table(spec.data)
        if table:
            return _open_table(spec, table)
    spec.refuse_columns()
    if custom is not None:
        return open_custom(custom, spec.min_classes)
    if is_digits:
        train, val = load_digits()
        return LoadedSplits({"train": train, "val": val})
    return _open_folder(spec)


def _open_table(spec: Spec, table: dict[str, Split]) -> DataSplits:
    def read(names: Sequence[str]) -> list[Any]:
        return read_tables(
            [table[name] for name in names],
            spec.image_column,
            spec.label_column,
            spec.min_classes,
            spec.group_column,
        )

    return DataSplits(describe_splits(table), read)


def _open_folder(spec: Spec) -> DataSplits:
    root = Path(os.path.abspath(Path(spec.data).expanduser()))
    if not root.is_dir():
        problem = "a file of a kind that is not known" if root.exists() else "nothing is there"
        raise Refused(
            f"--data {spec.data}: {problem}; expected digits, an image folder with one subfolder "
            "per class, a save_to_disk folder, parquet, CSV, or a Hugging Face name such as "
            f"owner/name{suggest_path(root)}"
        )
    folders = _find_split_folders(root)
    runs = sorted(path.name for path in root.iterdir() if path.is_dir() and has_run_folders(path))
    notes: tuple[str, ...] = ()
    if runs:
        notes = (f"left out: runs of these recipes in {', '.join(runs)}/",)
    split_texts = {}
    for name, folder in folders.items():
        split_texts[name] = "the folder" if folder == root else f"{name}/"

    def read(names: Sequence[str]) -> list[Files]:
        sources = _read_folders([folders[name] for name in names], spec.min_classes)
        return [replace(source, notes=source.notes + notes) for source in sources]

    return DataSplits(split_texts, read)


# ---- folders


def _read_folders(folders: Sequence[Path], min_classes: int) -> list[Files]:
    """The images of each folder. Classes are the class folders of the first. Raises `Refused`."""
    first = folders[0]
    folder_by_class = _find_class_folders(first)
    classes = list(folder_by_class.values())
    if len(classes) < min_classes:
        problem = f"only the class folder {classes[0]}/" if classes else "no class folders"
        raise Refused(
            f"{first}: {problem}; images belong in one subfolder per class, of two classes or more"
        )
    sources = [_scan(first, classes, classes)]
    for name, num_images in zip(classes, sources[0].class_counts, strict=True):
        if not num_images:
            raise Refused(
                f"{first / name}: no images in this class folder; add some (jpg, png, ...) or "
                "remove it"
            )
    for folder in folders[1:]:
        annotations = folder / "val_annotations.txt"
        names = _find_class_folders(folder)
        unknown = sorted(names.keys() - folder_by_class.keys())
        if unknown == ["images"] and annotations.is_file():
            sources.append(_read_annotations(annotations, classes))
            continue
        if len(unknown) == len(names):
            _refuse_unsorted(folder, first / classes[0])
        if unknown:
            name = names[unknown[0]]
            advice = f"add it there{suggest_names(name, classes)}"
            raise Refused(f"{folder / name}: a class that {first} does not have; {advice}")
        source = _scan(folder, [names.get(name, name) for name in folder_by_class], classes)
        if not len(source):
            raise Refused(f"{folder}: no images to evaluate on; add some, or use --data {first}")
        sources.append(source)
    return sources


def _find_class_folders(folder: Path) -> dict[str, str]:
    """The names of the subfolders, by the names as people see them.

    These have composed letters, and no spaces at the ends.
    """
    names: dict[str, str] = {}
    for name in _list_subfolders(folder):
        class_name = unicodedata.normalize("NFC", name).strip()
        if class_name in names:
            advice = "they differ in spaces or in composed letters: join them"
            raise Refused(
                f"{folder}: {names[class_name]!a} and {name!a} look like the same class; {advice}"
            )
        names[class_name] = name
    return names


def _refuse_unsorted(folder: Path, class_folder: Path) -> None:
    """Raise `Refused` for images in one folder for all classes, as ImageNet's and Tiny ImageNet's."""
    for image_folder in (folder, folder / "images"):
        num_images = 0
        if image_folder.is_dir():
            num_images = sum(has_image_suffix(name) for name in os.listdir(image_folder))
        if num_images:
            raise Refused(
                f"{image_folder}: {num_images:,} images in one folder for all classes; move each "
                f"into the folder of its class, named as {class_folder} (ImageNet: by the ground "
                "truth of its devkit), or list them in a CSV file"
            )


def _read_annotations(file: Path, classes: list[str]) -> Files:
    """The images beside Tiny ImageNet's list, whose lines are a name in images/, its class and a box."""
    lines = [line.split("\t") for line in read_text(file, MEDIUM).splitlines()]
    class_ids = {name: class_id for class_id, name in enumerate(classes)}
    for number, line in enumerate(lines, start=1):
        if len(line) < 2 or line[1] not in class_ids:
            raise Refused(
                f"{file}: line {number} must be a name and a class of the training data, with a "
                "tab between"
            )
    root = file.parent / "images"
    sizes = np.array(get_file_sizes(str(root / line[0]) for line in lines), np.int64)
    paths = encode_paths(line[0] for line in lines)
    labels = np.array([class_ids[line[1]] for line in lines], np.int64)
    return Files(str(root), paths, sizes, labels=labels, classes=tuple(classes))


def _find_split_folders(root: Path) -> dict[str, Path]:
    """The folder of each split of the data; {"train": root} if `root` has the class folders."""
    folders = _list_subfolders(root)
    split_names = [name for name in folders if splits.get_split_kind(name)]
    kinds = {splits.get_split_kind(name) for name in split_names}
    are_all_splits = len(split_names) > 0 and len(split_names) == len(folders)
    if len(kinds) > 1 or are_all_splits:
        return {name: root / name for name in folders}
    for name in split_names:  # it may be the name of a class: a train is a vehicle
        subfolders = set(_list_subfolders(root / name))
        for sibling in folders:
            if sibling == name:
                continue
            shared = sorted(subfolders.intersection(_list_subfolders(root / sibling)))
            if len(shared) > 1:
                raise Refused(
                    f"{root}: {name}/ and {sibling}/ both have the folders {shared[0]}/ and "
                    f"{shared[1]}/, so they seem to be parts and not classes; name them train, val "
                    "and test"
                )
    return {"train": root}


def _list_subfolders(folder: Path) -> list[str]:
    """The names of the folders that may be classes or splits."""
    names = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir() and not is_junk(entry.name):
                names.append(entry.name)
    return [name for name in sorted(names) if not has_run_folders(folder / name)]


def _scan(root: Path, folders: Sequence[str], classes: list[str]) -> Files:
    """The images of a folder for each class, some of which may not exist. Raises `Refused`."""
    paths = []
    sizes = []
    notes = Notes(str(root), "images")
    inner: dict[str, set[str]] = {}  # names of the folders with images in each class folder
    for folder in folders:
        class_notes = Notes(str(root / folder), "images")
        inner[folder] = set()
        files: list[tuple[bytes, int]] = []
        if (root / folder).is_dir():
            files = sorted(_find_images(root, folder, class_notes, inner[folder]))
        class_notes.format_lines(len(files) + class_notes.num_left_out, UNREAD_ADVICE)
        notes.merge(class_notes)
        paths.append(pa.array([path for path, _ in files], pa.large_binary()))
        sizes.append(np.array([size for _, size in files], np.int64))
    labels = np.repeat(np.arange(len(classes)), [len(class_paths) for class_paths in paths])
    lines = notes.format_lines(len(labels) + notes.num_left_out, UNREAD_ADVICE)
    lines += _check_inner(root, inner)
    return Files(
        str(root),
        pa.concat_arrays(paths),
        np.concatenate(sizes),
        labels=labels,
        classes=tuple(classes),
        notes=lines + _note_archives(root),
    )


def _note_archives(root: Path) -> tuple[str, ...]:
    """A note if tars lie beside the class folders: they are not read."""
    tars = sorted(root.glob("[!.]*.tar"))
    if not tars:
        return ()
    return (f"{len(tars)} *.tar beside the class folders are not read, first {tars[0].name}",)


def _find_images(
    root: Path, folder: str, notes: Notes, inner: set[str]
) -> Iterator[tuple[bytes, int]]:
    """Path below `root` and size of every image, -1 for a dangling link. Links are followed.

    `inner` gets the names of the folders with images that lie in `folder`.
    """
    prefix_length = len(os.path.join(root, ""))
    for path, entries in walk(root / folder):
        if any(entry.is_file() for entry in entries):
            inner.update(path[prefix_length:].split("/")[1:2])
        for entry in entries:
            if entry.is_file():
                if is_image_file(entry.path, notes):
                    yield os.fsencode(entry.path[prefix_length:]), entry.stat().st_size
            elif entry.is_symlink() and not entry.is_dir() and has_image_suffix(entry.name):
                yield os.fsencode(entry.path[prefix_length:]), -1


def _check_inner(root: Path, inner: Mapping[str, set[str]]) -> tuple[str, ...]:
    """A note about folders that all class folders have.

    Raises `Refused` if these or the class folders seem to be splits.
    """
    for folder, names in inner.items():
        split_names = sorted(name for name in names if splits.get_split_kind(name))
        if len({splits.get_split_kind(name) for name in split_names}) > 1:
            first, second = split_names[:2]
            raise Refused(
                f"{root / folder}: has {first}/ and {second}/ in it, whose images would be mixed; "
                f"put parts above the classes: {root / first / folder}"
            )
    common = sorted(set.intersection(*inner.values()))
    if len(common) < 2:
        return ()
    problem = f"{', '.join(list(inner)[:3])} each have {common[0]}/ and {common[1]}/ in them"
    are_folds = all(_FOLD.fullmatch(name) for name in inner)
    if len(inner) > 1 and are_folds:
        advice = "name them train and val, or join them, to hold out a share"
        raise Refused(
            f"{root}: {problem}, so they seem to be folds, years or the like and not classes; "
            f"{advice}"
        )
    return (
        f"the classes {problem}: if those are the classes, name the folders above train and val",
    )
