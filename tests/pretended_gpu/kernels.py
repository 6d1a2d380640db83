"""Kernels for the GPU that the runtime pretends: whatever torch launches on it, the CPU computes in its memory.

torch itself does all else: dispatch, device checks, allocation, streams, autograd, DDP. `with Kernels():` around the program.
"""

import ctypes
import os
import traceback
from collections import Counter

import torch
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
library = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
seen_waits = Counter()
HOLD = []


def host(t):
    """The memory of a CUDA tensor, as a CPU tensor."""
    s = t.untyped_storage()
    if s.nbytes() == 0 or s.data_ptr() == 0:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    raw = (ctypes.c_char * s.nbytes()).from_address(s.data_ptr())
    flat = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    out = torch.empty(0, dtype=t.dtype)
    out.set_(flat, t.storage_offset(), t.shape, t.stride())
    return out.conj() if t.is_conj() else out


def is_cuda(x):
    return isinstance(x, torch.Tensor) and x.is_cuda


def wait():
    torch._C._cuda_synchronize if False else torch.cuda.current_stream().synchronize()


# what the host has to wait for to know a shape, or what reads numbers inside
DYNAMIC = {
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "nms",
    "repeat_interleave",
    "bincount",
    "nonzero_static",
}
NOTHING = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "_local_scalar_dense",
    "record_stream",
    "pin_memory",
    "_pin_memory",
    "is_pinned",
    "resize_",
    "set_",
    "detach",
    "alias",
    "lift_fresh",
    "_to_copy_dummy",
    "is_same_size",
    "_has_compatible_shallow_copy_type",
    "_scaled_dot_product_fused",
    "equal_dummy",
}
READS = {"equal", "is_nonzero", "item", "allclose", "_local_scalar_dense"}


def is_view(func):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def widened(x):
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def others(x):
    return [0, *range(2, x.dim())]


def along(x, of_channels):
    """Numbers of channels [C], to be combined with `x` [N, C, ...]."""
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x, eps):
    variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), others(x), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats(x, means, inverses, running_mean, running_var, momentum, eps, counts):
    counts, total = counts[:, None], counts.sum()
    mean = (means * counts).sum(0) / total
    squares = ((inverses**-2 - eps + (means - mean) ** 2) * counts).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(squares / (total - 1), momentum)
    return mean, (squares / total + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, inverse, eps):
    y = (x - along(x, mean)) * along(x, inverse if weight is None else inverse * weight)
    return y if bias is None else y + along(x, bias)


def batch_norm_backward_reduce(gradient, x, mean, inverse, weight, *_):
    gradient = gradient.to(mean.dtype)
    sums, products = gradient.sum(others(x)), (gradient * (x - along(x, mean))).sum(others(x))
    return sums, products, products * inverse, sums


def batch_norm_backward_elemt(gradient, x, mean, inverse, weight, sums, products, counts):
    total = counts.sum()
    deviation = (x - along(x, mean)) * along(x, inverse**2 * products / total)
    scale = inverse if weight is None else inverse * weight
    return (gradient - along(x, sums / total) - deviation) * along(x, scale)


CUDA_ONLY = {
    aten.batch_norm_stats.default: batch_norm_stats,
    aten.batch_norm_gather_stats_with_counts.default: batch_norm_gather_stats,
    aten.batch_norm_elemt.default: batch_norm_elemt,
    aten.batch_norm_backward_reduce.default: batch_norm_backward_reduce,
    aten.batch_norm_backward_elemt.default: batch_norm_backward_elemt,
}


