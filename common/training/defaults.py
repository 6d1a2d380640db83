"""Defaults that suit the data of a run.

Those of a recipe suit digits, which are small and never mirrored. Other data are assumed to be photographs: a field that
names a value for these (`option(..., photographs=0.5)`) has it as its default instead. Presets and flags override both.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from common.config.fields import field_names
from common.training import timm_models


def suited(config) -> dict:
    """The defaults of the fields of `config` for photographs: {name: value}; {} if the data are digits.

    An `image_size` or `crop_pct` of 0 means the model's own, and becomes that number if it is known before the model is built.
    """
    if config.data == "digits":
        return {}
    values = {field.name: field.metadata.get("photographs") for field in dataclasses.fields(config)}
    found = {name: value for name, value in values.items() if value is not None}
    own = timm_models.own_view(config.model) if "image_size" in found else {}
    return found | {name: value for name, value in own.items() if found.get(name) == 0}


def describe(config, suit: Callable[..., dict] = suited) -> dict[str, str]:
    """Rows of the start table: the defaults of `config` that were chosen for photographs, and a hint at pretrained weights."""
    chosen = {name: value for name, value in suit(config).items() if getattr(config, name) == value}
    if not chosen:
        return {}
    listed = ", ".join(f"{name} {chosen[name]}" for name in field_names(type(config)) if name in chosen)
    rows = {"defaults": f"for photographs: {listed}"}
    if not (config.pretrained or getattr(config, "init", "") or Path(config.model).is_dir()):
        rows["pretrained"] = "no; --pretrained downloads weights to begin with, which need fewer photographs"
    return rows
