"""Defaults that suit the data of a detector, and a refusal of settings that its family does not have."""

import dataclasses
from functools import partial

from common.detection.models.detectors import FAMILIES, OF_TRANSFORMERS
from common.errors import Refused
from common.training import defaults

# Settings, the families without them, and why.
_MISSING = {
    "convolutions": ({*FAMILIES, *OF_TRANSFORMERS} - {"fcos", "retinanet"}, "has none in its heads"),
    "width": ({"rf_detr"}, "has its own width"),
    "levels": (OF_TRANSFORMERS, "has a neck of its own"),
    "long_side": (OF_TRANSFORMERS, "stretches images to squares"),
}
_OF_WEIGHTS = ("model", "levels", "width")  # these must be those of the detector whose weights are loaded


def suited(config) -> dict:
    """As `common.training.defaults.suited`, without settings that the detector's family or given weights decide."""
    others = {name for name, (families, _) in _MISSING.items() if config.detector in families}
    others |= {*_OF_WEIGHTS} if config.init else set()
    return {name: value for name, value in defaults.suited(config).items() if name not in others}


describe = partial(defaults.describe, suit=suited)


def refuse_missing(config) -> None:
    """Raise `Refused` for a setting that the detector's family does not have."""
    for field in dataclasses.fields(config):
        families, reason = _MISSING.get(field.name, ((), ""))
        value = getattr(config, field.name)
        if config.detector in families and value != field.default:
            raise Refused(f"--{field.name} {value}: --detector {config.detector} {reason}; leave it out")
