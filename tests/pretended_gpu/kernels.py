"""Kernels for the GPU that the runtime pretends: whatever torch launches on it, the CPU computes in its memory.

torch itself does all else: dispatch, device checks, allocation, streams, autograd, DDP. `with Kernels():` around the program.
"""

import contextlib
import copy
import ctypes
import os
import traceback
from collections import Counter

import torch
from torch._functorch import config as functorch
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
library = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
library.pretended_settle.argtypes = [ctypes.c_void_p]
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


class NoKernel(Exception):
    """The CPU can't compute an operator of the GPU: nothing may go on with numbers that were never written."""


@contextlib.contextmanager
def announced():
    """Around an operator that is computed here: the kernels that it launches on this thread needn't do anything."""
    library.pretended_compute(1)
    try:
        yield
    finally:
        library.pretended_compute(0)


def poison(tensor):
    """Fills memory that is not written yet with NaN, as a block that is used again has what was there before."""
    storage = tensor.untyped_storage()
    if storage.device.type == "cuda" and storage.nbytes():
        ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())


def unknown():
    """How many kernels and functions of the runtime were asked for that nobody computes."""
    return ctypes.c_ulong.in_dll(library, "pretended_unknown").value


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


class Kernels(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree.tree_leaves((args, kwargs))
        name = func._schema.name.split("::")[1]
        factory = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if not factory and not any(is_cuda(x) for x in leaves):
            return func(*args, **kwargs)
        # What NCCL still does on this stream comes before what is computed here.
        library.pretended_settle(torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()))
        if name in NOTHING or is_view(func):
            result = func(*args, **kwargs)
            if "empty" in name:
                poison(result)
            return result
        self.count[name] += 1
        if func.namespace == "c10d":
            with self:  # which also sees the copies that a collective makes
                return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
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
        with announced():
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
        return func(*args, **kwargs)

    def finish(self, func, args, kwargs, real):
        mutates = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        try:
            result = self.compute(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if mutates:
                raise NoKernel(f"no kernel for {func}: {str(error).splitlines()[0]}") from error
            try:
                result = self.compute(func, args, kwargs, widen=True)
            except (RuntimeError, NotImplementedError) as error:
                raise NoKernel(f"no kernel for {func}: {str(error).splitlines()[0]}") from error
        if mutates and func._schema.name.endswith("_") or real is None:
            return
        for mine, theirs in zip(tree.tree_leaves(real), tree.tree_leaves(result), strict=False):
            if is_cuda(mine) and isinstance(theirs, torch.Tensor):
                if mine.shape != theirs.shape:
                    if mine.numel() and theirs.numel():
                        raise NoKernel(f"no kernel for {func}: shapes {tuple(mine.shape)} {tuple(theirs.shape)}")
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
        with announced():
            real = func(*args, **kwargs)
        if name == "cudnn_batch_norm":
            x, weight, bias, mean, var, training, momentum, eps = args
            h = [None if a is None else host(a) for a in (weight, bias, mean, var)]
            y, m, i = aten.native_batch_norm(widened(host(x)), *h, training, momentum, eps)
            for mine, theirs in zip(real[:3], (y, m, i), strict=False):
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
            for mine, theirs in zip(real[:3], (gx, gw, gb), strict=False):
                host(mine).copy_(theirs)
        else:
            raise NoKernel(f"no kernel for {func}")
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


@announced()  # Inductor tries and times kernels while it compiles
def compiler(wrapper, model, inputs):
    """`torch.compile`: Inductor and Triton compile for the GPU, and the operators of the same graph are what is computed."""
    from torch._inductor import compile_fx

    compile_graph = compile_fx._compile_fx_inner

    @announced()
    def compiled(graph, inputs, **options):
        operators = copy.deepcopy(graph)  # Inductor rewrites it
        compile_graph(graph, inputs, **options)

        def call(arguments):
            taken = list(arguments)
            arguments.clear()  # as compiled code does, so that memory is free as early
            return operators(*taken)

        call._boxed_call = True
        return call

    if not hasattr(compile_fx, "pretended"):
        compile_fx.pretended, compile_fx._compile_fx_inner = True, compiled
        functorch.enable_autograd_cache = False  # it would keep Inductor's code
    return compile_with_inductor(wrapper, model, inputs)


compile_with_inductor = torch._TorchCompileInductorWrapper.__call__


def setup():
    library.pretended_strict()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._TorchCompileInductorWrapper.__call__ = compiler
