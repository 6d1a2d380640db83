"""Plan: which images are predicted, with which thresholds, and under which ids they are written."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common.config.origin import find_indices, format_names
from common.durable import make_folder
from common.errors import Refused, describe_error
from common.files import MEDIUM, read_text
from common.run.progress import of_exported
from tools.predict.images import file_list, sizes_of
from tools.predict.listing import listing
from tools.trained import Trained

if TYPE_CHECKING:
    from common.shards import Shards  # imported late: most images lie in files

# If an evaluation has chosen none; 0.5 is what a multi-label evaluation counts with.
OF_BOXES, OF_LABELS = 0.3, 0.5
_MOST = 2**31  # bytes of an annotation file


def make_plan(words: argparse.Namespace, trained: Trained, shards: "Shards | None") -> dict:
    """What every rank needs to know, as JSON, and `notes` for people. Raises `Refused`."""
    files, notes = ([], [*shards.notes]) if shards else listing(words.images)
    images = shards or file_list(files)
    several = _is_multi_label(Path(trained.origin.path))
    has_none = bool(words.images_of) or not (trained.is_detector or several)
    default = OF_BOXES if trained.is_detector else OF_LABELS
    thresholds, said = choose(
        trained.origin.path, trained.classes, words.threshold, 0.0 if has_none else default
    )
    notes.append(f"threshold: {said}")
    image_ids: list[int] = []
    category_ids: dict[str, int] = {}
    if words.images_of:
        image_ids, category_ids, more = ids_of(
            words.images_of, [*map(images.name, range(len(images)))], trained.classes
        )
        notes += more
    if words.draw:
        try:
            make_folder(words.draw)
        except OSError as error:
            raise Refused(f"--draw {words.draw}: {error.strerror}; name another folder") from None
    return {
        "files": files,
        "sizes": sizes_of(images).tolist() if trained.is_detector else [],
        "thresholds": thresholds.tolist(),
        "multi_label": several,
        "image_ids": image_ids,
        "category_ids": category_ids,
        "notes": notes,
    }


def choose(
    weights: str, classes: Sequence[str], asked: float | None, default: float
) -> tuple[np.ndarray, str]:
    """float32[classes], and the words that say where they are from; `asked` decides if it is given.

    `default`: for classes for which no evaluation has chosen one. 0 is for all: a classifier of one
    label per image predicts its best class, and a metric over all scores wants all boxes. Raises
    `Refused` for a file that can't be read.
    """
    if asked is not None or not default:
        return np.full(
            len(classes), asked or 0, np.float32
        ), "none" if asked is None else f"{asked:g}, as asked"
    file, found = Path(weights) / "results.json", dict[str, float]()
    try:
        if file.is_file():
            content: dict = of_exported(json.loads(read_text(file, MEDIUM))).get("thresholds") or {}
            found = {
                str(name): float(value) for name, value in content.items() if value is not None
            }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(f"{file}: its thresholds can't be read ({error}); give --threshold") from None
    values = np.array([found.get(name, default) for name in classes], np.float32)
    if not found:
        return values, f"{default}; no evaluation has chosen one for each class"
    return (
        values,
        f"of each class, {values.min():.2f} to {values.max():.2f}, from {file}, or else {default}",
    )


def ids_of(
    file: str, files: Sequence[str], classes: Sequence[str]
) -> tuple[list[int], dict[str, int], list[str]]:
    """The image id of each of `files`, and the category id of each class, in COCO's annotations
    `file`; and notes.

    A file is the image whose `file_name` is the end of its path, the longest if there are several.
    Raises `Refused` for a file that is none of the images, and for a class that the annotations do
    not have.
    """
    try:
        content = json.loads(read_text(file, _MOST))
        numbers = {str(image["file_name"]): int(image["id"]) for image in content["images"]}
        categories = {
            str(category["name"]): int(category["id"]) for category in content["categories"]
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = describe_error(error)
        raise Refused(
            f"--images_of {file}: not COCO's annotations ({reason:.200}); name an instances.json"
        ) from None
    ids = []
    for path in files:
        parts = Path(path).absolute().parts
        ends = ("/".join(parts[start:]) for start in range(len(parts)))
        number = next((numbers[end] for end in (path, *ends) if end in numbers), None)
        if number is None:
            raise Refused(
                f"{path}: is none of the {len(numbers):,} images of --images_of {file}; leave it "
                "out"
            )
        ids.append(number)
    if len(set(ids)) < len(ids):
        raise Refused(
            f"--images_of {file}: several files are the same image of it; name each image once"
        )
    places = find_indices(classes, [*categories])
    if unknown := [name for name, place in zip(classes, places, strict=True) if place is None]:
        raise Refused(
            f"--images_of {file}: has no category {format_names(unknown)}, which the model knows; it has "
            f"{format_names([*categories])}"
        )
    numbers_of = [*categories.values()]
    found = {
        name: numbers_of[place]
        for name, place in zip(classes, places, strict=True)
        if place is not None
    }
    notes = [
        f"{len(numbers) - len(ids):,} of the {len(numbers):,} images of {file} are not predicted"
    ]
    return ids, found, notes if len(ids) < len(numbers) else []


def _is_multi_label(folder: Path) -> bool:
    """True if the weights were trained on images with several labels each."""
    if (folder / "record.json").is_file():  # a checkpoint
        return (
            "eval/exact_match"
            in json.loads(read_text(folder / "record.json", MEDIUM))["ledger"]["last"]
        )
    file = folder / "config.json"
    return (
        file.is_file()
        and json.loads(read_text(file, MEDIUM)).get("problem_type") == "multi_label_classification"
    )
