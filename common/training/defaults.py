"""Hints in the start table at better defaults."""

from pathlib import Path

from common.config.fields import fields_with


def describe(config) -> dict[str, str]:
    """A row of the start table for photographs without weights to begin with: a hint at pretrained ones."""
    has_weights = any(getattr(config, name) for name in fields_with(config, "is_weights"))
    if has_weights or Path(config.model).is_dir() or config.data == "digits":
        return {}
    return {
        "pretrained": "no; --pretrained downloads weights to begin with, which need fewer photographs"
    }
