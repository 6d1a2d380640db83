"""Proof of an exported model: it is scored on the validation set, and its folder gets what repeats
the comparison.
"""

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from common.data import BrokenImage
from common.durable import make_folder, replace_folder, sync_folder
from common.errors import Refused
from common.run.folder import write_json
from tools.export import formats, verify
from tools.export.verify import Session
from tools.trained import Trained

VECTORS = 10  # test vectors
_NAMED = 5  # differing images in a message
# verify.py tolerates these differences on other machines, or so many times what was measured.
_FLOOR, _SPARE = {"probabilities": 1e-4, "boxes": 1e-2, "scores": 1e-4}, 4.0

Outputs = dict[str, np.ndarray]


@dataclass
class Apart:
    """How the exported model's outputs for one image differ from the trained one's."""

    moved: dict[str, float]  # largest difference of each output
    worst: float = 0.0  # in units of what is allowed; above 1 the image differs
    words: str = ""  # about the largest difference

    @property
    def differs(self) -> bool:
        return not self.worst <= 1


@dataclass
class Verdict:
    """How the exported model compares with the trained one on the validation set."""

    figures: dict = field(default_factory=dict)  # for people and export.json
    # Of each output of the vectors, for verify.py.
    tolerance: dict[str, float] = field(default_factory=dict)
    # Name, picture uint8[1, 3, H, W], and what the trained model makes of it, without the dimension
    # of the batch.
    vectors: list[tuple[str, np.ndarray, Outputs]] = field(default_factory=list)
    refusal: str = ""  # why the exported model is not the trained one; "" if it is
    # Images that differ, with their differences, worst first.
    worst: list[str] = field(default_factory=list)


class Task:
    """A trained model, and the image by image comparison with what was exported of it: of
    classifiers or of detectors.

    `class_ids` has the model's class id of each class of `val`, the images to evaluate.
    """

    # uint8[N, 3, H, W] -> a tensor or a tuple of tensors, on the CPU and in float32.
    module: torch.nn.Module
    outputs: dict[str, str]  # names of these tensors in order, with what they are
    about: Mapping  # preprocessing, classes and so on, for export.json
    batched = False  # True if N may be more than 1: then the outputs have this dimension first
    limit = 1.0  # largest difference of a result
    most_differing = 0.0  # how many images may differ

    def __init__(self, trained: Trained, val: Any, accelerator: Any):
        self.trained = trained
        self.model, self.batches = trained.build(val, accelerator)
        self.recipe = trained.recipe
        self.val = val
        self.class_ids = val.model_classes.ids
        self.classes = trained.classes

    def picture(self, index: int) -> np.ndarray:
        """uint8[H, W, 3], as the evaluation decodes it. Raises `BrokenImage`."""
        raise NotImplementedError

    def expected(self) -> Iterator[dict | None]:
        """The trained model's outputs for each image, through the recipe's evaluation; None for one
        that is not counted.
        """
        raise NotImplementedError

    def compare(self, expected: dict, found: Outputs) -> Apart:
        raise NotImplementedError

    def count(self, index: int, expected: dict, found: Outputs | None) -> None:
        """Count an image in both results. `found`: None if it can't be read."""
        raise NotImplementedError

    def results(self) -> dict[str, tuple[float, float]]:
        """Results of the trained and of the exported model by name, once all images are counted."""
        raise NotImplementedError


