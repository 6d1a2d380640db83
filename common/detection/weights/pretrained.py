"""Loading trained weights into a detector: all tensors, and of class heads the rows of known classes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from common.detection.class_map import parse_class_map
from common.detection.export import build_export_config
from common.detection.models.class_rows import copy_tensors, view_class_rows
from common.detection.models.detectors import FAMILIES, Detector
from common.detection.models.one_stage import FCOS
from common.detection.weights.sources import read_weights
from common.detection.weights.weights import Weights
from common.distributed.collectives import main_process_first
from common.errors import Refused
from common.training.timm_models import format_loaded

# Settings that weights and detector must have in common, beside the model.
_ARCHITECTURE_FLAGS = ("detector", "levels", "width", "convolutions", "variant")


def read_once(source: str) -> Weights:
    """Read the weights of a source. A collective: one process of each machine downloads them first."""
    with main_process_first(f"reading {source}"):
        return read_weights(source)


class _RowNames(NamedTuple):
    """Names of the rows of class heads, by which rows are matched."""

    detector: list[str]
    weights: list[str]


def load_pretrained(
    detector: Detector,
    weights: Weights,
    config: Any,
    class_names: Sequence[str],
) -> str:
    """Load `weights` into `detector`, which `config` describes, for classes of these names.

    The heads keep the rows of classes with the same names; the other rows are new. If the weights
    name no classes, as many are taken to be the same in the same order. Images are normalised as
    they were for the weights. Returns a text about the weights for the start table. Raises `Refused`
    for another architecture.
    """
    _check_flags(detector, weights, config)
    class_map = {}
    # Of --eval_only, the names are the weights' own; those of the data are matched with them
    # elsewhere.
    if not config.eval_only:
        class_map = parse_class_map(config.init_classes, class_names)
    row_names = _match_rows(weights, class_names, class_map)
    state = detector.state_dict()
    class_rows = view_class_rows(state, len(row_names.detector))
    _check_tensors(state, class_rows, weights, row_names)
    new_rows = copy_tensors(state, weights.tensors, row_names.detector, row_names.weights)
    detector.pretrained_cfg = detector.pretrained_cfg | {"mean": weights.mean, "std": weights.std}
    if new_rows and config.eval_only:
        raise Refused(
            f"{weights.source} has {len(row_names.weights)} classes without names, the data have "
            f"{len(class_names)}: evaluate it on data of its own classes"
        )
    if config.eval_only and isinstance(detector, FCOS) and weights.score_threshold is not None:
        detector.score_threshold = weights.score_threshold  # their authors' results are with it
    new_classes = [class_names[row - weights.has_background] for row in new_rows]
    num_loaded = len(state) - len(class_rows) if new_classes else len(state)
    summary = format_loaded(num_loaded, len(state), weights.source, new_classes, class_names)
    if weights.is_unnamed and not new_classes:
        summary += ", its classes in this order, which it does not name"
    return summary + "".join(weights.notes)


def _check_flags(detector: Detector, weights: Weights, config: Any) -> None:
    """Raise `Refused` if flags describe another architecture than that of the weights."""
    expected = {}
    actual = {}
    for name in _ARCHITECTURE_FLAGS:
        if name in weights.settings:
            expected[name] = weights.settings[name]
            actual[name] = getattr(config, name)
    if config.detector == expected["detector"] and config.detector in FAMILIES:
        expected["model"] = weights.settings["model"]
        actual["model"] = build_export_config(detector)["model"]
    differing = [name for name in expected if expected[name] != actual[name]]
    if differing:
        flags = [f"--{name} {expected[name]} there, {actual[name]} here" for name in differing]
        raise Refused(
            f"{weights.source} is of another detector: {'; '.join(flags)}; leave these flags out"
        )


def _match_rows(
    weights: Weights,
    class_names: Sequence[str],
    class_map: dict[str, str],
) -> _RowNames:
    """Name the rows of the detector by the names that their classes have in the weights."""
    background = list(weights.row_names[: weights.has_background])
    detector_rows = background + [class_map.get(name, name) for name in class_names]
    weights_rows = list(weights.row_names)
    num_extra = len(weights_rows) - len(detector_rows)
    # torchvision counts classes from 1, so that row 0 may be no class's.
    max_extra = 0 if background else 1
    if weights.is_unnamed and 0 <= num_extra <= max_extra:
        weights_rows = weights_rows[:num_extra] + detector_rows
    return _RowNames(detector_rows, weights_rows)


def _check_tensors(
    state: dict[str, Tensor],
    class_rows: dict[str, Tensor],
    weights: Weights,
    row_names: _RowNames,
) -> None:
    """Raise `Refused` if the weights have other tensors than `state`, or numbers that are not finite."""
    tensors = weights.tensors | view_class_rows(weights.tensors, len(row_names.weights))
    differing = sorted(state.keys() ^ weights.tensors.keys())
    for name, expected in (state | class_rows).items():
        actual = tensors.get(name, expected)
        start = 1 if name in class_rows else 0  # numbers of rows may differ
        is_same_kind = actual.is_floating_point() == expected.is_floating_point()
        if actual.shape[start:] != expected.shape[start:] or not is_same_kind:
            differing.append(name)
    if differing:
        flags = []
        for flag, value in weights.settings.items():
            if flag in (*_ARCHITECTURE_FLAGS, "model"):
                flags.append(f"--{flag} {value}")
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
