"""Rows of the start table about the model and its training."""

from typing import Any

from torch import nn

from common.data.batch_plan import BatchPlan
from common.distributed import sharding
from common.training import batch_norm, timm_models
from common.training import optimizer as optimization
from common.training.step import Samples


def start_rows(config: Any, model: nn.Module, samples: Samples, plan: BatchPlan, steps: int) -> dict[str, str]:
    """Rows about a run of `steps`; a row without a value is not printed."""
    stream = samples.stream
    least = stream.min_epoch_steps
    longer = f", counted as {steps / least:.1f} of {least} steps each" if stream.extends_epochs else ""
    return {
        **timm_models.describe(config.model, model),
        **samples.describe(),
        "margin head": str(getattr(model, "margin_head", "")),
        "batch norm": batch_norm.describe(model),
        **sharding.describe(model),
        "batch": str(plan),
        "learning rate": optimization.describe(config, model),
        "length": f"{steps:,} steps, {stream.epoch(steps):.1f} epochs{longer}",
    }
