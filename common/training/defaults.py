"""Hints in the start table at better defaults."""

from pathlib import Path

from common.config.fields import get_fields_with


def suggest_pretrained(config) -> dict[str, str]:
    """A row of the start table that suggests `--pretrained`, for photographs without weights."""
    has_weights = any(getattr(config, name) for name in get_fields_with(config, "is_weights"))
    if has_weights or Path(config.model).is_dir() or config.data == "digits":
        return {}
    hint = "no; --pretrained downloads weights to begin with, which need fewer photographs"
    return {"pretrained": hint}
