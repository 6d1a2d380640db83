"""Evaluation of the models to compare on the same images, image by image; kept in a folder, so that it is done once."""

import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.config.parsing import identity
from common.data import splits
from common.detection.evaluation.metrics import Detections
from common.detection.models.detectors import Matched
from common.distributed.collectives import broadcast_object, gather_to_main, is_main
from common.durable import make_folder, replace_file
from common.errors import Refused
from common.files import read_bytes
from common.run import eval_only
from tools.compare.average_precision import AveragePrecision
from tools.compare.bootstrap import Measure
from tools.trained import Trained, load

_BOXES = ("boxes", "scores", "labels")  # of a detection; masks are not compared
_LARGEST = 2**32  # bytes of a file of predictions


@dataclass(frozen=True)
class Candidate:
    """A run's model and the images to evaluate it on."""

    path: Path
    trained: Trained
    val: Any
    places: Sequence[int]  # the model's class id of each class of the data

    @property
    def part(self) -> str:
        return splits.describe(self.trained.config.data, self.val)

    @cached_property
    def key(self) -> str:
        """Names the predictions: those of the same weights, settings, source, precision and images."""
        files = sorted(file for file in Path(self.trained.origin.path).iterdir() if file.is_file())
        told = {
            "weights": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
            "source": hashlib.sha256(Path(str(self.trained.recipe.__file__)).read_bytes()).hexdigest(),
            "config": {key: value for key, value in identity(self.trained.config).items() if key != "eval_only"},
            "data": self.val.fingerprint,
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def find(runs: Sequence[Path], flags: Sequence[str]) -> list[Candidate]:
    """The models of the runs with their validation images. Raises `Refused` unless these are the same images for all."""
    found: list[Candidate] = []
    for path in runs:
        trained = load(str(path), flags, reads_data=True)
        val, _, places = eval_only.read(trained.config, trained.origin, trained.recipe.build_data)
        found.append(Candidate(path, trained, val, places))
        first, here = found[0], found[-1]
        if here.trained.is_detector != first.trained.is_detector:
            raise Refused(f"{first.path} and {path}: a classifier and a detector have no result in common")
        if here.val.fingerprint != first.val.fingerprint:
            raise Refused(
                f"{first.path} and {path}: would be evaluated on different images or labels ({first.part}; {here.part}): "
                "name the same for all, by --data FOLDER and --split PART"
            )
    return found


def measure(candidate: Candidate, accelerator, kept: Path | None) -> "Predictions | None":
    """The predictions for every image, on the main process; None on the others. A collective.

    `kept` is a folder of earlier predictions; those of the same model and images are read from there.
    """
    file = kept / f"{candidate.path.resolve().name}-{candidate.key}.npz" if kept else None
    arrays = _read(file) if file and is_main() else None
    if broadcast_object(arrays is not None):
        return Predictions(candidate, arrays) if arrays is not None else None
    arrays = _detect(candidate, accelerator) if candidate.trained.is_detector else _classify(candidate, accelerator)
    if arrays is None:
        return None
    if file:
        _write(file, arrays)
    return Predictions(candidate, arrays)


@dataclass(frozen=True)
class Predictions:
    """What one model predicts for each of N images, and the result that its run was chosen by."""

    candidate: Candidate
    arrays: dict[str, np.ndarray]

    @property
    def metric(self) -> str:
        """The key of the result: AP, f1, or top1."""
        return "AP" if self.candidate.trained.is_detector else "f1" if self.candidate.val.multi_label else "top1"

    @cached_property
    def result(self) -> Measure:
        """The result as a function of how often each image counts, [R, N] -> [R]."""
        if self.metric == "AP":
            return AveragePrecision(self.candidate.val, self.arrays["images"], self.arrays["rows"])
        counts = self.arrays["counts"].astype(np.float64)
        if self.metric == "top1":
            return lambda weights: weights @ counts[:, 0] / weights.sum(1)

        def f1(weights: np.ndarray) -> np.ndarray:
            right, wrong = (weights @ counts[:, column] for column in (0, 1))
            return 2 * right / np.maximum(2 * right + wrong, 1e-12)

        return f1

    @property
    def right(self) -> np.ndarray | None:
        """bool[N]: whether an image has its one class; None for other tasks."""
        return self.arrays["counts"][:, 0] > 0 if self.metric == "top1" else None


def _classify(candidate: Candidate, accelerator) -> dict[str, np.ndarray] | None:
    """`counts` int64[N, 2]: right and wrong decisions; with one class per image, 1 and 0 or 0 and 1."""
    val, (model, normalize, loader) = candidate.val, candidate.trained.build(candidate.val, accelerator.device)
    model, _ = eval_only.match(model, val, candidate.trained.classes, candidate.places)
    positions, counts = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
    for batch, logits in candidate.trained.recipe.predict(model, loader, accelerator, normalize):
        if val.multi_label:  # as `ClassificationCounts` counts
            found, true = (logits > 0) & batch.readable[:, None], batch.labels.bool()
            decisions = torch.stack([(found & true).sum(1), (found ^ true).sum(1)], 1)
        else:
            right = (logits.argmax(1) == batch.labels) & batch.readable & ~logits.isnan().any(1)
            decisions = torch.stack([right, ~right], 1).long()
        positions.append(batch.positions.cpu().numpy())
        counts.append(decisions.cpu().numpy())
    gathered = gather_to_main([np.concatenate(positions), np.concatenate(counts)])
    if gathered is None:
        return None
    places, rows = (np.concatenate(column) for column in zip(*gathered, strict=True))
    places, first = np.unique(places, return_index=True)
    if len(places) != len(val):
        raise RuntimeError(f"evaluated {len(places)} images of {len(val)}: each must count exactly once")
    return {"counts": rows[first]}


def _detect(candidate: Candidate, accelerator) -> dict[str, np.ndarray] | None:
    """`images` int64[n] and `rows` float32[n, 6]: the detections, see `Detections.columns`."""
    model, normalize, loader = candidate.trained.build(candidate.val, accelerator.device)
    found = Detections()
    for batch, detections in candidate.trained.recipe.predict(
        Matched(model, candidate.places), loader, accelerator, normalize
    ):
        found.update(batch.positions.tolist(), [{key: one[key] for key in _BOXES} for one in detections])
    results = found.results(candidate.val)
    if results["count"] != len(candidate.val):
        raise RuntimeError(f"evaluated {results['count']} images of {len(candidate.val)}: each must count exactly once")
    return dict(zip(("images", "rows"), found.columns(), strict=True)) if is_main() else None


def _read(file: Path) -> dict[str, np.ndarray] | None:
    """Predictions that were kept; None if there are none, or the file is damaged."""
    try:
        with np.load(io.BytesIO(read_bytes(file, _LARGEST)), allow_pickle=False) as found:
            return dict(found)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None


def _write(file: Path, arrays: dict[str, np.ndarray]) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    with writing(file.parent):
        make_folder(file.parent)
        replace_file(file, content.getvalue())


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a failure to write below `folder` into `Refused`."""
    try:
        yield
    except OSError as error:
        raise Refused(f"--output {folder} can't be written ({error.strerror or error}): name another folder") from error
