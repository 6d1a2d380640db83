"""What happens in a step: models of timm, batch norm, optimizer and schedule, warm-up."""

import common.imports  # noqa: F401 (before the modules of this package import timm)
