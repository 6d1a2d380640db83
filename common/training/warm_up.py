"""DDP's warm-up: brings a wrapped model into the state in which an uninterrupted run would have it."""

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


def check_losses(losses: torch.Tensor, samples: int) -> None:
    """Raise `Refused` unless there is one loss per sample, [samples], with gradients. The host does
    not wait for the device.
    """
    shape = list(losses.shape) if isinstance(losses, torch.Tensor) else f"a {type(losses).__name__}"
    if shape != [samples]:
        raise Refused(
            f"the losses of {samples} samples are {shape}, not [{samples}]: one loss per sample; "
            "take reduction='none', and the mean over what else a sample has"
        )
    if not losses.requires_grad:
        raise Refused(
            "the losses carry no gradients: compute them from the model's outputs, without detach "
            "or no_grad"
        )


def warm_up(wrapped: torch.nn.Module, model: torch.nn.Module, step: Callable[[], None]) -> None:
    """Let DDP settle before the first step: run `step`, a forward and backward pass through
    `wrapped`, and restore the model.

    DDP regroups its gradient buckets after the first backward pass, and from three ranks on another
    grouping sums in another order: without this, the step after a resume would differ in its last
    bits from the same step of an uninterrupted run. Every rank calls it with a micro-batch of the
    same shape. Raises `Refused` if the model can't take that; a model whose images do not get their
    size from --image_size names the flag in `size_flag`.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        for _ in range(1 if wrapped is model else 2):
            step()
    except Exception as error:
        if is_out_of_memory(error) or is_lost_peer(error):
            raise  # of this rank alone, perhaps
        determinism.refuse_missing_kernel(error)
        if any(kind.__module__.startswith(_COMPILERS) for kind in type(error).__mro__):
            lacks = "a C compiler, Python's headers, or the Triton of this torch"
            advice = f"leave out --compile, or install what it lacks: {lacks}"
            raise Refused(f"--compile failed: {first_line(error)}; {advice}") from error
        if not isinstance(error, (AssertionError, ValueError, RuntimeError)):
            raise
        size_flag = getattr(model, "size_flag", "--image_size")
        flags = f"{size_flag}, --global_batch_size and --max_micro_batch_size"
        raise Refused(
            f"the model can't make a step: {first_line(error)}; look at {flags}"
        ) from error
    wrapped.zero_grad()
    model.load_state_dict(before)
    batch_norm.discard_statistics(model)


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` means that a device, a library on it, or the host is out of memory."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    if isinstance(error, OSError):  # no room to map a batch that a data worker has sent
        return error.errno == errno.ENOMEM
    return known or (isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error))))


def first_line(error: BaseException) -> str:
    """First line of the message, without a full stop; of a compiler's error, the first line of its cause."""
    text = str(getattr(error, "inner_exception", error)).strip() or type(error).__name__
    return text.split("\n")[0][:300].rstrip(".")
