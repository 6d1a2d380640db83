"""Gradient compression: DDP sends gradients in half precision, by torch's own hooks."""

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from common.config.fields import RunConfig
from common.distributed.collectives import world_size

_SIGNIFICANT_BITS = {"fp16": 11, "bf16": 8}


def data_parallel(config: RunConfig) -> DistributedDataParallelKwargs:
    """Options of DDP for sending gradients."""
    return DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # the recipes synchronise running statistics themselves
        comm_hook=DDPCommunicationHookType({"none": "no"}.get(config.comm_hook, config.comm_hook)),
    )


def describe(config: RunConfig) -> dict[str, str]:
    """A row of the start table if gradients are compressed, else an empty dict. No communication."""
    hook = config.comm_hook
    if hook == "none":
        return {}
    text = f"sent in {hook}, with {_SIGNIFICANT_BITS[hook]} significant bits: layouts agree to about these"
    alone = f"one process sends none: --comm_hook {hook} does nothing here"
    return {"gradients": alone if world_size() == 1 else text}
