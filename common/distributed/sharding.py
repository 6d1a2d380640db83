"""Sharding: each process keeps one shard of all weights, gradients and optimizer states (torch's FSDP2).

The Accelerate file asks for it: `launch.start` calls `configure`, and `prepare_layers` then shards
the model. A tensor in shards is a DTensor. Everything that leaves a run (checkpoints, `best/`, numbers)
is whole and has plain names.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

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
all_gather: Callable[..., Any]
reduce_scatter: Callable[..., Any]
if hasattr(dist, "all_gather_single"):  # since torch 2.14
    all_gather = dist.all_gather_single
    reduce_scatter = dist.reduce_scatter_single
else:
    all_gather = dist.all_gather_into_tensor
    reduce_scatter = dist.reduce_scatter_tensor
# Shares of a model's parameters: larger blocks are divided, smaller ones gathered together.
_MAX_SHARE = 1 / 16
_MIN_SHARE = 1 / 1000


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


class _Configuration(NamedTuple):
    """How this run shards models, and its processes."""

    sharding: Sharding
    mesh: DeviceMesh


_configuration: _Configuration | None = None


def configure(sharding: Sharding | None, device: torch.device) -> None:
    """From here on, shard models as the launch asked. One process shards nothing. A collective."""
    global _configuration
    _configuration = None
    if sharding is None or world_size() == 1:
        return
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise Refused(f"torch {torch.__version__} is too old to shard a model: take 2.14 or newer")
    ranks = torch.arange(world_size())
    groups: Any = dist.group.WORLD
    if sharding.num_replicas > 1:
        ranks = ranks.view(sharding.num_replicas, sharding.num_shards)
        # Every rank takes part in making every group.
        replica_groups = [subgroup(column.tolist()) for column in ranks.T]
        shard_groups = [subgroup(row.tolist()) for row in ranks]
        replica_index, shard_index = divmod(rank(), sharding.num_shards)
        groups = [replica_groups[shard_index], shard_groups[replica_index]]
    names = ("replica", "shard")[-ranks.dim() :]
    mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)
    _configuration = _Configuration(sharding, mesh)


def is_sharded(model: nn.Module) -> bool:
    """True if `shard_model` has cut the weights of `model`. No communication."""
    return isinstance(model, FSDPModule)


def has_shards(model: nn.Module) -> bool:
    """True if a parameter of `model` is in shards, so that no rank has the whole model. No communication."""
    if is_sharded(model):
        return True
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def describe_sharding(model: nn.Module) -> dict[str, str]:
    """A row of the start table if the model is sharded, else an empty dict. No communication."""
    if not is_sharded(model):
        return {}
    sharding = model.shards.sharding
    num_replicas = sharding.num_replicas
    text = "FSDP2"
    if sharding.engine != "FSDP2":
        text += f" (instead of {sharding.engine}, which shards alike)"
    text += f": weights, gradients and optimizer states in {world_size() // num_replicas} shards"
    if num_replicas > 1:
        text += f", in {num_replicas} replicas"
    gathered = "kept from the forward to the backward pass"
    if sharding.reshard_after_forward:
        gathered = "in both passes"
    num_units = len(model.shards.units)
    text += f"; gathered {gathered}, one of {num_units} parts of the model after the other"
    return {"sharding": text}


def shard_model(model: nn.Module, dtype: torch.dtype) -> None:
    """If the launch asked for it, convert a model on the host to `dtype` and shard it in place. A collective.

    Weights come from rank 0, as with DDP. They move to the device unit by unit, so that none ever
    holds the whole model. From here on, a forward pass is a collective; see `skip_communication`
    and `join_uneven_batches`. A model that has forward passes beside `forward` names these methods
    in `forward_methods`.
    """
    if _configuration is None:
        return
    model.to("cpu", dtype)
    without_data = {}
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
        dist.broadcast(parameter.data, 0, group=host_group())
        meta_tensor = torch.empty_like(parameter, device="meta")
        without_data[id(parameter)] = nn.Parameter(meta_tensor, parameter.requires_grad)
    unsharded = copy.deepcopy(model, without_data)
    model.shards = ModelShards(model, unsharded, *_configuration)


def check_all_sharded(model: nn.Module) -> None:
    """Raise `Refused` if a sharded model has got weights since, whose gradients nothing would send.

    No communication.
    """
    if not is_sharded(model):
        return
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise Refused(
                f"{name} was added to the model after prepare_layers, which shards it: add it before"
            )


class SelfSharded(nn.Module):
    """A module that cuts its own parameters over all ranks, also if the rest of the model is whole.

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
    unsharded = copy.deepcopy(model.shards.unsharded)
    unsharded.load_state_dict(tensors, assign=True)
    return unsharded.train(model.training)


