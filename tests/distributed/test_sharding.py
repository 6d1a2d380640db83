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


def build_vit(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return VisionTransformer(**SIZES).double()


def draw_images(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=generator)


def configure(**settings) -> None:
    sharding.configure(Sharding(**settings), torch.device("cpu"))


def build_sharded_vit() -> nn.Module:
    model = build_vit(dist.get_rank())  # all get the weights of rank 0
    sharding.shard_model(model, torch.float64)
    return model


def rank_evaluates(batches: tuple[int, ...], keeps_weights: bool) -> list[float]:
    """The mean logit of each of this rank's batches, of the model and then of its average after the
    model has moved.
    """
    configure(reshard_after_forward=not keeps_weights)
    model = build_sharded_vit()
    average = sharding.clone_model(model).eval()
    logits = []
    loader = [draw_images(2)] * batches[dist.get_rank()]
    for module in (model, average, model):
        with torch.no_grad(), sharding.join_uneven_batches(module, loader) as uneven_batches:
            logits += [module(batch).mean().item() for batch in uneven_batches]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1
    assert all(isinstance(parameter.data, DTensor) for parameter in model.parameters())
    return logits


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_ranks_evaluate_different_numbers_of_batches(processes, keeps_weights: bool) -> None:
    """None, one and three: nobody waits for ever, and each pass has the weights of its moment."""
    model = build_vit()
    with torch.no_grad():
        first = model(draw_images(2)).mean().item()
        for parameter in model.parameters():
            parameter += 0.2
        moved = model(draw_images(2)).mean().item()
    answers = processes.run(rank_evaluates, (0, 1, 3), keeps_weights, ranks=3)
    for count, answer in zip((0, 1, 3), answers, strict=True):
        expected = [first] * count + [first] * count + [moved] * count
        assert answer == pytest.approx(expected, rel=1e-12)


def get_gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def rank_tries() -> tuple[bool, bool, float]:
    """Passes of rank 0 alone, one of which fails half-way; then a pass of both ranks."""
    configure()
    model = build_sharded_vit()
    if dist.get_rank() == 0:
        with sharding.skip_communication(model):
            model(draw_images(2)).sum().backward()
        hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), sharding.skip_communication(model):
            model(draw_images(2))
        hook.remove()
    model.zero_grad()
    model(draw_images(2)).sum().backward()
    norm = sharding.get_total_norm(get_gradients(model))
    return isinstance(norm, DTensor), isinstance(model.head.weight.grad, DTensor), norm.item()


def test_a_trial_waits_for_no_rank_and_leaves_nothing_behind(processes) -> None:
    model = build_vit()
    model(draw_images(2)).sum().backward()
    norm = torch.nn.utils.get_total_norm(get_gradients(model))
    for answer in processes.run(rank_tries, ranks=2):
        assert answer == (False, True, pytest.approx(norm.item(), rel=1e-12))


def rank_computes_in_half() -> tuple[list, bool]:
    """Shapes of the tensors that autograd keeps in bf16, and True if all gradients equal a whole model's."""
    configure()
    plain = build_vit().float()
    model = build_sharded_vit().float()
    shapes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16:
            shapes.append(sorted(tensor.shape))
        return tensor

    hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
    for module, hooked in ((plain, contextlib.nullcontext()), (model, hooks)):
        with hooked, torch.autocast("cpu", torch.bfloat16):
            losses = module(draw_images(2).float()).float().square()
        losses.sum().backward()
    is_equal = True
    for actual, expected in zip(get_gradients(model), get_gradients(plain), strict=True):
        is_equal &= torch.equal(sharding.get_full_tensor(actual), expected)
    return shapes, is_equal


def test_no_half_precision_copy_waits_for_the_backward_pass(processes) -> None:
    """It would be as large as half the whole model on each device. The gradients are the same, bit
    for bit.
    """
    layers = [layer for layer in build_vit().modules() if isinstance(layer, nn.Linear)]
    matrices = [sorted(layer.weight.shape) for layer in layers]
    for shapes, is_equal in processes.run(rank_computes_in_half, ranks=2):
        assert is_equal and shapes
        assert all(shape not in matrices for shape in shapes)


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
    return [sharding.get_full_tensor(gradient).tolist() for gradient in get_gradients(model)]


def test_views_that_are_changed_in_place_have_their_gradients(processes) -> None:
    model = InPlace().double()
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    for gradients in processes.run(rank_changes_views, ranks=2):
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(gradient, dtype=torch.float64), parameter.grad)


def rank_asks_too_much() -> None:
    configure()
    model = build_sharded_vit()
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


def list_groups() -> list[list[int]]:
    configure(num_shards=2)
    assert sharding._configuration
    mesh = sharding._configuration.mesh
    return [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("replica", "shard")]


def test_neighbours_share_a_model_and_replicas_the_same_shard(processes) -> None:
    groups_by_rank = processes.run(list_groups, ranks=4)
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
    block_by_parameter = {}
    for block in reversed(blocks):
        block_by_parameter |= dict.fromkeys(block.parameters(), block)
    total = sum(parameter.numel() for parameter in model.parameters())
    sizes = Counter()
    for parameter, block in block_by_parameter.items():
        sizes[block] += parameter.numel()
    assert len(blocks) >= min_blocks
    assert max(sizes.values()) <= largest * total


def test_blocks_that_share_weights_stay_together() -> None:
    """Each pass begins with what no block has."""
    layers = [nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3)]
    model = nn.Sequential(*layers)
    assert find_blocks(model) == list(model)[:2]
    layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 1, 8) for _ in range(3)])
    layers[2].linear1.weight = layers[0].linear1.weight
    model = nn.ModuleDict({"layers": layers, "head": nn.Sequential(nn.Linear(4, 4))})
    assert find_blocks(model) == [layers[1]]
