"""Batch norm takes its statistics over the samples that its mode promises, and updates them per step."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from common.errors import Refused
from common.training import batch_norm
from common.training.batch_norm import (
    convert_batch_norm,
    discard_statistics,
    update_running_statistics,
)
from tests.harness.processes import Processes


class Rows(nn.Module):
    """Normalises the tokens of all samples as rows, as LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.flatten(2).transpose(1, 2).flatten(0, 1)).view(len(x), -1)


def build_small_model() -> nn.Sequential:
    """Convolution, plain and activated batch norms with parameters far from their start, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 6, 3),
        BatchNormAct2d(6, act_layer=nn.PReLU),
        Rows(),
        nn.Linear(96, 5),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model.double()


def make_images(num_images: int) -> torch.Tensor:
    """[num_images, 3, 8, 8] float64 images."""
    generator = torch.Generator().manual_seed(1)
    return 1 + torch.randn(num_images, 3, 8, 8, dtype=torch.float64, generator=generator)


def compute_loss(outputs: torch.Tensor, first: int) -> torch.Tensor:
    """A sum over samples that weights each differently; `first` is the index of the first one."""
    weights = torch.arange(first, first + len(outputs), dtype=outputs.dtype)
    return (outputs.square().sum(1) * weights).sum()


def compute_reference(groups: list[int]) -> dict[str, torch.Tensor]:
    """Two unlike steps of the plain model over consecutive groups of samples.

    Running statistics are the mean over all groups of a step.
    """
    model = build_small_model()
    x = make_images(sum(groups)).requires_grad_()
    for step in (1, 2):
        model.zero_grad()
        x.grad = None
        start = copy.deepcopy(model.state_dict())
        states = []
        outputs = []
        first = 0
        for size in groups:
            model.load_state_dict(start)
            outputs.append(model(step * x[first : first + size]))
            states.append(copy.deepcopy(model.state_dict()))
            compute_loss(outputs[-1], first).backward()
            first += size
        mean = {}
        for name in start:
            mean[name] = torch.stack([state[name].double() for state in states]).mean(0)
        model.load_state_dict(mean)
    return collect_results(model, outputs, x)


def collect_results(
    model: nn.Module, outputs: list[torch.Tensor], x: torch.Tensor
) -> dict[str, torch.Tensor]:
    results = {"outputs": torch.cat(outputs).detach(), "x": x.grad}
    return results | get_gradients(model) | model.state_dict()


def get_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}


def make_steps(
    mode: str, shares: list[int], micro_batch_size: int, group_size: int = 0
) -> dict[str, torch.Tensor]:
    """What `compute_reference` does, with shares[r] samples on rank r; results of all ranks."""
    model = build_small_model()
    assert convert_batch_norm(model, mode, group_size=group_size) == 3
    rank = dist.get_rank() if dist.is_initialized() else 0
    low = sum(shares[:rank])
    high = low + shares[rank]
    x = make_images(sum(shares))[low:high].requires_grad_()
    for step in (1, 2):
        model.zero_grad()
        x.grad = None
        outputs = []
        for first in range(low, high, micro_batch_size):
            last = min(first + micro_batch_size, high)
            outputs.append(model(step * x[first - low : last - low]))
            compute_loss(outputs[-1], first).backward()
        update_running_statistics(model)
    results = collect_results(model, outputs, x)
    if dist.is_initialized():
        results = join_ranks(results)
    return results


def join_ranks(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of all ranks, sums of gradients, and statistics, which have to be the same."""
    by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, results)
    joined = {}
    for name in results:
        values = [rank_results[name] for rank_results in by_rank]
        if name in ("outputs", "x"):
            joined[name] = torch.cat(values)
        elif name.startswith("gradient"):
            joined[name] = sum(values)
        else:
            joined[name] = values[0]
            same = all(torch.equal(value, values[0]) for value in values)
            assert same, f"{name} differs between ranks"
    return joined


def assert_equal(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name] - value).abs().max() / value.abs().max().clamp(min=1)
        assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize("shares", [[7], [4, 5, 3]])
@pytest.mark.parametrize("mode", ["global", "node"])
def test_shared_statistics_equal_those_of_the_whole_batch(
    processes: Processes, mode: str, shares: list[int]
) -> None:
    expected = compute_reference([sum(shares)])
    for actual in processes.run(make_steps, mode, shares, 100, ranks=len(shares)):
        assert_equal(actual, expected, 1e-10)