class Kernels(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __init__(self):
        super().__init__()
        self.count, self.failed = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree.tree_leaves((args, kwargs))
        name = func._schema.name.split("::")[1]
        factory = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if not factory and not any(is_cuda(x) for x in leaves):
            return func(*args, **kwargs)
        if name in NOTHING or is_view(func):
            return func(*args, **kwargs)
        self.count[name] += 1
        if func.namespace == "c10d":
            return func(*args, **kwargs)
        if name in READS and name == "equal":
            wait()
            return self.compute(func, args, kwargs)
        boolean = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if boolean:
            wait()
            args = list(args)
            indices = []
            for i in args[1]:
                if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8):
                    places = (host(i) if i.is_cuda else i).nonzero().unbind(1)
                    indices += [p.clone().to(args[0].device) for p in places]
                else:
                    indices.append(i)
            args[1] = indices
        if name in DYNAMIC and func is not aten.repeat_interleave.self_int:
            wait()
            device = next(x.device for x in leaves if is_cuda(x))
            result = self.compute(func, args, kwargs)
            return tree.tree_map(lambda x: self.sent(x, device) if isinstance(x, torch.Tensor) else x, result)
        if name.startswith("cudnn_batch_norm"):
            return self.cudnn(name, func, args, kwargs)
        real = func(*args, **kwargs)
        self.finish(func, args, kwargs, real)
        return real

    def sent(self, x, device):
        out = torch.empty(x.shape, dtype=x.dtype, device=device)
        host(out).copy_(x)
        return out

    def compute(self, func, args, kwargs, widen=False):
        def over(x):
            if is_cuda(x):
                x = host(x)
            elif isinstance(x, torch.device) and x.type == "cuda":
                return torch.device("cpu")
            elif isinstance(x, torch.Generator):
                return None
            return widened(x) if widen else x

        args, kwargs = tree.tree_map(over, (tuple(args), kwargs))
        if "pin_memory" in kwargs:
            kwargs = kwargs | {"pin_memory": False}
        return CUDA_ONLY.get(func, func)(*args, **kwargs)

    def finish(self, func, args, kwargs, real):
        mutates = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        try:
            result = self.compute(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if mutates:
                self.failed[f"{func}: {str(error)[:100]}"] += 1
                return
            try:
                result = self.compute(func, args, kwargs, widen=True)
            except (RuntimeError, NotImplementedError) as error:
                self.failed[f"{func}: {str(error)[:100]}"] += 1
                return
        if mutates and func._schema.name.endswith("_") or real is None:
            return
        for mine, theirs in zip(tree.tree_leaves(real), tree.tree_leaves(result), strict=False):
            if is_cuda(mine) and isinstance(theirs, torch.Tensor):
                if mine.shape != theirs.shape:
                    if mine.numel() and theirs.numel():
                        self.failed[f"{func}: shapes {tuple(mine.shape)} {tuple(theirs.shape)}"] += 1
                    continue
                host(mine).copy_(theirs)
            elif (
                isinstance(mine, torch.Tensor)
                and isinstance(theirs, torch.Tensor)
                and mine.shape == theirs.shape
                and mine is not theirs
            ):
                if mine.device.type == "cpu" and mine.data_ptr() != theirs.data_ptr():
                    mine.copy_(theirs)

    def cudnn(self, name, func, args, kwargs):
        real = func(*args, **kwargs)
        if name == "cudnn_batch_norm":
            x, weight, bias, mean, var, training, momentum, eps = args
            h = [None if a is None else host(a) for a in (weight, bias, mean, var)]
            y, m, i = aten.native_batch_norm(widened(host(x)), *h, training, momentum, eps)
            for mine, theirs in zip(real[:3], (y, m, i)):
                if mine.shape == theirs.shape:
                    host(mine).copy_(theirs)
        elif name == "cudnn_batch_norm_backward":
            x, g, weight, mean, var, m, i, eps, *_ = args
            gx, gw, gb = aten.native_batch_norm_backward(
                widened(host(g)),
                widened(host(x)),
                host(weight),
                None if mean is None else host(mean),
                None if var is None else host(var),
                host(m),
                host(i),
                True,
                eps,
                [True, True, True],
            )
            for mine, theirs in zip(real[:3], (gx, gw, gb)):
                host(mine).copy_(theirs)
        else:
            self.failed[str(func)] += 1
        return real


LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


def listen(also=lambda what, where: None):
    """Count from which line of the program the host waits."""

    def heard(what):
        frames = [f for f in traceback.extract_stack() if "/common/" in f.filename or "/recipes/" in f.filename]
        where = " < ".join(f"{f.filename.split('/repo/')[-1]}:{f.lineno}" for f in frames[-1:-3:-1]) if frames else "?"
        seen_waits[(what.decode().split()[0], where)] += 1
        also(what.decode(), where)

    callback = LISTENER(heard)
    HOLD.append(callback)
    library.pretended_listen(callback)


def setup():
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
