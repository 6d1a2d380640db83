"""Folders of images and masks: which file is the mask of which image, and the names of the classes."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.data.images import has_image_suffix
from common.data.notes import Notes
from common.data.source import Files, encode_paths
from common.data.splits import get_split_kind
from common.errors import Refused, describe_error
from common.files import MEDIUM, get_file_sizes, read_text, walk
from common.segmentation.masks import IGNORED
from common.segmentation.source import MaskedImages

_IMAGE_FOLDERS = ("images", "imgs", "image", "img")
_MASK_FOLDERS = ("masks", "annotations", "mask", "labels", "SegmentationClass")
_CLASS_FILES = ("classes.txt", "classes.json", "objectInfo150.txt")  # the last is ADE20K's
_NUM_NAMED = 3  # files in a message
# Everingham et al., "The Pascal Visual Object Classes Challenge", 2010.
_VOC_CLASSES = (
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse "
    "motorbike person pottedplant sheep sofa train tvmonitor"
).split()
# Cordts et al., "The Cityscapes Dataset", 2016: the classes that are evaluated, and their ids.
_CITYSCAPES_IDS = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}


@dataclass(frozen=True)
class Split:
    """Where the files of a split of the data are."""

    images: Path
    masks: Path
    image_ending: str = (
        ""  # what follows the common name of an image and its mask, before the suffix
    )
    mask_ending: str = ""
    stems: tuple[str, ...] | None = None  # names of the images; None for all
    list_file: Path | None = None  # that has them


@dataclass(frozen=True)
class MaskFolder:
    """A folder in a known layout."""

    splits: dict[str, Split]
    classes: tuple[str, ...]
    id_map: tuple[int, ...] = ()  # see `MaskedImages`


def find_folder(root: Path) -> MaskFolder | None:
    """The layout of `root`; None if it is no folder of images and masks. Raises `Refused`.

    It is Cityscapes' (leftImg8bit/ and gtFine/), Pascal VOC's (JPEGImages/, SegmentationClass/ and
    ImageSets/Segmentation/), or images/ and masks/ (or annotations/), with train/ and val/ below or
    above them, or without.
    """
    return _find_cityscapes(root) or _find_voc(root) or _find_pairs(root)


def _find_cityscapes(root: Path) -> MaskFolder | None:
    images = root / "leftImg8bit"
    masks = root / "gtFine"
    if not (images.is_dir() and masks.is_dir()):
        return None
    splits = {}
    for folder in sorted(images.iterdir()):
        if folder.is_dir():
            splits[folder.name] = Split(
                folder, masks / folder.name, "_leftImg8bit", "_gtFine_labelIds"
            )
    class_ids = {number: i for i, number in enumerate(_CITYSCAPES_IDS.values())}
    id_map = tuple(class_ids.get(number, IGNORED) for number in range(35))
    return MaskFolder(splits, tuple(_CITYSCAPES_IDS), id_map)


def _find_voc(root: Path) -> MaskFolder | None:
    images = root / "JPEGImages"
    masks = root / "SegmentationClass"
    if not (images.is_dir() and masks.is_dir()):
        return None
    splits = {}
    for file in sorted((root / "ImageSets/Segmentation").glob("*.txt")):
        if get_split_kind(file.stem):
            stems = tuple(read_text(file, MEDIUM).split())
            splits[file.stem] = Split(images, masks, stems=stems, list_file=file)
    if not splits:
        # Only some of VOC's images have masks.
        stems = tuple(sorted(file.stem for file in masks.glob("*.png")))
        splits = {"train": Split(images, masks, stems=stems)}
    return MaskFolder(splits, read_class_names(root, _VOC_CLASSES))


def _find_pairs(root: Path) -> MaskFolder | None:
    images = _find_subfolder(root, _IMAGE_FOLDERS)
    masks = _find_subfolder(root, _MASK_FOLDERS)
    splits = {}
    if images and masks:
        names = sorted(folder.name for folder in images.iterdir() if folder.is_dir())
        for name in names:
            if get_split_kind(name) and (masks / name).is_dir():
                splits[name] = Split(images / name, masks / name)
        if not splits:
            splits = {"train": Split(images, masks)}
    else:
        for folder in sorted(path for path in root.glob("*/") if get_split_kind(path.name)):
            images = _find_subfolder(folder, _IMAGE_FOLDERS)
            masks = _find_subfolder(folder, _MASK_FOLDERS)
            if images and masks:
                splits[folder.name] = Split(images, masks)
    if not splits:
        return None
    return MaskFolder(splits, read_class_names(root))


def _find_subfolder(root: Path, names: Sequence[str]) -> Path | None:
    for name in names:
        if (root / name).is_dir():
            return root / name
    return None


def read_class_names(root: Path, default: Sequence[str] = ()) -> tuple[str, ...]:
    """Names by class id from a file, or from the first of `_CLASS_FILES` in a folder, or else `default`.

    Raises `Refused`, also without any name.
    """
    files = [root] + [root / name for name in _CLASS_FILES]
    file = next((file for file in files if file.is_file()), None)
    names = list(default)
    if file and file.suffix == ".json":
        names = _read_json_names(file)
    elif file:
        lines = read_text(file, MEDIUM).splitlines()
        if file.name == _CLASS_FILES[-1]:  # a head, then index, shares of images, and synonyms
            lines = [line.split("\t")[-1].split(",")[0] for line in lines[1:]]
        names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise Refused(
            f"{root}: the classes of the masks have no names; write classes.txt there, a name per line "
            "in the order of the ids (or classes.json, a list); for a table, --class_names FILE will "
            "do, too"
        )
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise Refused(f"{root}: two classes have the name {min(repeated)}; give each its own")
    return tuple(names)


def _read_json_names(file: Path) -> list[str]:
    """The names in a list, or in an object of names by id. Raises `Refused`."""
    try:
        content = json.loads(read_text(file, MEDIUM))
        if isinstance(content, dict):
            names_by_id = {int(key): name for key, name in content.items()}
            content = [names_by_id[class_id] for class_id in range(len(names_by_id))]
        return [str(name) for name in content]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(
            f"{file}: must be a list of names, or an object of names by id from 0 "
            f"({describe_error(error)})"
        ) from None


def read_split(folder: MaskFolder, name: str, ignore_zero: bool) -> MaskedImages:
    """The images of a split with their masks. Raises `Refused` if an image has no mask."""
    split = folder.splits[name]
    image_by_stem = _list_files(split.images, split.image_ending)
    mask_by_stem = _list_files(split.masks, split.mask_ending)
    stems = list(image_by_stem) if split.stems is None else list(split.stems)
    if not stems:
        raise Refused(f"{split.images}: no images in it; add some (jpg, png, ...)")
    for files, kind, place in (
        (image_by_stem, "image", split.images),
        (mask_by_stem, "mask", split.masks),
    ):
        missing = [stem for stem in stems if stem not in files]
        if missing:
            examples = ", ".join(list(files)[:_NUM_NAMED])
            raise Refused(
                f"{place}: {len(missing):,} of {len(stems):,} images have no {kind} there, first "
                f"{missing[0]}; it has the same name, with another suffix (there are "
                f"{examples or 'none'}): add it, or take the image out"
            )
    unused = [stem for stem in mask_by_stem if stem not in image_by_stem]
    notes = Notes(str(split.masks), "masks")
    if unused:
        notes.leave_out("no image has their name", unused[0], len(unused))
    return MaskedImages(
        images=_build_files(split.images, [image_by_stem[stem] for stem in stems]),
        masks=_build_files(split.masks, [mask_by_stem[stem] for stem in stems]),
        classes=folder.classes,
        ignore_zero=ignore_zero,
        id_map=folder.id_map,
        notes=notes.format_lines(len(mask_by_stem)),
    )


def _list_files(root: Path, ending: str) -> dict[str, str]:
    """The image files below `root` by their names without `ending` and suffix; both are paths below
    `root`. Raises `Refused` if two have the same name.
    """
    paths: dict[str, str] = {}
    for folder, entries in walk(root):
        for entry in entries:
            stem, _ = os.path.splitext(os.path.relpath(entry.path, root))
            if not (has_image_suffix(entry.name) and entry.is_file() and stem.endswith(ending)):
                continue
            stem = stem.removesuffix(ending)
            path = os.path.relpath(entry.path, root)
            if stem in paths:
                raise Refused(f"{folder}: {paths[stem]} and {path} have the same name; keep one")
            paths[stem] = path
    return paths


def _build_files(root: Path, paths: Sequence[str]) -> Files:
    sizes = np.array(get_file_sizes(str(root / path) for path in paths), np.int64)
    no_labels = np.zeros(len(paths), np.int64)
    return Files(str(root), encode_paths(paths), sizes, labels=no_labels, classes=())
