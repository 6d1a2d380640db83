"""Proof of an exported model: it is scored on the validation set, and its folder gets what repeats the comparison."""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from common.data.images import BrokenImage
from common.data.loader import DeviceBatch, evaluation_loader
from common.durable import make_folder, remove, replace_folder, sync_folder
from common.errors import Refused
from common.files import as_json
from tools.export import formats, verify
from tools.export.verify import Session

VECTORS = 10  # test vectors
_NAMED = 5  # differing images in a message


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
    shapes: Sequence[tuple[int, int, int, int]]  # of the inputs whose latency is measured

    def judge(self, session: Session) -> Verdict:
        """Score the exported model on the validation set, and compare it with the trained one through the recipe."""
        ...


@dataclass
class Picture(DeviceBatch):
    """One image of a source as it is, before any resizing."""

    pixels: torch.Tensor | None  # uint8[1, 3, H, W]; None if it can't be read
    index: int


@dataclass
class Pictures(Dataset):
    """Sample indices -> `Picture`, one at a time, for `evaluation_loader`."""

    source: Any

    def batches(self, most: int) -> list[np.ndarray]:
        return [np.array([index]) for index in range(len(self.source))]

    def __getitems__(self, indices: np.ndarray) -> Picture:
        (index,) = indices.tolist()
        try:
            image = np.asarray(self.source.image(index))
        except BrokenImage:
            return Picture(None, index)
        return Picture(torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)[None])), index)


def pictures_of(source: Any, workers: int) -> Iterator[np.ndarray | None]:
    """Each image of the source in order, uint8[1, 3, H, W], None if it can't be read; data workers decode them.

    `source` has a length and `image(index)`, RGB and upright.
    """
    for picture in evaluation_loader(Pictures(source), 1, workers):
        yield None if picture.pixels is None else picture.pixels.numpy()


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


def export(task: Task, name: str, folder: Path, seconds: float) -> dict:
    """Write the task's module in the format `name`, prove it, and describe it, in a folder that appears when all is done.

    Latency is measured for `seconds` per shape. Returns the content of export.json. Raises `Refused` if the exported model is
    not the trained one, and leaves nothing behind.
    """
    folder = folder.absolute()
    draft = folder.with_name(f".{folder.name}.tmp")
    parents = [parent for parent in folder.parents if not parent.exists()]
    try:
        make_folder(folder.parent)
        remove(draft)
        draft.mkdir()
        about = _prove(task, name, draft, seconds)
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


def _prove(task: Task, name: str, draft: Path, seconds: float) -> dict:
    formats.write(name, task.module, task.batched, list(task.outputs), draft)
    written = formats.FORMATS[name]
    session = _within(written.most_pixels, verify.open_model(draft, name, written.file, list(task.outputs)), name)
    verdict = task.judge(session)
    if verdict.refusal:
        raise Refused(f"--to {name}: {verdict.refusal}: {'; '.join(verdict.worst[:_NAMED])}; nothing was written")
    one = not task.batched or written.most_images == 1
    arrays: dict[str, np.ndarray] = {}
    for number, vector in enumerate(verdict.vectors):
        arrays |= {f"picture_{number}": vector.picture}
        arrays |= {f"{output}_{number}": array for output, array in vector.outputs.items()}
    np.savez_compressed(draft / "vectors.npz", **arrays)  # type: ignore[arg-type]
    about = {
        "format": name,
        "model": written.file,
        "input": f"images: uint8[{'1' if one else 'N'}, 3, height, width], RGB, upright, sides up to {written.most_pixels}",
        "outputs": dict(task.outputs),
        "batched": task.batched,
        **task.about,
        "validation": verdict.figures,
        "latency": [latency(session, shape, seconds) for shape in task.shapes if shape[0] == 1 or not one],
        "versions": versions(name),
        "tolerance": verdict.tolerance,
        "vectors": [vector.name for vector in verdict.vectors],
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(draft.iterdir())},
    }
    (draft / "export.json").write_text(json.dumps(as_json(about), indent=2) + "\n")
    shutil.copyfile(verify.__file__, draft / "verify.py")
    if fault := verify.verify(draft):
        raise Refused(f"--to {name}: its own test vectors differ: {fault}; nothing was written")
    return about


def _within(most: int, session: Session, name: str) -> Session:
    """The session, which refuses pictures that the format has no room for."""

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        if max(images.shape[2:]) > most:
            sides = " x ".join(map(str, images.shape[2:]))
            raise Refused(
                f"--to {name}: takes pictures of up to {most} pixels a side, and one has {sides}: take another format"
            )
        return session(images)

    return run


def table(about: Mapping, folder: Path) -> str:
    """What was written and measured, for the terminal."""
    rows = ["input             median       p99"]
    for row in about["latency"]:
        shape = " x ".join(map(str, row["shape"]))
        rows.append(f"{shape:16} {row['median_ms']:7.2f} ms {row['p99_ms']:7.2f} ms")
    figures = ", ".join(f"{key} {value:.6g}" for key, value in about["validation"].items())
    return "\n".join([f"{folder / about['model']}: {figures}", *rows, f"check it again: python {folder / 'verify.py'}"])


def latency(session: Session, shape: Sequence[int], seconds: float) -> dict:
    """Median and 99th percentile of the time of a call in milliseconds, on this machine's CPU."""
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    session(images)  # the first call allocates
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 10 or time.perf_counter() < end:
        began = time.perf_counter()
        session(images)
        times.append(1000 * (time.perf_counter() - began))
    median, slow = np.percentile(times, (50, 99))
    return {"shape": [*shape], "median_ms": float(median), "p99_ms": float(slow), "calls": len(times)}


def versions(name: str) -> dict[str, str]:
    """Of what wrote and ran the model."""
    packages = ("torch", "timm", "numpy", "pillow", *formats.FORMATS[name].packages)
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}
