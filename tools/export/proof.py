"""Proof of an exported model: it is scored on the validation set, and compared image by image.

Its folder gets what repeats the comparison.
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
from common.errors import Refused, get_os_reason
from common.run.folder import write_json
from tools.export import formats, verify
from tools.export.verify import Session
from tools.trained import TrainedModel

NUM_VECTORS = 10  # test vectors
_NUM_NAMED = 5  # differing images in a message
# verify.py tolerates these differences on other machines, or so many times what was measured.
_MIN_TOLERANCES = {"probabilities": 1e-4, "boxes": 1e-2, "scores": 1e-4, "ids": 1e-3}
_TOLERANCE_FACTOR = 4.0

Outputs = dict[str, np.ndarray]


@dataclass
class ImageDifference:
    """How the exported model's outputs for one image differ from the trained one's."""

    largest: dict[str, float]  # largest difference of each output
    worst: float = 0.0  # in units of what is allowed; above 1 the image differs
    text: str = ""  # about the largest difference

    @property
    def is_too_large(self) -> bool:
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
    """A trained model, and the image by image comparison with what was exported of it.

    One class is for classifiers, another for detectors. `class_ids` has the model's class id of
    each class of `val`, the images to evaluate.
    """

    # uint8[N, 3, H, W] -> a tensor or a tuple of tensors, on the CPU and in float32.
    module: torch.nn.Module
    outputs: dict[str, str]  # names of these tensors in order, with what they are
    about: Mapping  # preprocessing, classes and so on, for export.json
    batched = False  # True if N may be more than 1: then the outputs have this dimension first
    limit = 1.0  # largest difference of a result
    max_differing = 0.0  # how many images may differ

    def __init__(self, trained: TrainedModel, val: Any, accelerator: Any):
        self.trained = trained
        self.model, self.batches = trained.build(val, accelerator)
        self.recipe = trained.recipe
        self.val = val
        self.class_ids = val.model_classes.ids
        self.classes = trained.classes

    def read_picture(self, index: int) -> np.ndarray:
        """uint8[H, W, 3], as the evaluation decodes it. Raises `BrokenImage`."""
        raise NotImplementedError

    def predict(self) -> Iterator[dict | None]:
        """Yield the trained model's outputs for each image, through the recipe's evaluation.

        None for an image that is not counted.
        """
        raise NotImplementedError

    def compare(self, expected: dict, outputs: Outputs) -> ImageDifference:
        """Compare the exported model's outputs for an image with the trained model's."""
        raise NotImplementedError

    def record(self, index: int, expected: dict, outputs: Outputs | None) -> None:
        """Count an image in both results; `outputs` is None if it can't be read."""
        raise NotImplementedError

    def compute_results(self) -> dict[str, tuple[float, float]]:
        """Results of the trained and of the exported model by name, once all images are recorded."""
        raise NotImplementedError


def evaluate(task: Task, session: Session) -> Verdict:
    """Score the exported model on the validation set, and compare each image with the trained model.

    Raises `Refused` if outputs are not finite, or no image can be read.
    """
    num_images = len(task.val)
    verdict = Verdict()
    num_vectors = min(NUM_VECTORS, num_images)
    vector_indices = set(np.linspace(0, num_images - 1, num_vectors).astype(int).tolist())
    differences: list[tuple[ImageDifference, str]] = []
    images = zip(range(num_images), task.predict(), strict=True)
    for index, expected in tqdm(
        images, "proof", num_images, unit=" images", leave=False, disable=None
    ):
        if expected is None:
            continue
        name = task.val.get_name(index)
        outputs = None
        picture = read_input(task, index)
        if picture is not None:
            outputs = run_session(session, picture, task.batched)
            _check_finite(outputs, name)
            difference = task.compare(expected, outputs)
            differences.append((difference, name))
            if index in vector_indices and not difference.is_too_large:
                vector = {key: expected[key] for key in task.outputs if not key.startswith("mask")}
                verdict.vectors.append((name, picture, vector))
        task.record(index, expected, outputs)
    if not differences:
        raise Refused(f"none of the {num_images} validation images can be read")
    _judge(verdict, task, differences)
    return verdict


def run_session(session: Session, picture: np.ndarray, batched: bool) -> Outputs:
    """The outputs for one picture uint8[1, 3, H, W], without the dimension of the batch."""
    outputs = session(picture)
    if batched:
        return {key: column[0] for key, column in outputs.items()}
    return outputs


def _check_finite(outputs: Outputs, name: str) -> None:
    for key, column in outputs.items():
        if not np.isfinite(column).all():
            raise Refused(f"{name}: {key} of the exported model are not finite numbers")


