"""Beginning with trained weights: all tensors, and of the class heads the rows of known classes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from common.detection.class_map import parse_class_map
from common.detection.export import describe
from common.detection.models.class_rows import class_rows, take_classes
from common.detection.models.detectors import FAMILIES, Detector
from common.detection.models.one_stage import FCOS
from common.detection.weights.sources import read
from common.detection.weights.weights import Weights
from common.distributed.collectives import main_process_first
from common.errors import Refused
from common.training.timm_models import format_loaded

# Settings that weights and detector must have in common, beside the model.
_DECIDED = ("detector", "levels", "width", "convolutions", "variant")


def read_once(source: str) -> Weights:
    """The weights of a source. A collective: one process of each machine downloads them first."""
    with main_process_first(f"reading {source}"):
        return read(source)


class _Rows(NamedTuple):
    """Names of the rows of class heads, by which rows are matched."""

    detector: list[str]
    weights: list[str]


def load_pretrained(
    detector: Detector, weights: Weights, config: Any, class_names: Sequence[str]
) -> str:
    """Load `weights` into `detector`, which `config` describes, for classes of these names.

    The heads keep the rows of classes with the same names; the other rows are new. If the weights
    name no classes, as many are taken to be the same in the same order. Images are normalised as
    they were for the weights. Returns in words which weights were loaded. Raises `Refused` for
    another architecture.
    """
    _check_flags(detector, weights, config)
    # Of --eval_only, the names are the weights' own; those of the data are matched with them
    # elsewhere.
    class_map = {} if config.eval_only else parse_class_map(config.init_classes, class_names)
    rows = _match_rows(weights, class_names, class_map)
    state = detector.state_dict()
    head = class_rows(state, len(rows.detector))
    _check_tensors(state, head, weights, rows)
    new_rows = take_classes(state, weights.tensors, rows.detector, rows.weights)
    detector.pretrained_cfg = detector.pretrained_cfg | {"mean": weights.mean, "std": weights.std}
    if new_rows and config.eval_only:
        raise Refused(
            f"{weights.source} has {len(rows.weights)} classes without names, the data have "
            f"{len(class_names)}: evaluate it on data of its own classes"
        )
    if config.eval_only and isinstance(detector, FCOS) and weights.score_threshold is not None:
        detector.score_threshold = weights.score_threshold  # their authors' results are with it
    new_classes = [class_names[row - weights.has_background] for row in new_rows]
    num_loaded = len(state) - len(head) if new_classes else len(state)
    summary = format_loaded(num_loaded, len(state), weights.source, new_classes, class_names)
    if weights.is_unnamed and not new_classes:
        summary += ", its classes in this order, which it does not name"
    return "".join([summary, *weights.notes])


def _check_flags(detector: Detector, weights: Weights, config: Any) -> None:
    expected = {name: weights.settings[name] for name in _DECIDED if name in weights.settings}
    actual = {name: getattr(config, name) for name in expected}
    if config.detector == expected["detector"] and config.detector in FAMILIES:
        expected["model"] = weights.settings["model"]
        actual["model"] = describe(detector)["model"]
    differing = [name for name in expected if expected[name] != actual[name]]
    if differing:
        flags = "; ".join(
            f"--{name} {expected[name]} there, {actual[name]} here" for name in differing
        )
        raise Refused(f"{weights.source} is of another detector: {flags}; leave these flags out")


def _match_rows(weights: Weights, class_names: Sequence[str], class_map: dict[str, str]) -> _Rows:
    background = list(weights.row_names[: weights.has_background])
    rows = background + [class_map.get(name, name) for name in class_names]
    weights_rows = list(weights.row_names)
    num_extra = len(weights_rows) - len(rows)
    # torchvision counts classes from 1, so that row 0 may be no class's.
    max_extra = 0 if background else 1
    if weights.is_unnamed and 0 <= num_extra <= max_extra:
        weights_rows = weights_rows[:num_extra] + rows
    return _Rows(rows, weights_rows)


def _check_tensors(
    state: dict[str, Tensor], head: dict[str, Tensor], weights: Weights, rows: _Rows
) -> None:
    """Raise `Refused` if the weights have other tensors than `state`, or numbers that are not finite."""
    tensors = weights.tensors | class_rows(weights.tensors, len(rows.weights))
    differing = sorted(state.keys() ^ weights.tensors.keys())
    for name, expected in (state | head).items():
        actual = tensors.get(name, expected)
        start = 1 if name in head else 0  # numbers of rows may differ
        is_same_kind = actual.is_floating_point() == expected.is_floating_point()
        if actual.shape[start:] != expected.shape[start:] or not is_same_kind:
            differing.append(name)
    if differing:
        flags = [
            f"--{flag} {value}"
            for flag, value in weights.settings.items()
            if flag in (*_DECIDED, "model")
        ]
        raise Refused(
            f"{weights.source} is of another detector: {len(differing)} tensors differ, first "
            f"{differing[0]}; it fits {' '.join(flags)}"
        )
    for name, tensor in weights.tensors.items():
        if not tensor.isfinite().all():
            raise Refused(
                f"{weights.source}: {name} has numbers that are not finite; copy it again, or "
                "take other weights"
            )