def clone_model(model: nn.Module) -> nn.Module:
    """A second sharded model with the same weights, for their moving average."""
    shards = model.shards
    clone = copy.deepcopy(shards.unsharded)
    clone.shards = ModelShards(clone, shards.unsharded, shards.sharding, shards.mesh)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clone.load_state_dict(weights, assign=True)
    return clone.requires_grad_(False)


def get_full_tensor(tensor: Tensor) -> Tensor:
    """The tensor without shards, on its device. A collective if it has some."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def get_local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard, or the tensor itself. No communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def group_by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists that torch's `foreach` functions take.

    Whole tensors are in one list, and those in shards of a mesh in another.
    """
    groups = defaultdict(list)
    for tensor in tensors:
        groups[getattr(tensor, "device_mesh", None)].append(tensor)
    return list(groups.values())


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
    """The L2 norm of all tensors together, whole or in shards; without a wait.

    A collective if some are in shards.
    """
    groups = group_by_mesh(tensors) or [[]]
    norms = [get_full_tensor(torch.nn.utils.get_total_norm(group)) for group in groups]
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms))


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
    shards = {name: shard_like(tensor, state.get(name)) for name, tensor in tensors.items()}
    model.load_state_dict(shards)


def gather_full_tensors(tensors: Tensors) -> Tensors:
    """Whole copies in the host memory of the main process, {} on the others; made one by one.

    A collective.
    """
    copies = {}
    for name, tensor in tensors.items():
        full_tensor = get_full_tensor(tensor.detach())
        if is_main():
            copies[name] = full_tensor.to("cpu", copy=True)
    return copies


@contextmanager
def skip_communication(model: nn.Module) -> Iterator[None]:
    """In this context, passes of a sharded model wait for no other rank, and take the same memory.

    What they compute is meaningless: in place of another rank's shard stands a copy of this rank's
    own. For a trial that some ranks may leave by an exception.
    """
    if not is_sharded(model):
        yield
        return
    model.shards.skips_communication = True
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.shards.skips_communication = False
        model.set_requires_all_reduce(True)
        with suppress(AttributeError):  # of a model that has not made a pass yet
            model.reset_iter_state()


@contextmanager
def join_uneven_batches(model: nn.Module, loader: DataLoader) -> Iterator[Any]:
    """The loader for an evaluation of a sharded model, in which ranks may have unequal numbers of batches.

    A rank that has no batch left helps the others to gather weights.
    """
    if not is_sharded(model):
        yield loader
        return
    shards = model.shards
    for unit in shards.units:
        unit.set_reshard_after_forward(True, recurse=False)
    shards.is_joined = True
    try:
        yield _JoinedLoader(loader, shards)
    finally:  # no unit is gathered, and units are kept as in training
        shards.is_joined = False
        for unit in shards.units:
            unit.reshard()
            unit.set_reshard_after_forward(shards.sharding.reshard_after_forward, recurse=False)
        model.set_reshard_after_forward(False, recurse=False)


class ModelShards:
    """How a model is cut into FSDP units, each of whose weights are gathered in one collective.

    Unit 0 is what no block has.
    """

    def __init__(
        self, model: nn.Module, unsharded: nn.Module, sharding: Sharding, mesh: DeviceMesh
    ) -> None:
        self.unsharded = unsharded  # a copy from before, without weights
        self.sharding = sharding
        self.mesh = mesh
        self.skips_communication = False
        self.is_joined = False  # ranks may have unequal numbers of batches
        self.has_finished_ranks = False  # some ranks have no batch left
        blocks = find_blocks(model)
        for block in blocks + [model]:
            block.register_forward_hook(_without_views)
        try:
            for block in blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward)
            # A root's backward follows at once.
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
        except (ValueError, NotImplementedError) as error:  # such as a scalar parameter
            raise Refused(f"{type(unsharded).__name__} can't be sharded: {error}") from None
        for name in getattr(model, "forward_methods", ()):
            register_fsdp_forward_method(model, name)
        for layer in model.modules():
            if type(layer) is nn.Linear:
                change_class(layer, _Linear)
        self.units = [model] + blocks
        for index, unit in enumerate(self.units):
            unit.set_custom_all_gather(_AllGather(self, index))
            unit.set_custom_reduce_scatter(_ReduceScatter(self))

    def agree_on_unit(self, index: int | None) -> int | None:
        """Agree with the ranks that have no batch left on the unit that is gathered next, if any.

        `index` is this rank's next unit, None if it has no batch left. A collective.
        """
        message = [0, 0, 0] if index is None else [1, index, index * index]
        # One small sum: it is part of each forward pass.
        num_active, total, squares = reduce_counts(torch.tensor(message)).tolist()
        self.has_finished_ranks = num_active < world_size()
        if num_active * squares != total * total:  # equal numbers alone have no variance
            raise Refused(
                "the processes evaluate different parts of the model: each pass has to run the "
                "same blocks"
            )
        return total // num_active if num_active else None