def _judge(verdict: Verdict, task: Task, differences: list[tuple[ImageDifference, str]]) -> None:
    """Fill in the figures, the tolerances, the worst images and the refusal."""
    differing = [pair for pair in differences if pair[0].is_too_large]
    for difference, name in sorted(differing, key=lambda pair: -pair[0].worst):
        verdict.worst.append(f"{name}: {difference.text}")
    num_read = len(differences)
    verdict.figures = {"images": num_read, "unreadable": len(task.val) - num_read}
    reasons = []
    for key, (trained, exported) in task.compute_results().items():
        verdict.figures |= {key: trained, f"{key}_exported": exported}
        if not abs(exported - trained) <= task.limit:
            reasons.append(f"{key} is {exported:.4f} instead of {trained:.4f}")
    verdict.figures["differing"] = len(differing)
    keys = list(differences[0][0].largest)
    for key in keys:
        largest = max(difference.largest[key] for difference, _ in differences)
        verdict.tolerance[key] = max(_MIN_TOLERANCES[key], _TOLERANCE_FACTOR * largest)
        figure = "largest_difference" if len(keys) == 1 else f"largest_{key}_difference"
        verdict.figures[figure] = largest
    if reasons or len(differing) > task.max_differing:
        reasons.append(f"{len(differing)} of {num_read} images differ from the trained model")
        verdict.refusal = "; ".join(reasons)


def read_input(task: Task, index: int) -> np.ndarray | None:
    """Read the picture uint8[1, 3, H, W]; None if it can't be read."""
    try:
        return np.ascontiguousarray(task.read_picture(index).transpose(2, 0, 1)[None])
    except BrokenImage:
        return None


def check_folder(folder: Path) -> Path:
    """Find the nearest folder above `folder` that exists.

    Raises `Refused` if it can't be written, or `folder` is no export.
    """
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise Refused(f"--output {folder}: {existing} can't be written; choose another folder")
    if folder.exists() and not (folder / "export.json").is_file():
        raise Refused(
            f"--output {folder}: is there and is no export, which would be replaced; choose "
            "another folder"
        )
    return existing


def export(task: Task, name: str, folder: Path) -> dict:
    """Write the task's module in the format `name`, prove it, and describe it in `folder`.

    The folder appears when all is done. Returns the content of export.json. Raises `Refused` if the
    exported model is not the trained one, and leaves nothing behind.
    """
    existing = check_folder(folder)
    try:
        with tempfile.TemporaryDirectory(
            prefix=".export-", dir=existing, ignore_cleanup_errors=True
        ) as scratch:
            draft = Path(scratch, "draft")
            draft.mkdir()
            about = _prove(task, name, draft)
            sync_folder(draft)
            make_folder(folder.absolute().parent)
            replace_folder(folder.absolute(), draft)
    except OSError as error:
        if str(error.filename or existing).startswith(str(existing)):
            raise Refused(
                f"--output {folder}: {get_os_reason(error)}; choose another folder"
            ) from error
        raise
    return about


def _prove(task: Task, name: str, draft: Path) -> dict:
    formats.write(name, task.module, task.batched, list(task.outputs), draft)
    written = formats.FORMATS[name]
    session = verify.open_model(draft, name, written.file, list(task.outputs))
    verdict = evaluate(task, session)
    if verdict.refusal:
        worst = "; ".join(verdict.worst[:_NUM_NAMED])
        raise Refused(f"--to {name}: {verdict.refusal}: {worst}; nothing was written")
    _write_vectors(verdict, draft / "vectors.npz")
    about = _describe(task, name, verdict, draft)
    write_json(draft / "export.json", about)
    shutil.copyfile(verify.__file__, draft / "verify.py")
    fault = verify.find_fault(draft)
    if fault:
        raise Refused(f"--to {name}: its own test vectors differ: {fault}; nothing was written")
    return about


def _write_vectors(verdict: Verdict, file: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    for i, (_, picture, outputs) in enumerate(verdict.vectors):
        arrays[f"picture_{i}"] = picture
        for output, array in outputs.items():
            arrays[f"{output}_{i}"] = array
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _describe(task: Task, name: str, verdict: Verdict, draft: Path) -> dict:
    """The content of export.json, with the hashes of the files that are in the folder `draft`."""
    written = formats.FORMATS[name]
    batch = "N" if task.batched else "1"
    versions = {"python": platform.python_version()}
    for package in ("torch", "timm", "numpy", "pillow", *written.packages):
        versions[package] = version(package)
    digests = {}
    for file in sorted(draft.iterdir()):
        digests[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return {
        "format": name,
        "model": written.file,
        "input": (
            f"images: uint8[{batch}, 3, height, width], RGB, upright, sides up to "
            f"{formats.MAX_PIXELS}"
        ),
        "outputs": task.outputs,
        "batched": task.batched,
        **task.about,
        "validation": verdict.figures,
        "versions": versions,
        "tolerance": verdict.tolerance,
        "vectors": [vector[0] for vector in verdict.vectors],
        "files": digests,
    }