def normalize_far_from_zero() -> list:
    """A rank's samples and their outputs, and memory format and types of a model in bf16."""
    layer = nn.BatchNorm1d(4)
    convert_batch_norm(layer, "global")
    maps = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    convert_batch_norm(maps, "global")
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(dist.get_rank())) + 3000
    maps.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        y = maps(torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last))
    y.sum().backward()
    is_channels_last = y.is_contiguous(memory_format=torch.channels_last)
    types = (is_channels_last, y.dtype, maps[1].statistic_sums.dtype, maps[1].weight.grad.dtype)
    return [x, layer(x).detach(), types]


def test_shared_statistics_lose_no_digits_and_no_memory_format(processes: Processes) -> None:
    """Where the mean is large, and in bf16."""
    x, y, types = zip(*processes.run(normalize_far_from_zero, ranks=2), strict=True)
    expected = nn.BatchNorm1d(4).double()(torch.cat(x).double())
    assert (torch.cat(y) - expected).abs().max() < 1e-3  # E[x²] - E[x]² would be off by 1
    assert types == ((True, torch.bfloat16, torch.float32, torch.float32),) * 2


def make_steps_on_nodes(shares: list[int]) -> dict[str, torch.Tensor]:
    with mock.patch("socket.gethostname", return_value="b" if dist.get_rank() == 2 else "a"):
        return make_steps("node", shares, 100)


def test_node_statistics_stay_on_the_node(processes: Processes) -> None:
    actual = processes.run(make_steps_on_nodes, [4, 5, 6], ranks=3)[0]
    expected = compute_reference([9, 6])
    # The running statistics of the nodes are averaged by their ranks: two of three have seen the
    # first node's.
    for name in [name for name in expected if "running" in name]:
        del expected[name], actual[name]
    assert_equal(actual, expected, 1e-10)


