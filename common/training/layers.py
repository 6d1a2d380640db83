"""Layers of a model as the flags say: batch norm, drop path, shards, frozen stages."""

from typing import Any

import torch
from torch import nn

from common.distributed import sharding
from common.training import batch_norm, drop_path
from common.training.freezing import freeze_stages


def prepare_layers(config: Any, model: nn.Module) -> None:
    """Prepare batch norm, frozen stages and drop path as the flags say: the same on every layout.

    In place, before the model is moved to its device and the optimizer is built. If the launch asks
    for it, a model that is to be trained is sharded here, so that no device ever holds the whole.
    """
    batch_norm.convert_batch_norm(model, config.batch_norm, group_size=config.norm_batch_size)
    drop_path.convert_drop_layers(model)
    if not getattr(config, "eval_only", ""):
        sharding.shard_model(model, getattr(torch, config.dtype))
    freeze_stages(config, model)
