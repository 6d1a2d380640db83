"""Sharding: each process keeps one shard of all weights, gradients and optimizer states (torch's FSDP2).

The Accelerate file asks for it: `launch.start` calls `begin`, and `prepare_layers` then shards the
model. A tensor in shards is a DTensor. Everything that leaves a run (checkpoints, `best/`, numbers)
is whole and has plain names.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader

from common.distributed.collectives import (
    host_group,
    is_main,
    rank,
    reduce_counts,
    subgroup,
    world_size,
)
from common.errors import Refused
from common.patches.torch import change_class

Tensors = dict[str, Tensor]
_LISTS = (nn.Sequential, nn.ModuleList)  # what models keep their blocks in
# Their names since torch 2.14, and before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Shares of a model's parameters: larger blocks are divided, smaller ones gathered together.
_LARGEST, _SMALLEST = 1 / 16, 1 / 1000


@dataclass(frozen=True)
class Sharding:
    """How a launch asks to shard the model."""

    # Weights are gathered again for the backward pass, instead of kept from the forward pass.
    reshard_after_forward: bool = True
    # Processes that hold a whole model together, as each such group does (0: all processes)
    num_shards: int = 0
    engine: str = "FSDP2"  # that the launch names

    @property
    def num_replicas(self) -> int:
        """Groups of processes that each hold a whole model."""
        return world_size() // (self.num_shards or world_size())


_begun: tuple[Sharding, DeviceMesh] | None = None


def configure(asked: Sharding | None, device: torch.device) -> None:
    """From here on, shard models as the launch asked. One process shards nothing. A collective."""
    global _begun
    _begun = None
    if asked is None or world_size() == 1:
        return
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise Refused(f"torch {torch.__version__} is too old to shard a model: take 2.14 or newer")
    ranks = torch.arange(world_size())
    mine: Any = dist.group.WORLD
    if asked.num_replicas > 1:  # every rank takes part in making every group
        ranks = ranks.view(asked.num_replicas, asked.num_shards)
        columns, rows = ([subgroup(line.tolist()) for line in lines] for lines in (ranks.T, ranks))
        mine = [columns[rank() % asked.num_shards], rows[rank() // asked.num_shards]]
    names = ("replica", "shard")[-ranks.dim() :]
    _begun = asked, DeviceMesh.from_group(mine, device.type, mesh=ranks, mesh_dim_names=names)


def is_sharded(model: nn.Module) -> bool:
    """True if `shard` has cut the weights of `model`. No communication."""
    return isinstance(model, FSDPModule)


def has_shards(model: nn.Module) -> bool:
    """True if a parameter of `model` is in shards, so that no rank has the whole model. No communication."""
    return is_sharded(model) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def describe_sharding(model: nn.Module) -> dict[str, str]:
    """A row of the start table if the model is sharded, else an empty dict. No communication."""
    if not is_sharded(model):
        return {}
    asked, parts = model.shards.asked, len(model.shards.parts)
    instead = "" if asked.engine == "FSDP2" else f" (instead of {asked.engine}, which shards alike)"
    copies = f", in {asked.num_replicas} replicas" if asked.num_replicas > 1 else ""
    kept = (
        "in both passes"
        if asked.reshard_after_forward
        else "kept from the forward to the backward pass"
    )
    text = (
        f"FSDP2{instead}: weights, gradients and optimizer states in "
        f"{world_size() // asked.num_replicas} shards{copies}"
    )
    return {
        "sharding": f"{text}; gathered {kept}, one of {parts} parts of the model after the other"
    }


def shard_model(model: nn.Module, dtype: torch.dtype) -> None:
    """If the launch asked for it, convert a model on the host to `dtype` and shard it in place. A collective.

    Weights come from rank 0, as with DDP. They move to the device in parts, so that none ever holds
    the whole model. From here on, a forward pass is a collective; see `alone` and `shared_passes`.
    A model that has forward passes beside `forward` names these methods in `forward_methods`.
    """
    if _begun is None:
        return
    model.to("cpu", dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
        dist.broadcast(parameter.data, 0, group=host_group())
    meta = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
        for parameter in model.parameters()
    }
    model.shards = Shards(model, copy.deepcopy(model, meta), *_begun)


def check_all_sharded(model: nn.Module) -> None:
    """Raise `Refused` if a sharded model has got weights since, whose gradients nothing would send.
    No communication.
    """
    added = [
        name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)
    ]
    if is_sharded(model) and added:
        raise Refused(
            f"{added[0]} was added to the model after prepare_layers, which shards it: add it "
            "before"
        )


class SelfSharded(nn.Module):
    """A module that cuts its own parameters over all ranks, whether the rest of the model is in
    shards or not.

    Its backward pass makes their gradients from the samples of all ranks. An optimizer has them in
    groups of their own, in one process too, so that its groups do not depend on the layout.
    """

    @staticmethod
    def shard_rows(rows: Tensor, num_rows: int) -> nn.Parameter:
        """A parameter [num_rows, ...] of which this rank has `rows`, as torch's `Shard(0)` cuts.
        Whole in one process.
        """
        if world_size() == 1:
            return nn.Parameter(rows)
        group: Any = dist.group.WORLD
        mesh = DeviceMesh.from_group(group, rows.device.type, mesh_dim_names=("rows",))
        shape = torch.Size([num_rows, *rows.shape[1:]])
        return nn.Parameter(
            DTensor.from_local(rows, mesh, [Shard(0)], shape=shape, stride=rows.stride())
        )


@contextmanager
def hide_shards(model: nn.Module) -> Iterator[None]:
    """In this context, a model does not have its parameters that are in shards.

    So DDP leaves out their gradients, which are of all ranks already, and Accelerate does not
    refuse to wrap the model.
    """
    shards = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                shards.append((module, name, parameter))
    for module, name, _ in shards:
        # Rather than removed, which would change the order of parameters.
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, parameter in shards:
            module._parameters[name] = parameter


def build_unsharded(model: nn.Module, tensors: Tensors) -> nn.Module:
    """A whole copy of a sharded model on the host, with these weights and statistics. No communication."""
    plain = copy.deepcopy(model.shards.plain)
    plain.load_state_dict(tensors, assign=True)
    return plain.train(model.training)


def clone_model(model: nn.Module) -> nn.Module:
    """A second sharded model with the same weights, for their moving average."""
    other = copy.deepcopy(model.shards.plain)
    other.shards = Shards(other, model.shards.plain, model.shards.asked, model.shards.mesh)
    other.load_state_dict(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True
    )
    return other.requires_grad_(False)


def get_full_tensor(tensor: Tensor) -> Tensor:
    """The tensor without shards, on its device. A collective if it has some."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, or the tensor itself. No communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists that torch's `foreach` functions take: whole ones, and those in shards
    of the same mesh.
    """
    found = defaultdict(list)
    for tensor in tensors:
        found[getattr(tensor, "device_mesh", None)].append(tensor)
    return [*found.values()]


def from_local(shard: Tensor, like: DTensor) -> DTensor:
    """A tensor cut as `like` is, of which this rank has `shard`. No communication."""
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def get_total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all tensors together, whole or in shards; without a wait. A collective if some
    are in shards.
    """
    norms = [
        get_full_tensor(torch.nn.utils.get_total_norm(part))
        for part in group_by_mesh(tensors) or [[]]
    ]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def shard_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    """This rank's shard of a whole tensor, which every rank has, cut as `like` is. No communication."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def load_full_tensors(model: nn.Module, tensors: Tensors) -> None:
    """Load whole tensors into a model, sharded or not. No communication."""
    state = model.state_dict()
    model.load_state_dict(
        {name: shard_like(tensor, state.get(name)) for name, tensor in tensors.items()}
    )


def gather_full_tensors(tensors: Tensors) -> Tensors:
    """Whole copies in the host memory of the main process, {} on the others; made one by one. A
    collective.
    """
    gathered = ((name, get_full_tensor(tensor.detach())) for name, tensor in tensors.items())
    return {name: tensor.to("cpu", copy=True) for name, tensor in gathered if is_main()}


@contextmanager
def skip_communication(model: nn.Module) -> Iterator[None]:
    """In this context, passes of a sharded model wait for no other rank, and take the memory that
    they would take.

    What they compute is meaningless: in place of another rank's shard stands a copy of this rank's
    own. For a trial that some ranks may leave by an exception.
    """
    if not is_sharded(model):
        yield
        return
    model.shards.is_alone = True
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.shards.is_alone = False
        model.set_requires_all_reduce(True)
        with suppress(AttributeError):  # of a model that has not made a pass yet
            model.reset_iter_state()


@contextmanager
def join_uneven_batches(model: nn.Module, loader: DataLoader) -> Iterator[Any]:
    """The loader for an evaluation of a sharded model: a rank that has no batch left helps the
    others to gather weights.
    """
    if not is_sharded(model):
        yield loader
        return
    shards = model.shards
    for part in shards.parts:
        part.set_reshard_after_forward(True, recurse=False)
    shards.is_told = True
    try:
        yield _SharedLoader(loader, shards)
    finally:  # no part is gathered, and parts are kept as in training
        shards.is_told = False
        for number, part in enumerate(shards.parts):
            part.reshard()
            part.set_reshard_after_forward(
                number > 0 and shards.asked.reshard_after_forward, recurse=False
            )


class Shards:
    """How a model is cut into parts, each of whose weights are gathered in one collective; part 0
    is what no block has.
    """

    def __init__(
        self, model: nn.Module, plain: nn.Module, asked: Sharding, mesh: DeviceMesh
    ) -> None:
        # Plain: a copy from before, without weights.
        self.plain, self.asked, self.mesh = plain, asked, mesh
        self.is_alone = self.is_told = self.some_are_done = False
        blocks = find_blocks(model)
        for part in (*blocks, model):
            part.register_forward_hook(_without_views)
        try:
            for block in blocks:
                fully_shard(
                    block, mesh=mesh, reshard_after_forward=self.asked.reshard_after_forward
                )
            # A root's backward follows at once.
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
        except (ValueError, NotImplementedError) as error:  # such as a scalar parameter
            raise Refused(f"{type(plain).__name__} can't be sharded: {error}") from None
        for name in getattr(model, "forward_methods", ()):
            register_fsdp_forward_method(model, name)
        for layer in model.modules():
            if type(layer) is nn.Linear:
                change_class(layer, _Linear)
        self.parts = [model, *blocks]
        for number, part in enumerate(self.parts):
            part.set_custom_all_gather(_Gather(self, number))
            part.set_custom_reduce_scatter(_Scatter(self))

    def tell(self, number: int | None) -> int | None:
        """Agree with the ranks that have no batch left on the part that is gathered next, if any. A
        collective.
        """
        mine = torch.tensor([0, 0, 0] if number is None else [1, number, number * number])
        # One small sum: it is part of each forward pass.
        active, total, squares = reduce_counts(mine).tolist()
        self.some_are_done = active < world_size()
        if active * squares != total * total:  # equal numbers alone have no variance
            raise Refused(
                "the processes evaluate different parts of the model: each pass has to run the "
                "same blocks"
            )
        return total // active if active else None


class _SharedLoader:
    """A loader whose end is reached on all ranks together."""

    def __init__(self, loader: DataLoader, shards: Shards) -> None:
        self._loader, self._shards = loader, shards

    def __iter__(self) -> Iterator:
        try:
            yield from self._loader
        finally:
            # Take part in what other ranks gather.
            while (number := self._shards.tell(None)) is not None:
                self._shards.is_told = False
                self._shards.parts[number].unshard()
                self._shards.parts[number].reshard()
                self._shards.is_told = True

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@dataclass
class _Collective:
    """What FSDP2 calls to communicate; see `torch.distributed.fsdp.FSDPModule.set_custom_all_gather`."""

    shards: Shards
    number: int = 0

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        if not self.shards.is_alone:
            if self.shards.is_told and (self.number == 0 or self.shards.some_are_done):
                self.shards.tell(self.number)
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        for place, row in enumerate(output_tensor.view(group.size(), -1)):
            if place != group.rank():  # there, the input is a view of the output
                row.copy_(input_tensor)
        return None


class _Scatter(_Collective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if not self.shards.is_alone:
            return reduce_scatter(
                output_tensor, input_tensor, group=group, op=op, async_op=async_op
            )
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        return None


class _Linear(nn.Linear):
    """A layer whose weight autograd does not keep in half precision: autocast's copy would stay
    until the backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        is_cast = torch.is_autocast_enabled(kind) and self.weight.dtype == torch.float32
        if not is_cast or torch.compiler.is_compiling():
            return super().forward(x)
        return _RecastLinear.apply(x.to(torch.get_autocast_dtype(kind)), self.weight, self.bias)