@pytest.mark.parametrize("mode, num_samples, size", [("group", 24, 12), ("local", 12, 4)])
def test_one_process_has_the_statistics_of_groups(mode: str, num_samples: int, size: int) -> None:
    """The groups of local statistics are micro-batches, as of plain batch norm.

    Layouts: tests/recipes/test_layout.py.
    """
    actual = make_steps(mode, [num_samples], micro_batch_size=size, group_size=4)
    assert_equal(actual, compute_reference([4] * (num_samples // 4)), 1e-12)


def test_what_can_not_be_converted_is_refused() -> None:
    class Custom(nn.BatchNorm2d):
        pass

    for unknown in (Custom(3), nn.BatchNorm2d(3, track_running_stats=False)):
        with pytest.raises(Refused, match=r"1 .*can't be converted"):
            convert_batch_norm(nn.Sequential(nn.Conv2d(3, 3, 1), unknown), "local")
    model = build_small_model()
    convert_batch_norm(model, "group", group_size=4)
    with pytest.raises(Refused, match=r"6 samples .* norm_batch_size 4"):
        model(make_images(6))
    model.eval()(make_images(6))


def test_frozen_layers_are_told_and_form_no_groups() -> None:
    model = build_small_model()
    with pytest.raises(Refused, match="before prepare_layers"):
        batch_norm.freeze_modules(model)
    convert_batch_norm(model.requires_grad_(True), "group", group_size=2)
    layers = [layer for layer in model.modules() if isinstance(layer, batch_norm.StepBatchNorm)]
    assert batch_norm.get_group_size(model) == 2
    assert batch_norm.get_undivided_flag(model) == ""
    layers[0].requires_grad_(False)
    assert (
        "; 1 layers with frozen weights still update running statistics"
        in batch_norm.describe_batch_norm(model)
    )
    batch_norm.freeze_modules(layers[0])
    assert batch_norm.describe_batch_norm(model).endswith(f"; 1 of {len(layers)} layers are frozen")
    batch_norm.freeze_modules(model)
    assert batch_norm.get_group_size(model) == 1
    assert batch_norm.describe_batch_norm(model) == "frozen: all layers are in frozen stages"


def test_frozen_keeps_statistics_and_trains_weight_and_bias() -> None:
    model = build_small_model()
    plain = build_small_model().eval()
    convert_batch_norm(model, "frozen")
    before = copy.deepcopy(model.state_dict())
    for trained in (model.train(), plain):
        compute_loss(trained(make_images(4)), 0).backward()
    update_running_statistics(model)
    assert_equal(model.state_dict(), before, 0)
    assert_equal(get_gradients(model), get_gradients(plain), 1e-12)
    assert model[1].weight.grad.abs().max() > 0


def test_an_evaluation_or_a_discarded_pass_moves_no_statistics() -> None:
    model = build_small_model()
    convert_batch_norm(model, "local")
    before = copy.deepcopy(model.state_dict())
    model(make_images(4))
    discard_statistics(model)
    outputs = model.eval()(make_images(4))
    assert torch.allclose(outputs[:1], model(make_images(4)[:1]), rtol=1e-12)
    update_running_statistics(model)
    for name, value in model.state_dict().items():
        if "running" in name:
            assert torch.equal(value, before[name]), name


def test_gradient_checkpointing_changes_nothing() -> None:
    model = build_small_model()
    convert_batch_norm(model, "group", group_size=2)
    checkpointed = build_small_model()
    convert_batch_norm(checkpointed, "group", group_size=2)
    x = make_images(4)
    compute_loss(model(x), 0).backward()
    checkpointed.forward = lambda x: checkpoint(
        nn.Sequential.forward, checkpointed, x, use_reentrant=False
    )
    compute_loss(checkpointed(x), 0).backward()
    update_running_statistics(model)
    update_running_statistics(checkpointed)
    assert_equal(get_gradients(checkpointed), get_gradients(model), 1e-12)
    assert_equal(checkpointed.state_dict(), model.state_dict(), 1e-12)


@pytest.mark.parametrize("mode", ["local", "frozen"])
def test_the_gradient_of_a_single_sample_is_right(mode: str) -> None:
    """On the CPU, where torch 2.14's own batch norm gets it wrong."""
    layer = nn.Sequential(nn.BatchNorm2d(3)).double()
    convert_batch_norm(layer, mode)
    weights = torch.arange(3.0 * 64, dtype=torch.float64).view(1, 3, 8, 8).sin()
    gradients = []
    for convert in (lambda maps: maps, lambda maps: maps.flatten(2).transpose(1, 2)):
        images = make_images(1).requires_grad_()
        (convert(layer(images)) * convert(weights).contiguous()).sum().backward()
        parameter_gradients = [parameter.grad.clone() for parameter in layer.parameters()]
        gradients.append([images.grad, *parameter_gradients])
        layer.zero_grad()
    for maps_gradient, tokens_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(tokens_gradient, maps_gradient, rtol=1e-10, atol=1e-10)


def compile_shared() -> int:
    """Trains a compiled model beside a plain one; returns the number of graphs."""
    model = build_small_model()
    convert_batch_norm(model, "global")
    compiled = build_small_model()
    convert_batch_norm(compiled, "global")
    torch._dynamo.utils.counters.clear()
    compiled.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    x = make_images(6)[2 * dist.get_rank() :][:2]
    for each in (model, compiled):
        compute_loss(each(x), 0).backward()
        update_running_statistics(each)
    assert_equal(get_gradients(compiled), get_gradients(model), 1e-10)
    assert_equal(compiled.state_dict(), model.state_dict(), 1e-10)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_compiled_model_agrees_and_is_one_graph(processes: Processes) -> None:
    assert processes.run(compile_shared, ranks=2) == [1, 1]


def pass_on_one_rank_then_on_both() -> torch.Tensor:
    """On rank 0 a forward and backward pass that rank 1 never makes; then one of both.

    The first also of a sample without a variance.
    """
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    convert_batch_norm(model, "global")
    with batch_norm.normalize_per_rank(model):
        if dist.get_rank() == 0:
            for images in (make_images(4), make_images(1)[:, :, :3, :3]):
                model(images).square().mean().backward()
    discard_statistics(model)
    return model(make_images(4)[2 * dist.get_rank() :][:2]).mean((0, 2, 3)).detach()


def test_per_rank_statistics_wait_for_no_rank(processes: Processes) -> None:
    """Afterwards the outputs of one rank do not have a mean of 0, as they would by its statistics."""
    means, other_means = processes.run(pass_on_one_rank_then_on_both, ranks=2)
    assert means.abs().max() > 1e-4
    torch.testing.assert_close(means, -other_means, atol=1e-6, rtol=0)


class Counted(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("momenta", [(0.1, 0.1), (0.3, 0.1)])
def test_running_statistics_are_those_of_plain_layers(momenta) -> None:
    plain = nn.Sequential(*(nn.BatchNorm2d(3, momentum=momentum) for momentum in momenta)).double()
    model = copy.deepcopy(plain)
    convert_batch_norm(model, "local")
    for scale in (1, torch.inf, 2, 3):
        model(make_images(4) * torch.inf)
        discard_statistics(model)  # a warm-up that overflowed
        model(make_images(4) * scale)
        update_running_statistics(model)
        if scale < torch.inf:
            plain(make_images(4) * scale)
    for name, buffer in plain.named_buffers():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(model.state_dict()[name], buffer, rtol=1e-12, atol=1e-12)


def test_an_update_takes_few_operators_for_any_number_of_layers() -> None:
    counts = []
    for layers in (1, 9):
        model = nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(layers))).double()
        convert_batch_norm(model, "local")
        discard_statistics(model)
        model(make_images(2))
        with Counted() as counted:
            update_running_statistics(model)
        counts.append(counted.count)
    assert counts[0] == counts[1] < 8
