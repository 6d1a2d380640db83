"""Beginning with trained weights: all tensors, and of the class heads the rows of known classes."""

from collections.abc import Sequence
from typing import Any

from common.detection.class_map import parse_class_map
from common.detection.export import describe
from common.detection.models.class_rows import class_rows, take_classes
from common.detection.models.detectors import FAMILIES, Detector
from common.detection.models.one_stage import FCOS
from common.detection.weights.sources import read
from common.detection.weights.weights import Weights
from common.distributed.collectives import main_process_first
from common.errors import Refused
from common.training.timm_models import begins_with

# Settings that weights and detector must have in common, beside the model.
_DECIDED = ("detector", "levels", "width", "convolutions", "variant")


def read_once(source: str) -> Weights:
    """The weights of a source. A collective: one process of each machine downloads them first."""
    with main_process_first(f"reading {source}"):
        return read(source)


def begin_with(detector: Detector, weights: Weights, config: Any, names: Sequence[str]) -> str:
    """Load `weights` into `detector`, which `config` describes, for classes of these `names`.

    The heads keep the rows of classes with the same names; the other rows are new. If the weights name no
    classes, as many are taken to be the same in the same order. Images are normalised as they were for the
    weights. Returns in words which weights were loaded. Raises `Refused` for another architecture.
    """
    there = {name: weights.settings[name] for name in _DECIDED if name in weights.settings}
    here = {name: getattr(config, name) for name in there}
    if config.detector == there["detector"] in FAMILIES:
        there["model"], here["model"] = weights.settings["model"], describe(detector)["model"]
    others = [f"--{name} {there[name]} there, {here[name]} here" for name in there if there[name] != here[name]]
    if others:
        raise Refused(f"{weights.source} is of another detector: {'; '.join(others)}; leave these flags out")
    # Of --eval_only, `names` are the weights' own; those of the data are matched with them elsewhere.
    called = {} if config.eval_only else parse_class_map(config.init_classes, names)
    first = list(weights.row_names[: weights.has_background])
    rows: list[str] = first + [called.get(name, name) for name in names]
    known: Sequence[str] = weights.row_names
    # torchvision counts classes from 1, so that row 0 may be no class's.
    if weights.is_unnamed and 0 <= (extra := len(known) - len(rows)) <= (not first):
        known = [*known[:extra], *rows]
    mine, theirs = detector.state_dict(), weights.tensors
    head, trained = class_rows(mine, len(rows)), theirs | class_rows(theirs, len(known))
    differing = sorted(mine.keys() ^ theirs.keys())
    for name, tensor in (mine | head).items():
        other, start = trained.get(name, tensor), int(name in head)  # numbers of rows may differ
        if tensor.shape[start:] != other.shape[start:] or tensor.is_floating_point() != other.is_floating_point():
            differing.append(name)
    if differing:
        raise Refused(
            f"{weights.source} is of another detector: {len(differing)} tensors differ, first {differing[0]}; it fits "
            f"{' '.join(f'--{flag} {value}' for flag, value in weights.settings.items() if flag in (*_DECIDED, 'model'))}"
        )
    if odd := [name for name, tensor in theirs.items() if not tensor.isfinite().all()]:
        raise Refused(
            f"{weights.source}: {odd[0]} has numbers that are not finite; copy it again, or take other weights"
        )
    new = [names[row - len(first)] for row in take_classes(mine, theirs, rows, known)]
    detector.pretrained_cfg = detector.pretrained_cfg | {"mean": weights.mean, "std": weights.std}
    if new and config.eval_only:
        raise Refused(
            f"{weights.source} has {len(known)} classes without names, the data have {len(names)}: evaluate it on data of its "
            "own classes"
        )
    if config.eval_only and isinstance(detector, FCOS) and weights.score_threshold is not None:
        detector.score_threshold = weights.score_threshold  # their authors' results are with it
    said = begins_with(len(mine) - len(head) * bool(new), len(mine), weights.source, new, names)
    unnamed = ", its classes in this order, which it does not name" if weights.is_unnamed and not new else ""
    return "".join([said, unnamed, *weights.notes])
