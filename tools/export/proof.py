"""Proof of an exported model: it is scored on the validation set, and its folder gets what repeats the comparison."""

import contextlib
import hashlib
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from common.data import BrokenImage
from common.durable import make_folder, remove, replace_folder, sync_folder
from common.errors import Refused
from common.run.folder import write_json
from tools.export import formats, verify
from tools.export.verify import Session

VECTORS = 10  # test vectors
_NAMED = 5  # differing images in a message
_AT_ONCE = 16  # pictures in memory


@dataclass(frozen=True)
class Vector:
    """A picture and what the trained model makes of it, through the recipe's evaluation."""

    name: str
    picture: np.ndarray  # uint8[1, 3, H, W]
    outputs: Mapping[str, np.ndarray]  # without the dimension of the batch


@dataclass
class Verdict:
    """How the exported model compares with the trained one on the validation set."""

    figures: dict = field(default_factory=dict)  # for people and export.json
    tolerance: dict[str, float] = field(default_factory=dict)  # of each output of the vectors, for verify.py
    vectors: list[Vector] = field(default_factory=list)
    refusal: str = ""  # why the exported model is not the trained one; "" if it is
    worst: list[str] = field(default_factory=list)  # images that differ, with their differences, worst first


class Task(Protocol):
    """What the framework asks of classifiers and detectors."""

    module: torch.nn.Module  # uint8[N, 3, H, W] -> a tensor or a tuple of tensors, on the CPU and in float32
    outputs: Mapping[str, str]  # names of these tensors in order, with what they are
    batched: bool  # whether N may be more than 1: then the outputs have this dimension first
    about: Mapping  # preprocessing, classes and so on, for export.json

    def judge(self, session: Session) -> Verdict:
        """Score the exported model on the validation set, and compare it with the trained one through the recipe."""
        ...


def pictures_of(image: Callable[[int], Any], count: int) -> Iterator[np.ndarray | None]:
    """Each of `count` images, uint8[1, 3, H, W], None if it can't be read; `image` gives RGB and upright ones, [H, W, 3].

    They are decoded ahead, beside the model.
    """

    def read(index: int) -> np.ndarray | None:
        try:
            return np.ascontiguousarray(np.asarray(image(index)).transpose(2, 0, 1)[None])
        except BrokenImage:
            return None

    with ThreadPoolExecutor(1) as pool:
        for start in range(0, count, _AT_ONCE):
            yield from pool.map(read, range(start, min(start + _AT_ONCE, count)))


def chosen(count: int) -> set[int]:
    """The images of `count` that become test vectors."""
    return set(np.linspace(0, count - 1, min(VECTORS, count)).astype(int).tolist())


def check_folder(folder: Path) -> None:
    """Raise `Refused` if `folder` can't be written, or holds something else than an export. It need not exist."""
    parent = folder.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise Refused(f"--output {folder}: {parent} can't be written; choose another folder")
    if folder.exists() and not (folder / "export.json").is_file():
        raise Refused(f"--output {folder}: is there and is no export, which would be replaced; choose another folder")


def export(task: Task, name: str, folder: Path) -> dict:
    """Write the task's module in the format `name`, prove it, and describe it, in a folder that appears when all is done.

    Returns the content of export.json. Raises `Refused` if the exported model is not the trained one, and leaves nothing
    behind.
    """
    folder = folder.absolute()
    draft = folder.with_name(f".{folder.name}.tmp")
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        make_folder(folder.parent)
        remove(draft)
        draft.mkdir()
        about = _prove(task, name, draft)
        sync_folder(draft)
        replace_folder(folder, draft)
    except BaseException as error:
        remove(draft)
        for parent in parents:
            with contextlib.suppress(OSError):  # not empty: somebody else's
                parent.rmdir()
        if isinstance(error, OSError) and str(error.filename or folder).startswith(str(folder.parent)):
            raise Refused(f"--output {folder}: {error.strerror or error}; choose another folder") from error
        raise
    return about


def _prove(task: Task, name: str, draft: Path) -> dict:
    formats.write(name, task.module, task.batched, list(task.outputs), draft)
    written = formats.FORMATS[name]
    verdict = task.judge(verify.open_model(draft, name, written.file, list(task.outputs)))
    if verdict.refusal:
        raise Refused(f"--to {name}: {verdict.refusal}: {'; '.join(verdict.worst[:_NAMED])}; nothing was written")
    images = f"uint8[{'N' if task.batched else '1'}, 3, height, width]"
    arrays: dict[str, np.ndarray] = {}
    for number, vector in enumerate(verdict.vectors):
        arrays |= {f"picture_{number}": vector.picture}
        arrays |= {f"{output}_{number}": array for output, array in vector.outputs.items()}
    np.savez_compressed(draft / "vectors.npz", **arrays)  # type: ignore[arg-type]
    about = {
        "format": name,
        "model": written.file,
        "input": f"images: {images}, RGB, upright, sides up to {formats.MOST_PIXELS}",
        "outputs": dict(task.outputs),
        "batched": task.batched,
        **task.about,
        "validation": verdict.figures,
        "versions": versions(name),
        "tolerance": verdict.tolerance,
        "vectors": [vector.name for vector in verdict.vectors],
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(draft.iterdir())},
    }
    write_json(draft / "export.json", about)
    shutil.copyfile(verify.__file__, draft / "verify.py")
    if fault := verify.verify(draft):
        raise Refused(f"--to {name}: its own test vectors differ: {fault}; nothing was written")
    return about


def versions(name: str) -> dict[str, str]:
    """Of what wrote and ran the model."""
    packages = ("torch", "timm", "numpy", "pillow", *formats.FORMATS[name].packages)
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}
