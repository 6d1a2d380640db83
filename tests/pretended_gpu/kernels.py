"""Kernels of the pretended GPU: whatever torch launches on it, the CPU computes in the same memory.

Use `with Kernels():` around a program. Each operator on a CUDA tensor first runs unchanged, which
launches kernels that do nothing and allocates the results; then the CPU computes the same operator,
and its results are copied there. `INSTEAD` has the operators for which the CPU has no kernel. A
missing operator raises an error, and so does a difference in shape.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchvision  # noqa: F401 (registers its operators)
from torch._decomp import decomposition_table
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
runtime = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
runtime.pretended_settle.argtypes = [ctypes.c_void_p]

# Operators that need no kernel, or only read memory that is already right.
NO_KERNEL = {
    "_fused_sdp_choice",
    "_has_compatible_shallow_copy_type",
    "_local_scalar_dense",
    "_pin_memory",
    "empty",
    "empty_like",
    "empty_strided",
    "is_pinned",
    "is_same_size",
    "new_empty",
    "new_empty_strided",
    "record_stream",
}
HALF = (torch.float16, torch.bfloat16)


class NoKernel(Exception):
    """The CPU can't compute an operator of the GPU, so that its results were never written."""


def is_cuda(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_cuda and not isinstance(x, FakeTensor)  # no memory


def view_on_host(x: torch.Tensor) -> torch.Tensor:
    """The memory of a CUDA tensor, as a CPU tensor."""
    storage = x.untyped_storage()
    if x.is_conj() or x.is_neg():
        raise NoKernel("no kernel for tensors that are conjugated or negated by a flag")
    if storage.nbytes() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    same = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(same, x.storage_offset(), x.shape, x.stride())


def send(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor on a device, made without a copy that the runtime counts."""
    result = torch.empty_like(x, device=device)
    view_on_host(result).copy_(x)
    return result


def widen(x: Any) -> Any:
    """Half precision in single precision; all else as it is."""
    if isinstance(x, torch.Tensor) and x.dtype in HALF:
        return x.float()
    return x


@contextlib.contextmanager
def announce_compute():
    """Tells the runtime that the CPU computes what this thread launches within the block, so its
    kernels may do nothing.
    """
    runtime.pretended_compute(1)
    try:
        yield
    finally:
        runtime.pretended_compute(0)


def count_unknown() -> int:
    """Number of calls of kernels and runtime functions that nothing computes."""
    return ctypes.c_ulong.in_dll(runtime, "pretended_unknown").value


class Kernels(TorchDispatchMode):
    """While this is on, the CPU computes what torch launches on CUDA devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if kwargs is None:
            kwargs = {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on shards come here next
        device = get_cuda_device(args, kwargs)
        if device is None or any(
            isinstance(x, FakeTensor) for x in tree.tree_leaves((args, kwargs))
        ):
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        # NCCL's work that is queued on this stream comes first.
        runtime.pretended_settle(torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()))
        if is_without_kernel(func):
            result = func(*args, **kwargs)
            if "empty" in name and is_cuda(result) and result.untyped_storage().nbytes():
                # NaN everywhere: a reused block of the allocator still has its old values.
                storage = result.untyped_storage()
                ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())
            return result
        if func.namespace == "_c10d_functional":
            with self:
                return compute_collective(name, *args)
        if func.namespace == "c10d":
            with self:  # also for the copies that a collective makes
                return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            args = self.replace_masks(*args)
        elif has_unknown_shape(func, kwargs):
            # The shape (or the answer) depends on values: the host waits for the device.
            torch.cuda.current_stream(device).synchronize()
            result = compute(func, args, kwargs)
            return tree.tree_map_only(torch.Tensor, lambda x: send(x, device), result)
        seed = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            seed = get_seed(args, kwargs, device)
        with announce_compute():
            results = func(*args, **kwargs)
        fill(func, results, compute(func, args, kwargs, seed))
        return results

    def replace_masks(self, x, indices, *more_args):
        """Replaces masks among indices by their positions. As on CUDA, the host waits until their
        number is known.
        """
        if more_args and not any(more_args[1:]) and sum(map(is_tensor, indices)) == 1:
            value = more_args[0]
            if value.numel() == 1 and not value.is_cuda:
                return x, indices, *more_args  # a fill under a mask needs no positions
        result = []
        for index in indices:
            if is_cuda(index) and index.dtype in (torch.bool, torch.uint8):
                torch.cuda.current_stream(index.device).synchronize()
                for positions in view_on_host(index).nonzero().unbind(1):
                    result.append(send(positions, index.device))
            else:
                result.append(index)
        return x, result, *more_args


def compute_collective(name: str, x: torch.Tensor, *more_args: Any) -> torch.Tensor:
    """A collective of DTensors, by the one of c10d that NCCL's stand-in knows."""
    if name in ("wait_tensor", "_wrap_tensor_autograd"):
        return x
    group = more_args[-1]
    if not isinstance(group, dist.ProcessGroup):
        group = dist.distributed_c10d._resolve_process_group(group)
    if name == "all_reduce":
        result = x.clone()
        operator = getattr(dist.ReduceOp, more_args[0].upper())
        dist.all_reduce(result, operator, group=group)
    elif name == "all_gather_into_tensor":
        result = x.new_empty((x.shape[0] * group.size(),) + x.shape[1:])
        dist.all_gather_into_tensor(result, x.contiguous(), group=group)
    else:
        raise NoKernel(f"no kernel for _c10d_functional.{name}")
    return result


def is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def get_cuda_device(args: tuple, kwargs: dict) -> torch.device | None:
    """The device on which an operator computes; None for the CPU."""
    for x in tree.tree_leaves((args, kwargs)):
        if is_cuda(x):
            return x.device
        if isinstance(x, torch.device) and x.type == "cuda":
            return x
    return None


def is_without_kernel(func) -> bool:
    returns = func._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return (
        is_view
        or torch.Tag.inplace_view in func.tags
        or func._schema.name.split("::")[1] in NO_KERNEL
    )


def has_unknown_shape(func, kwargs: dict) -> bool:
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    unknown = (
        torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    )
    return unknown or func is torch.ops.torchvision.nms.default


def get_seed(args: tuple, kwargs: dict, device: torch.device) -> int:
    """Seed for an operator that draws random numbers, from the state of the device's generator
    before it draws.
    """
    generators = [x for x in tree.tree_leaves((args, kwargs)) if isinstance(x, torch.Generator)]
    if generators:
        generator = generators[0]
    elif device.index is None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
    else:
        generator = torch.cuda.default_generators[device.index]
    return hash((generator.initial_seed(), generator.get_offset())) & 0x7FFFFFFFFFFFFFFF


def compute(func, args: tuple, kwargs: dict, seed: int | None = None) -> Any:
    """Runs `func` on the CPU, on the memory of its CUDA tensors; in-place operators write there."""
    memory = tree.tree_map(
        lambda x: view_on_host(x) if is_cuda(x) else on_cpu(x), (tuple(args), kwargs)
    )

    def run(args: tuple, kwargs: dict) -> Any:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        function = INSTEAD.get(func._schema.name.split("::")[1], func)
        return function(*args, **kwargs)

    with torch.random.fork_rng([], enabled=seed is not None):
        try:
            return run(*memory)
        except RuntimeError as error:  # some CPU kernels exist only in single and double precision
            wide = tree.tree_map(widen, memory)
            pairs = list(zip(tree.tree_leaves(memory), tree.tree_leaves(wide), strict=True))
            if all(x is y for x, y in pairs):
                raise NoKernel(f"no kernel for {func}: {str(error).splitlines()[0]}") from error
            result = run(*wide)
            if func._schema.is_mutable:
                for narrow, x in pairs:
                    if x is not narrow:
                        narrow.copy_(x)
            return result


def on_cpu(x: Any) -> Any:
    if isinstance(x, torch.Generator):
        return None  # replaced by the seed of `get_seed`
    return torch.device("cpu") if isinstance(x, torch.device) else x


def list_leaves(results: Any) -> list:
    """Tensors, numbers and None of an operator's results, in order; no results are an empty list."""
    if results is None:
        return []
    return tree.tree_leaves(results, is_leaf=lambda x: x is None)


def fill(func, results: Any, computed: Any) -> None:
    """Copies the CPU's results into the memory of the device's results; None in `computed`: nobody
    reads that one.
    """
    for empty, full in zip(list_leaves(results), list_leaves(computed), strict=True):
        if not is_tensor(empty) or full is None:
            continue
        if empty.shape != full.shape:
            raise NoKernel(
                f"no kernel for {func}: {tuple(empty.shape)} on CUDA, {tuple(full.shape)} on the "
                "CPU"
            )
        memory = view_on_host(empty) if empty.is_cuda else empty
        if memory.data_ptr() != full.data_ptr():
            memory.copy_(full)


# ---- What the CPU computes in place of operators for which it has no kernel, by name


DECOMPOSED = ("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data")
DECOMPOSED += ("_fused_rms_norm", "_fused_rms_norm_backward")
INSTEAD: dict[str, Callable] = {
    name: decomposition_table[getattr(aten, name).default] for name in DECOMPOSED
}


def kernel(function: Callable) -> Callable:
    INSTEAD[function.__name__] = function
    return function


def view_per_channel(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[C] -> [1, C, 1 ...], for broadcasting with `like` [N, C, ...]."""
    return x.view([1, -1] + [1] * (like.dim() - 2))


def list_sample_dims(x: torch.Tensor) -> list[int]:
    return [0] + list(range(2, x.dim()))


@kernel
def native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps):
    y, saved_mean, saved_deviation = aten.native_batch_norm(
        widen(x), weight, bias, mean, variance, training, momentum, eps
    )
    if training:
        return y, saved_mean, saved_deviation
    return y, None, None


@kernel
def native_batch_norm_backward(gradient, x, *more_args):
    return aten.native_batch_norm_backward(widen(gradient), widen(x), *more_args)


@kernel
def cudnn_batch_norm(*args):
    return native_batch_norm(*args) + (None,)


@kernel
def cudnn_batch_norm_backward(
    x, gradient, weight, mean, variance, saved_mean, saved_deviation, eps, reserve
):
    return native_batch_norm_backward(
        gradient, x, weight, mean, variance, saved_mean, saved_deviation, True, eps, [True] * 3
    )


@kernel
def batch_norm_stats(x, eps):
    variance, mean = torch.var_mean(widen(x), list_sample_dims(x), correction=0)
    return mean, (variance + eps).rsqrt()


@kernel
def batch_norm_elemt(x, weight, bias, mean, inverse_deviation, eps):
    y = (widen(x) - view_per_channel(mean, x)) * view_per_channel(inverse_deviation, x)
    if weight is not None:
        y = y * view_per_channel(weight, x)
    if bias is not None:
        y = y + view_per_channel(bias, x)
    return y


@kernel
def batch_norm_gather_stats_with_counts(
    x, means, inverse_deviations, running_mean, running_var, momentum, eps, counts
):
    counts = counts.to(means.dtype)[:, None]  # [ranks, 1]; the others are [ranks, C]
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    variances = inverse_deviations.pow(-2) - eps
    squares = ((variances + (means - mean).square()) * counts).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (count - 1)).to(running_var.dtype), momentum)
    return mean, (squares / count + eps).rsqrt()


@kernel
def batch_norm_backward_reduce(
    gradient, x, mean, inverse_deviation, weight, needs_input, needs_weight, needs_bias
):
    gradient = widen(gradient)
    centred = widen(x) - view_per_channel(mean, x)
    total = gradient.sum(list_sample_dims(x))
    slope = (gradient * centred).sum(list_sample_dims(x))
    weight_gradient = slope * inverse_deviation
    mask = (needs_input, needs_input, needs_weight, needs_bias)
    results = (total, slope, weight_gradient, total)
    return tuple(x if is_needed else None for x, is_needed in zip(results, mask, strict=True))


@kernel
def batch_norm_backward_elemt(gradient, x, mean, inverse_deviation, weight, total, slope, counts):
    count = counts.sum()
    centred = widen(x) - view_per_channel(mean, x)
    slope = view_per_channel(slope / count * inverse_deviation.square(), x)
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    return (
        widen(gradient) - view_per_channel(total / count, x) - centred * slope
    ) * view_per_channel(scale, x)


def setup() -> None:
    """Replaces fused attention by plain operators: the runtime can't pretend it."""
    for kind in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
