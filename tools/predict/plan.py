"""Plan: which images are predicted, with which thresholds, and under which ids they are written."""

import argparse
import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.config.origin import find_indices, format_names
from common.durable import make_folder
from common.errors import Refused, describe_error
from common.files import MEDIUM, read_text
from common.run.progress import of_exported
from tools.predict.images import build_file_list, read_sizes
from tools.predict.listing import list_images
from tools.trained import TrainedModel

if TYPE_CHECKING:
    from common.shards import Shards  # imported late: most images lie in files

# If an evaluation has chosen none; 0.5 is what a multi-label evaluation counts with.
DETECTOR_THRESHOLD = 0.3
MULTI_LABEL_THRESHOLD = 0.5
_MAX_ANNOTATION_BYTES = 2**31


def make_plan(args: argparse.Namespace, trained: TrainedModel, shards: "Shards | None") -> dict:
    """Plan what every rank needs to know, as JSON, and `notes` for people. Raises `Refused`."""
    files: list[str] = []
    if shards:
        notes = list(shards.notes)
    else:
        files, notes = list_images(args.images)
    images = shards or build_file_list(files)
    is_multi_label = _is_multi_label(Path(trained.origin.path))
    default = 0.0
    if trained.is_detector and not args.images_of:
        default = DETECTOR_THRESHOLD
    elif is_multi_label and not args.images_of:
        default = MULTI_LABEL_THRESHOLD
    needs_sizes = trained.is_detector or trained.is_segmenter
    thresholds, source = choose_thresholds(
        trained.origin.path, trained.classes, args.threshold, default
    )
    notes.append(f"threshold: {source}")
    image_ids: list[int] = []
    category_ids: dict[str, int] = {}
    if args.images_of:
        annotations = read_coco_ids(args.images_of)
        names = [images.get_name(index) for index in range(len(images))]
        image_ids = match_images(annotations, names)
        category_ids = match_categories(annotations, trained.classes)
        num_images = len(annotations.images)
        if len(image_ids) < num_images:
            notes.append(
                f"{num_images - len(image_ids):,} of the {num_images:,} images of "
                f"{args.images_of} are not predicted"
            )
    _make_folders(draw=args.draw, masks=args.masks)
    return {
        "files": files,
        "sizes": read_sizes(images).tolist() if needs_sizes else [],
        "thresholds": thresholds.tolist(),
        "multi_label": is_multi_label,
        "image_ids": image_ids,
        "category_ids": category_ids,
        "notes": notes,
    }


def _make_folders(**folders: Path | None) -> None:
    """Make the folder of each flag that names one. Raises `Refused`."""
    for flag, folder in folders.items():
        if folder:
            try:
                make_folder(folder)
            except OSError as error:
                raise Refused(f"--{flag} {folder}: {error.strerror}; name another folder") from None


def choose_thresholds(
    weights: str, classes: Sequence[str], requested: float | None, default: float
) -> tuple[np.ndarray, str]:
    """Choose a threshold for each class: float32[classes], and a text that says where they are from.

    `requested` decides if it is given, else the evaluation. `default` is for classes for which no
    evaluation has chosen one. 0 is for all: a classifier of one label per image predicts its best
    class, and a metric over all scores wants all boxes. Raises `Refused` for a file that can't be
    read.
    """
    if requested is not None:
        return np.full(len(classes), requested, np.float32), f"{requested:g}, as asked"
    if not default:
        return np.zeros(len(classes), np.float32), "none"
    file = Path(weights) / "results.json"
    thresholds: dict[str, float] = {}
    try:
        if file.is_file():
            results = of_exported(json.loads(read_text(file, MEDIUM)))
            for name, value in (results.get("thresholds") or {}).items():
                if value is not None:
                    thresholds[str(name)] = float(value)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{file}: its thresholds can't be read ({error}); give --threshold") from None
    values = np.array([thresholds.get(name, default) for name in classes], np.float32)
    if not thresholds:
        return values, f"{default}; no evaluation has chosen one for each class"
    source = f"{values.min():.2f} to {values.max():.2f}, from {file}, or else {default}"
    return values, f"of each class, {source}"


class CocoIds(NamedTuple):
    """The ids of COCO's annotations."""

    file: str
    images: dict[str, int]  # by file name
    categories: dict[str, int]  # by name


def read_coco_ids(file: str) -> CocoIds:
    """Read the ids of the annotations `file`. Raises `Refused`."""
    try:
        content = json.loads(read_text(file, _MAX_ANNOTATION_BYTES))
        images = {str(image["file_name"]): int(image["id"]) for image in content["images"]}
        categories = {str(entry["name"]): int(entry["id"]) for entry in content["categories"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = describe_error(error)
        raise Refused(
            f"--images_of {file}: not COCO's annotations ({reason:.200}); name an instances.json"
        ) from None
    return CocoIds(file, images, categories)


def match_images(annotations: CocoIds, files: Sequence[str]) -> list[int]:
    """The image id of each of `files`, in COCO's annotations.

    A file is the image whose `file_name` is the end of its path, the longest if there are several.
    Raises `Refused` for a file that is none of the images, and for two files that are the same.
    """
    ids = []
    for path in files:
        name = _find_name(path, annotations.images)
        if name is None:
            raise Refused(
                f"{path}: is none of the {len(annotations.images):,} images of --images_of "
                f"{annotations.file}; leave it out"
            )
        ids.append(annotations.images[name])
    if len(set(ids)) < len(ids):
        raise Refused(
            f"--images_of {annotations.file}: several files are the same image of it; name each "
            "image once"
        )
    return ids


def _find_name(path: str, names: Container[str]) -> str | None:
    """Find the longest end of a path that is one of `names`."""
    if path in names:
        return path
    parts = Path(path).absolute().parts
    for start in range(len(parts)):
        name = "/".join(parts[start:])
        if name in names:
            return name
    return None


def match_categories(annotations: CocoIds, classes: Sequence[str]) -> dict[str, int]:
    """The category id of each class, in COCO's annotations. Raises `Refused` if one is missing."""
    names = list(annotations.categories)
    category_ids = {}
    missing = []
    for class_name, index in zip(classes, find_indices(classes, names), strict=True):
        if index is None:
            missing.append(class_name)
        else:
            category_ids[class_name] = annotations.categories[names[index]]
    if missing:
        raise Refused(
            f"--images_of {annotations.file}: has no category {format_names(missing)}, which the model "
            f"knows; it has {format_names(names)}"
        )
    return category_ids


def _is_multi_label(folder: Path) -> bool:
    """True if the weights were trained on images with several labels each."""
    if (folder / "record.json").is_file():  # a checkpoint
        record = json.loads(read_text(folder / "record.json", MEDIUM))
        return "eval/exact_match" in record["ledger"]["last"]
    file = folder / "config.json"
    if not file.is_file():
        return False
    config = json.loads(read_text(file, MEDIUM))
    return config.get("problem_type") == "multi_label_classification"