class _RecastLinear(torch.autograd.Function):
    """`F.linear` in the type of `x` [..., in]. Its backward pass casts the weight again, and
    computes what autograd's does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            (rows @ weight.to(x.dtype)).view(x.shape) if of_x else None,
            (rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype) if of_weight else None,
            rows.sum(0).to(weight.dtype) if of_bias else None,
        )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, inner ones first: modules in its lists of layers that are worth a
    collective of their own.

    Large blocks are divided into the blocks in them. Blocks that share parameters stay together, in
    what no block has.
    """
    sizes = {
        part: sum(parameter.numel() for parameter in part.parameters()) for part in model.modules()
    }
    places = Counter(
        id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    total = sizes[model]

    def blocks_in(parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            if sizes[child] < total * _SMALLEST:
                continue
            is_block = (
                type(parent) in _LISTS and not isinstance(child, _LISTS) and any(child.children())
            )
            is_block &= all(places[id(parameter)] == 1 for parameter in child.parameters())
            if not is_block or sizes[child] > total * _LARGEST:
                yield from blocks_in(child)
            if is_block:
                yield child

    found = list(dict.fromkeys(blocks_in(model)))
    while found and not {*model.parameters()} - {
        parameter for block in found for parameter in block.parameters()
    }:
        # The model itself has some, so that each pass begins by gathering these: see `Shards.tell`
        found.pop()
    return found


def _without_views(part: nn.Module, arguments: tuple, output: Any) -> Any:
    """The output of a part, without views: FSDP2 would miss the backward pass of a view that is
    then changed in place.
    """
    if type(output) in (tuple, list):
        return type(output)(_without_views(part, arguments, each) for each in output)
    is_view = isinstance(output, Tensor) and output._base is not None
    return output.clone() if is_view and output.requires_grad else output
