"""DDP's warm-up: brings a wrapped model into the state that it has in an uninterrupted run."""

import errno
import re
from collections.abc import Callable

import torch

from common.distributed import determinism
from common.distributed.collectives import is_lost_peer
from common.errors import Refused
from common.training import batch_norm

# Messages of torch and its libraries when memory is used up. cuDNN finds no algorithm if a
# workspace does not fit, and also if it does not support a convolution.
_OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|std::bad_alloc|ALLOC_FAILED|ALLOCATION_FAILED|Allocation "
    "failed|CUDNN_STATUS_NOT_SUPPORTED|unable to find an engine|unable to find a valid cuDNN "
    "algorithm",
    re.IGNORECASE,
)
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")


def check_losses(losses: torch.Tensor, num_samples: int) -> None:
    """Raise `Refused` unless there is one loss per sample, [num_samples], with gradients.

    The host does not wait for the device.
    """
    shape = list(losses.shape) if isinstance(losses, torch.Tensor) else f"a {type(losses).__name__}"
    if shape != [num_samples]:
        raise Refused(
            f"the losses of {num_samples} samples are {shape}, not [{num_samples}]: one loss per "
            "sample; take reduction='none', and the mean over what else a sample has"
        )
    if not losses.requires_grad:
        raise Refused(
            "the losses carry no gradients: compute them from the model's outputs, without detach "
            "or no_grad"
        )


def warm_up(wrapped: torch.nn.Module, model: torch.nn.Module, step: Callable[[], None]) -> None:
    """Run `step`, a forward and backward pass through `wrapped`, and restore the model.

    So DDP settles before the first step: it regroups its gradient buckets after the first backward
    pass, and from three ranks on another grouping sums in another order. Without this, the step
    after a resume would differ in its last bits from the same step of an uninterrupted run. Every
    rank calls it with a micro-batch of the same shape. Raises `Refused` if the model can't take
    that; a model whose images do not get their size from --image_size names the flag in
    `size_flag`.
    """
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    num_passes = 1 if wrapped is model else 2
    try:
        for _ in range(num_passes):
            step()
    except Exception as error:
        if is_out_of_memory(error) or is_lost_peer(error):
            raise  # of this rank alone, perhaps
        determinism.refuse_missing_kernel(error)
        if any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__):
            raise Refused(
                f"--compile failed: {summarize_error(error)}; leave out --compile, or install what "
                "it lacks: a C compiler, Python's headers, or the Triton of this torch"
            ) from error
        if not isinstance(error, (AssertionError, ValueError, RuntimeError)):
            raise
        size_flag = getattr(model, "size_flag", "--image_size")
        raise Refused(
            f"the model can't make a step: {summarize_error(error)}; look at {size_flag}, "
            "--global_batch_size and --max_micro_batch_size"
        ) from error
    wrapped.zero_grad()
    model.load_state_dict(state)
    batch_norm.discard_statistics(model)


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` means that a device, a library on it, or the host is out of memory."""
    if isinstance(error, OSError):  # no room to map a batch that a data worker has sent
        return error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def summarize_error(error: BaseException) -> str:
    """The first line of an error's message, without a full stop.

    Of a compiler's error, it is the first line of its cause.
    """
    text = str(getattr(error, "inner_exception", error)).strip()
    if not text:
        return type(error).__name__
    return text.split("\n")[0][:300].rstrip(".")
