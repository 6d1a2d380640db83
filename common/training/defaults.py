"""Hints in the start table at better defaults."""

from pathlib import Path


def describe(config) -> dict[str, str]:
    """A row of the start table for photographs without weights to begin with: a hint at pretrained ones."""
    begins = config.pretrained or getattr(config, "init", "") or Path(config.model).is_dir()
    if begins or config.data == "digits":
        return {}
    return {"pretrained": "no; --pretrained downloads weights to begin with, which need fewer photographs"}
