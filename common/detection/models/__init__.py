"""Detectors and their parts."""

import common.imports  # noqa: F401 (before the modules of this package import timm)
