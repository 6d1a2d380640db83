"""Settings that a detector's weights decide, and a refusal of settings that its family lacks."""

import dataclasses

from common.detection.models.detectors import FAMILIES
from common.detection.models.detr_models import TRANSFORMERS_FAMILIES
from common.detection.weights.sources import read_settings
from common.errors import Refused
from common.training import defaults

# Settings, the families without them, and why.
_MISSING = {
    "convolutions": (
        (set(FAMILIES) | set(TRANSFORMERS_FAMILIES)) - {"fcos", "retinanet"},
        "has none in its heads",
    ),
    "width": ({"rf_detr"}, "has its own width"),
    "levels": (TRANSFORMERS_FAMILIES, "has a neck of its own"),
    "long_side": (TRANSFORMERS_FAMILIES, "stretches images to squares"),
    "variant": (TRANSFORMERS_FAMILIES, "has none"),
}


def describe_settings(config) -> dict[str, str]:
    """Rows of the start table: settings that the weights of `--init` decided, or a hint at weights."""
    decided = []
    if config.init:
        for name, value in read_settings(config.init).items():
            if getattr(config, name) == value:
                decided.append(f"{name} {value}")
    if decided:
        return {"as the weights": ", ".join(decided)}
    return defaults.suggest_pretrained(config)


def refuse_missing(config) -> None:
    """Raise `Refused` for a setting that the detector's family does not have."""
    for field in dataclasses.fields(config):
        families, reason = _MISSING.get(field.name, ((), ""))
        value = getattr(config, field.name)
        if config.detector in families and value != field.default:
            raise Refused(
                f"--{field.name} {value}: --detector {config.detector} {reason}; leave it out"
            )
    if (
        config.batch_norm == "group"
        and config.variant == "torchvision_v2"
        and config.detector.endswith("rcnn")
    ):
        raise Refused(
            "--batch_norm group: the heads of --variant torchvision_v2 see another number of "
            "proposals of each image, so that these make no groups; take --batch_norm frozen, or "
            "another --variant"
        )