def judge(task: Task, session: Session) -> Verdict:
    """Score the exported model on the validation set, and compare it image by image with the trained one."""
    count, verdict = len(task.val), Verdict()
    keep = set(np.linspace(0, count - 1, min(VECTORS, count)).astype(int).tolist())
    apart: list[tuple[Apart, str]] = []
    images = zip(range(count), task.expected(), strict=True)
    for index, expected in tqdm(images, "proof", count, unit=" images", leave=False, disable=None):
        name, found = task.val.name(index), None
        if expected is None:
            continue
        if (picture := read(task, index)) is not None:
            found = {
                key: column[0] if task.batched else column
                for key, column in session(picture).items()
            }
            if odd := [key for key, column in found.items() if not np.isfinite(column).all()]:
                raise Refused(f"{name}: {odd[0]} of the exported model are not finite numbers")
            apart.append((task.compare(expected, found), name))
            if index in keep and not apart[-1][0].differs:
                outputs = {key: expected[key] for key in task.outputs if not key.startswith("mask")}
                verdict.vectors.append((name, picture, outputs))
        task.count(index, expected, found)
    if not apart:
        raise Refused(f"none of the {count} validation images can be read")
    wrong = sorted(
        ((one, name) for one, name in apart if one.differs), key=lambda row: -row[0].worst
    )
    largest = {key: max(one.moved[key] for one, _ in apart) for key in apart[0][0].moved}
    verdict.worst = [f"{name}: {one.words}" for one, name in wrong]
    verdict.tolerance = {key: max(_FLOOR[key], _SPARE * value) for key, value in largest.items()}
    verdict.figures = {"images": len(apart), "unreadable": count - len(apart)}
    moved = []
    for key, (trained, exported) in task.results().items():
        verdict.figures |= {key: trained, f"{key}_exported": exported}
        if not abs(exported - trained) <= task.limit:
            moved.append(f"{key} is {exported:.4f} instead of {trained:.4f}")
    verdict.figures |= {"differing": len(wrong)}
    for key, value in largest.items():
        verdict.figures[
            "largest_difference" if len(largest) == 1 else f"largest_{key}_difference"
        ] = value
    if moved or len(wrong) > task.most_differing:
        verdict.refusal = "; ".join(
            [*moved, f"{len(wrong)} of {len(apart)} images differ from the trained model"]
        )
    return verdict


def read(task: Task, index: int) -> np.ndarray | None:
    """The picture uint8[1, 3, H, W]; None if it can't be read."""
    try:
        return np.ascontiguousarray(task.picture(index).transpose(2, 0, 1)[None])
    except BrokenImage:
        return None


def check_folder(folder: Path) -> Path:
    """The nearest folder above `folder` that exists. Raises `Refused` if it can't be written, or
    `folder` is no export.
    """
    there = next(parent for parent in folder.absolute().parents if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise Refused(f"--output {folder}: {there} can't be written; choose another folder")
    if folder.exists() and not (folder / "export.json").is_file():
        raise Refused(
            f"--output {folder}: is there and is no export, which would be replaced; choose "
            "another folder"
        )
    return there


def export(task: Task, name: str, folder: Path) -> dict:
    """Write the task's module in the format `name`, prove it, and describe it, in a folder that
    appears when all is done.

    Returns the content of export.json. Raises `Refused` if the exported model is not the trained
    one, and leaves nothing behind.
    """
    there = check_folder(folder)
    try:
        with tempfile.TemporaryDirectory(
            prefix=".export-", dir=there, ignore_cleanup_errors=True
        ) as place:
            draft = Path(place, "draft")
            draft.mkdir()
            about = _prove(task, name, draft)
            sync_folder(draft)
            make_folder(folder.absolute().parent)
            replace_folder(folder.absolute(), draft)
    except OSError as error:
        if str(error.filename or there).startswith(str(there)):
            raise Refused(
                f"--output {folder}: {error.strerror or error}; choose another folder"
            ) from error
        raise
    return about


def _prove(task: Task, name: str, draft: Path) -> dict:
    formats.write(name, task.module, task.batched, list(task.outputs), draft)
    written = formats.FORMATS[name]
    verdict = judge(task, verify.open_model(draft, name, written.file, list(task.outputs)))
    if verdict.refusal:
        raise Refused(
            f"--to {name}: {verdict.refusal}: {'; '.join(verdict.worst[:_NAMED])}; nothing was "
            "written"
        )
    packages = ("torch", "timm", "numpy", "pillow", *written.packages)
    images = f"uint8[{'N' if task.batched else '1'}, 3, height, width]"
    arrays: dict[str, np.ndarray] = {}
    for number, (_, picture, outputs) in enumerate(verdict.vectors):
        arrays |= {f"picture_{number}": picture}
        arrays |= {f"{output}_{number}": array for output, array in outputs.items()}
    np.savez_compressed(draft / "vectors.npz", **arrays)  # type: ignore[arg-type]
    about = {
        "format": name,
        "model": written.file,
        "input": f"images: {images}, RGB, upright, sides up to {formats.MOST_PIXELS}",
        "outputs": task.outputs,
        "batched": task.batched,
        **task.about,
        "validation": verdict.figures,
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in packages},
        },
        "tolerance": verdict.tolerance,
        "vectors": [vector[0] for vector in verdict.vectors],
        "files": {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(draft.iterdir())
        },
    }
    write_json(draft / "export.json", about)
    shutil.copyfile(verify.__file__, draft / "verify.py")
    if fault := verify.verify(draft):
        raise Refused(f"--to {name}: its own test vectors differ: {fault}; nothing was written")
    return about
