"""Gradient compression: how DDP sends gradients between processes, and how exact the result then is."""

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from common.config.fields import RunConfig
from common.distributed.collectives import world_size
from common.errors import Refused

HOOKS = {
    "none": DDPCommunicationHookType.NO,
    "fp16": DDPCommunicationHookType.FP16,
    "bf16": DDPCommunicationHookType.BF16,
    "powersgd": DDPCommunicationHookType.POWER_SGD,
}
DESCRIPTIONS = {
    "fp16": "sent in fp16, with 11 significant bits: layouts agree to about these",
    "bf16": "sent in bf16, with 8 significant bits: layouts agree to about these",
    "powersgd": "sent as matrices of low rank: other layouts and a resumed run agree only statistically",
}
ONE_BUCKET_MB = 2**20  # larger than any model


def data_parallel(config: RunConfig, precision: str) -> DistributedDataParallelKwargs:
    """Options of DDP for sending gradients; `precision` is Accelerate's name: no, fp16 or bf16.

    PowerSGD is torch's implementation of Vogels et al., 2019 (https://arxiv.org/abs/1905.13727). Raises `Refused` for
    settings that it can't handle.
    """
    bucket_cap_mb, options = config.bucket_cap_mb, {}
    if config.comm_hook == "powersgd":
        if bucket_cap_mb != RunConfig.bucket_cap_mb:
            raise Refused(
                f"--bucket_cap_mb {bucket_cap_mb}: PowerSGD takes all gradients in one bucket, since gloo aborts at several; "
                "leave --bucket_cap_mb out, or take another --comm_hook"
            )
        if precision == "fp16":
            raise Refused(
                "--comm_hook powersgd with fp16: what it owes to later steps would be lost when the loss scale changes; "
                "take bf16, or --comm_hook fp16"
            )
        bucket_cap_mb = ONE_BUCKET_MB
        options = {
            "matrix_approximation_rank": config.powersgd_rank,
            # Send the gradients of the two backward passes of the warm-up uncompressed, so that they leave no compression
            # error for the first real step. One would not be enough: DDP rebuilds its bucket between them.
            "start_powerSGD_iter": 2,
            # A zero gradient, as in a branch whose last scale is initialised to 0, would be divided by its norm. And a warm
            # start would use the zeros as directions in all later steps: such layers would never learn.
            "orthogonalization_epsilon": 1e-8,
            "warm_start": False,
        }
    return DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # the recipes synchronise running statistics themselves
        bucket_cap_mb=bucket_cap_mb,
        comm_hook=HOOKS[config.comm_hook],
        comm_state_option=options,
    )


def describe(config: RunConfig) -> dict[str, str]:
    """A row of the start table if gradients are compressed, else an empty dict.

    One process, --comm_hook fp16: {"gradients": "one process sends none: --comm_hook fp16 does nothing here"}.
    Two ranks, on both: {"gradients": "sent in fp16, with 11 significant bits: layouts agree to about these"}.
    """
    if config.comm_hook == "none":
        return {}
    if world_size() == 1:
        return {"gradients": f"one process sends none: --comm_hook {config.comm_hook} does nothing here"}
    return {"gradients": DESCRIPTIONS[config.comm_hook]}
