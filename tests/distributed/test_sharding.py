"""Sharding: models in shards compute, are evaluated, copied and gathered as whole ones."""

import contextlib
from collections import Counter

import pytest
import timm
import torch
import torch.distributed as dist
from timm.models import VisionTransformer
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from common.distributed import sharding
from common.distributed.sharding import Sharding, find_blocks
from common.errors import Refused

SIZES = {
    "img_size": 8,
    "patch_size": 4,
    "embed_dim": 15,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 5,
}


def vit(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return VisionTransformer(**SIZES).double()


def images(count: int) -> torch.Tensor:
    return torch.randn(
        count, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def configure(**settings) -> None:
    sharding.configure(Sharding(**settings), torch.device("cpu"))


def sharded_vit() -> nn.Module:
    model = vit(dist.get_rank())  # all get the weights of rank 0
    sharding.shard_model(model, torch.float64)
    return model


def rank_evaluates(batches: tuple[int, ...], keeps_weights: bool) -> list[float]:
    """The mean logit of each of this rank's batches, of the model and then of its average after the
    model has moved.
    """
    configure(reshard_after_forward=not keeps_weights)
    model = sharded_vit()
    average = sharding.clone_model(model).eval()
    logits = []
    for module in (model, average, model):
        with (
            torch.no_grad(),
            sharding.join_uneven_batches(module, [images(2)] * batches[dist.get_rank()]) as loader,
        ):
            logits += [module(batch).mean().item() for batch in loader]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1
    assert all(isinstance(parameter.data, DTensor) for parameter in model.parameters())
    return logits


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_ranks_evaluate_different_numbers_of_batches(processes, keeps_weights: bool) -> None:
    """None, one and three: nobody waits for ever, and each pass has the weights of its moment."""
    model = vit()
    with torch.no_grad():
        first = model(images(2)).mean().item()
        for parameter in model.parameters():
            parameter += 0.2
        moved = model(images(2)).mean().item()
    answers = processes.run(rank_evaluates, (0, 1, 3), keeps_weights, ranks=3)
    for count, answer in zip((0, 1, 3), answers, strict=True):
        assert answer == pytest.approx(
            [first] * count + [first] * count + [moved] * count, rel=1e-12
        )


def rank_tries() -> tuple[bool, bool, float]:
    """Passes of rank 0 alone, one of which fails half-way; then a pass of both ranks."""
    configure()
    model = sharded_vit()
    if dist.get_rank() == 0:
        with sharding.skip_communication(model):
            model(images(2)).sum().backward()
        hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), sharding.skip_communication(model):
            model(images(2))
        hook.remove()
    model.zero_grad()
    model(images(2)).sum().backward()
    norm = sharding.get_total_norm([parameter.grad for parameter in model.parameters()])
    return isinstance(norm, DTensor), isinstance(model.head.weight.grad, DTensor), norm.item()


def test_a_trial_waits_for_no_rank_and_leaves_nothing_behind(processes) -> None:
    model = vit()
    model(images(2)).sum().backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    for answer in processes.run(rank_tries, ranks=2):
        assert answer == (False, True, pytest.approx(norm.item(), rel=1e-12))


def rank_computes_in_half() -> tuple[list, bool]:
    """Shapes of the tensors that autograd keeps in bf16, and True if all gradients equal a whole model's."""
    configure()
    plain = vit().float()
    model = sharded_vit().float()
    shapes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        shapes.extend([sorted(tensor.shape)] * (tensor.dtype == torch.bfloat16))
        return tensor

    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
    for module, hooked in ((plain, contextlib.nullcontext()), (model, hooks)):
        with hooked, torch.autocast("cpu", torch.bfloat16):
            losses = module(images(2).float()).float().square()
        losses.sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return shapes, all(
        torch.equal(sharding.get_full_tensor(actual.grad), expected.grad)
        for actual, expected in pairs
    )


def test_no_half_precision_copy_waits_for_the_backward_pass(processes) -> None:
    """It would be as large as half the whole model on each device. The gradients are the same, bit
    for bit.
    """
    matrices = [
        sorted(layer.weight.shape) for layer in vit().modules() if isinstance(layer, nn.Linear)
    ]
    for shapes, is_equal in processes.run(rank_computes_in_half, ranks=2):
        assert is_equal and shapes and not [shape for shape in shapes if shape in matrices]


class View(nn.Module):
    """A block whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[:, :4]


class InPlace(nn.Module):
    """Adds to the output of each block in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(View() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
        return self.head(x)


def rank_changes_views() -> list[list]:
    configure()
    model = InPlace()
    sharding.shard_model(model, torch.float64)
    assert len(model.shards.units) == 4
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    return [sharding.get_full_tensor(parameter.grad).tolist() for parameter in model.parameters()]


def test_views_that_are_changed_in_place_have_their_gradients(processes) -> None:
    model = InPlace().double()
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    for gradients in processes.run(rank_changes_views, ranks=2):
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), parameter.grad)


def rank_asks_too_much() -> None:
    configure()
    model = sharded_vit()
    scalar = nn.Identity()
    sharding.check_all_sharded(model)
    model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(
        Refused, match=r"^scale was added to the model after prepare_layers, which shards it"
    ):
        sharding.check_all_sharded(model)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(Refused, match="Identity can't be sharded"):
        sharding.shard_model(scalar, torch.float32)


def test_a_weight_that_would_not_be_sharded_is_refused(processes) -> None:
    """Each rank would train its own."""
    processes.run(rank_asks_too_much, ranks=2)


def groups() -> list[list[int]]:
    configure(num_shards=2)
    assert sharding._configuration
    return [
        dist.get_process_group_ranks(sharding._configuration.mesh.get_group(name))
        for name in ("replica", "shard")
    ]


def test_neighbours_share_a_model_and_replicas_the_same_shard(processes) -> None:
    groups_by_rank = processes.run(groups, ranks=4)
    assert groups_by_rank == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


@pytest.mark.parametrize(
    "name, min_blocks, largest",
    [
        ("vit_tiny_patch16_224", 12, 0.09),
        ("resnet50", 16, 0.25),
        ("convnext_atto", 12, 0.25),
        ("swin_tiny_patch4_window7_224", 12, 0.26),
        ("efficientnet_b0", 15, 0.14),
    ],
)
def test_models_are_cut_into_their_blocks(name: str, min_blocks: int, largest: float) -> None:
    """So that no part is much larger than one block."""
    with torch.device("meta"):
        model = timm.create_model(name)
    blocks = find_blocks(model)
    sizes = Counter()
    inner = {id(parameter): block for block in reversed(blocks) for parameter in block.parameters()}
    for parameter in model.parameters():
        sizes[inner.get(id(parameter))] += parameter.numel()
    assert len(blocks) >= min_blocks
    assert (
        max(size for block, size in sizes.items() if block is not None) <= largest * sizes.total()
    )


def test_blocks_that_share_weights_stay_together() -> None:
    """Each pass begins with what no block has."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3)))
    assert find_blocks(model) == list(model)[:2]
    layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3)])
    layers[2].linear1.weight = layers[0].linear1.weight
    assert find_blocks(
        nn.ModuleDict({"layers": layers, "head": nn.Sequential(nn.Linear(4, 4))})
    ) == [layers[1]]