class _JoinedLoader:
    """A loader whose end is reached on all ranks together."""

    def __init__(self, loader: DataLoader, shards: ModelShards) -> None:
        self._loader = loader
        self._shards = shards

    def __iter__(self) -> Iterator:
        try:
            yield from self._loader
        finally:
            # Take part in what other ranks gather.
            shards = self._shards
            while (index := shards.agree_on_unit(None)) is not None:
                shards.is_joined = False
                shards.units[index].unshard()
                shards.units[index].reshard()
                shards.is_joined = True

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@dataclass
class _Collective:
    """What FSDP2 calls to communicate; see `torch.distributed.fsdp.FSDPModule.set_custom_all_gather`."""

    shards: ModelShards
    unit_index: int = 0

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        shards = self.shards
        if not shards.skips_communication:
            if shards.is_joined and (self.unit_index == 0 or shards.has_finished_ranks):
                shards.agree_on_unit(self.unit_index)
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        for index, shard in enumerate(output_tensor.view(group.size(), -1)):
            if index != group.rank():  # this rank's input is a view of the output
                shard.copy_(input_tensor)
        return None


class _ReduceScatter(_Collective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if not self.shards.skips_communication:
            return reduce_scatter(
                output_tensor, input_tensor, group=group, op=op, async_op=async_op
            )
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
        return None


class _Linear(nn.Linear):
    """A layer whose weight autograd does not keep in half precision.

    Autocast's copy would stay until the backward pass.
    """

    def forward(self, x: Tensor) -> Tensor:
        device_type = x.device.type
        if (
            not torch.is_autocast_enabled(device_type)
            or self.weight.dtype != torch.float32
            or torch.compiler.is_compiling()
        ):
            return super().forward(x)
        dtype = torch.get_autocast_dtype(device_type)
        return _RecastLinear.apply(x.to(dtype), self.weight, self.bias)


class _RecastLinear(torch.autograd.Function):
    """`F.linear` in the type of `x` [..., in].

    Its backward pass casts the weight again, and computes what autograd's does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        cast_bias = None if bias is None else bias.to(x.dtype)
        return F.linear(x, weight.to(x.dtype), cast_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = None
        grad_weight = None
        grad_bias = None
        grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
        if needs_x:
            grad_x = (grad_rows @ weight.to(x.dtype)).view(x.shape)
        if needs_weight:
            grad_weight = (grad_rows.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
        if needs_bias:
            grad_bias = grad_rows.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_bias


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, inner ones first: modules in its lists of layers.

    A block is worth a collective of its own. Large blocks are divided into the blocks in them.
    Blocks that share parameters stay together, in what no block has.
    """
    blocks = list(dict.fromkeys(_BlockFinder(model).find_in(model)))
    while blocks and not _has_own_parameters(model, blocks):
        # The model itself has some, so that each pass begins by gathering these: see
        # `ModelShards.agree_on_unit`.
        blocks.pop()
    return blocks


class _BlockFinder:
    """Finds the blocks below a module of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._sizes = {}
        for module in model.modules():
            self._sizes[module] = sum(parameter.numel() for parameter in module.parameters())
        self._total = self._sizes[model]
        named_parameters = model.named_parameters(remove_duplicate=False)
        self._uses = Counter(id(parameter) for _, parameter in named_parameters)

    def find_in(self, parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            size = self._sizes[child]
            if size < self._total * _MIN_SHARE:
                continue
            is_block = self._is_block(child, parent)
            if not is_block or size > self._total * _MAX_SHARE:
                yield from self.find_in(child)
            if is_block:
                yield child

    def _is_block(self, module: nn.Module, parent: nn.Module) -> bool:
        """True for a module of a list, with modules in it, that shares no parameter."""
        if type(parent) not in _LISTS or isinstance(module, _LISTS):
            return False
        if not any(module.children()):
            return False
        return all(self._uses[id(parameter)] == 1 for parameter in module.parameters())


def _has_own_parameters(model: nn.Module, blocks: list[nn.Module]) -> bool:
    """True if `model` has parameters that no block has."""
    remaining = set(model.parameters())
    for block in blocks:
        remaining.difference_update(block.parameters())
    return bool(remaining)


def _without_views(module: nn.Module, args: tuple, output: Any) -> Any:
    """The output of a module, without views.

    FSDP2 would miss the backward pass of a view that is then changed in place.
    """
    if type(output) in (tuple, list):
        return type(output)(_without_views(module, args, item) for item in output)
    if isinstance(output, Tensor) and output._base is not None and output.requires_grad:
        return output.clone()
    return output
