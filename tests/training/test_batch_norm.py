"""Batch norm takes its statistics over the samples that its mode promises; running statistics are
updated once per step.
"""

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


def small_model() -> nn.Sequential:
    """Convolution, plain and activated batch norms with parameters far from their start, in float64."""
    torch.manual_seed(0)
    activated = BatchNormAct2d(6, act_layer=nn.PReLU)
    first = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3)
    model = nn.Sequential(*first, activated, Rows(), nn.Linear(96, 5))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model.double()


def samples(count: int) -> torch.Tensor:
    """[count, 3, 8, 8] float64 images."""
    return 1 + torch.randn(
        count, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def loss_of(outputs: torch.Tensor, first: int) -> torch.Tensor:
    """A sum over samples that weights each differently."""
    weights = torch.arange(first, first + len(outputs), dtype=outputs.dtype)
    return (outputs.square().sum(1) * weights).sum()


def reference(groups: list[int]) -> dict[str, torch.Tensor]:
    """Two unlike steps of the plain model over consecutive groups of samples; running statistics
    from all groups of a step.
    """
    model = small_model()
    x = samples(sum(groups)).requires_grad_()
    for step in (1, 2):
        model.zero_grad()
        x.grad = None
        start = copy.deepcopy(model.state_dict())
        ends, outputs, first = [], [], 0
        for size in groups:
            model.load_state_dict(start)
            outputs.append(model(step * x[first : first + size]))
            ends.append(copy.deepcopy(model.state_dict()))
            loss_of(outputs[-1], first).backward()
            first += size
        mean = {name: torch.stack([end[name].double() for end in ends]).mean(0) for name in start}
        model.load_state_dict(mean)
    return {
        "outputs": torch.cat(outputs).detach(),
        "x": x.grad,
        **gradients(model),
        **model.state_dict(),
    }


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}


def steps(mode: str, shares: list[int], micro: int, group_size: int = 0) -> dict[str, torch.Tensor]:
    """What `reference` does, with shares[r] samples on rank r in micro-batches of `micro`; results
    of all ranks.
    """
    model = small_model()
    assert convert_batch_norm(model, mode, group_size=group_size) == 3
    rank = dist.get_rank() if dist.is_initialized() else 0
    low, high = sum(shares[:rank]), sum(shares[: rank + 1])
    x = samples(sum(shares))[low:high].requires_grad_()
    for step in (1, 2):
        model.zero_grad()
        x.grad = None
        outputs = []
        for first in range(low, high, micro):
            outputs.append(model(step * x[first - low : min(first + micro, high) - low]))
            loss_of(outputs[-1], first).backward()
        update_running_statistics(model)
    results = {
        "outputs": torch.cat(outputs).detach(),
        "x": x.grad,
        **gradients(model),
        **model.state_dict(),
    }
    if dist.is_initialized():
        of_ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, results)
        for name in results:
            of_name = [theirs[name] for theirs in of_ranks]
            if name in ("outputs", "x"):
                results[name] = torch.cat(of_name)
            elif name.startswith("gradient"):
                results[name] = sum(of_name)
            else:
                assert all(torch.equal(value, of_name[0]) for value in of_name), (
                    f"{name} differs between ranks"
                )
    return results


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
    expected = reference([sum(shares)])
    for actual in processes.run(steps, mode, shares, 100, ranks=len(shares)):
        assert_equal(actual, expected, 1e-10)


def normalize_far_from_zero() -> list:
    """A rank's samples and their outputs, and memory format and types of a model in bf16."""
    layer, maps = nn.BatchNorm1d(4), nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    convert_batch_norm(layer, "global"), convert_batch_norm(maps, "global")
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(dist.get_rank())) + 3000
    maps.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        y = maps(torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last))
    y.sum().backward()
    kept = y.is_contiguous(memory_format=torch.channels_last)
    return [
        x,
        layer(x).detach(),
        (kept, y.dtype, maps[1].collected.dtype, maps[1].weight.grad.dtype),
    ]


def test_shared_statistics_lose_no_digits_and_no_memory_format(processes: Processes) -> None:
    """Where the mean is large, and in bf16."""
    x, y, kept = zip(*processes.run(normalize_far_from_zero, ranks=2), strict=True)
    expected = nn.BatchNorm1d(4).double()(torch.cat(x).double())
    assert (torch.cat(y) - expected).abs().max() < 1e-3  # E[x²] - E[x]² would be off by 1
    assert kept == ((True, torch.bfloat16, torch.float32, torch.float32),) * 2


def steps_on_nodes(shares: list[int]) -> dict[str, torch.Tensor]:
    with mock.patch("socket.gethostname", return_value="b" if dist.get_rank() == 2 else "a"):
        return steps("node", shares, 100)


def test_node_statistics_stay_on_the_node(processes: Processes) -> None:
    actual = processes.run(steps_on_nodes, [4, 5, 6], ranks=3)[0]
    expected = reference([9, 6])
    # The running statistics of the nodes are averaged by their ranks: two of three have seen the
    # first node's.
    for name in [name for name in expected if "running" in name]:
        del expected[name], actual[name]
    assert_equal(actual, expected, 1e-10)


@pytest.mark.parametrize("mode, num_samples, micro", [("group", 24, 12), ("local", 12, 4)])
def test_one_process_has_the_statistics_of_groups(mode: str, num_samples: int, micro: int) -> None:
    """Those of local statistics are micro-batches, as of plain batch norm. Layouts:
    tests/recipes/test_layout.py.
    """
    assert_equal(steps(mode, [num_samples], micro, 4), reference([4] * (num_samples // 4)), 1e-12)


def test_what_can_not_be_converted_is_refused() -> None:
    class Custom(nn.BatchNorm2d):
        pass

    for unknown in (Custom(3), nn.BatchNorm2d(3, track_running_stats=False)):
        with pytest.raises(Refused, match=r"1 .*can't be converted"):
            convert_batch_norm(nn.Sequential(nn.Conv2d(3, 3, 1), unknown), "local")
    model = small_model()
    convert_batch_norm(model, "group", group_size=4)
    with pytest.raises(Refused, match=r"6 samples .* norm_batch_size 4"):
        model(samples(6))
    model.eval()(samples(6))


def test_frozen_layers_are_told_and_form_no_groups() -> None:
    model = small_model()
    with pytest.raises(Refused, match="before prepare_layers"):
        batch_norm.freeze_modules(model)
    convert_batch_norm(model.requires_grad_(True), "group", group_size=2)
    layers = [layer for layer in model.modules() if isinstance(layer, batch_norm.StepBatchNorm)]
    assert (batch_norm.get_group_size(model), batch_norm.get_undivided_flag(model)) == (2, "")
    layers[0].requires_grad_(False)
    assert (
        "; 1 layers whose weights are not trained have statistics that move"
        in batch_norm.describe_batch_norm(model)
    )
    batch_norm.freeze_modules(layers[0])
    assert batch_norm.describe_batch_norm(model).endswith(f"; 1 of {len(layers)} layers are frozen")
    batch_norm.freeze_modules(model)
    assert (
        batch_norm.get_group_size(model) == 1
        and batch_norm.describe_batch_norm(model) == "frozen: all layers are in frozen stages"
    )


def test_frozen_keeps_statistics_and_trains_weight_and_bias() -> None:
    model, plain = small_model(), small_model().eval()
    convert_batch_norm(model, "frozen")
    before = copy.deepcopy(model.state_dict())
    for trained in (model.train(), plain):
        loss_of(trained(samples(4)), 0).backward()
    update_running_statistics(model)
    assert_equal(model.state_dict(), before, 0)
    assert_equal(gradients(model), gradients(plain), 1e-12)
    assert model[1].weight.grad.abs().max() > 0


def test_an_evaluation_or_a_discarded_pass_moves_no_statistics() -> None:
    model = small_model()
    convert_batch_norm(model, "local")
    before = copy.deepcopy(model.state_dict())
    model(samples(4))
    discard_statistics(model)
    outputs = model.eval()(samples(4))
    assert torch.allclose(outputs[:1], model(samples(4)[:1]), rtol=1e-12)
    update_running_statistics(model)
    assert all(
        torch.equal(model.state_dict()[name], before[name]) for name in before if "running" in name
    )


def test_gradient_checkpointing_changes_nothing() -> None:
    model, checkpointed = small_model(), small_model()
    for each in (model, checkpointed):
        convert_batch_norm(each, "group", group_size=2)
    x = samples(4)
    loss_of(model(x), 0).backward()
    checkpointed.forward = lambda x: checkpoint(
        nn.Sequential.forward, checkpointed, x, use_reentrant=False
    )
    loss_of(checkpointed(x), 0).backward()
    update_running_statistics(model)
    update_running_statistics(checkpointed)
    assert_equal(gradients(checkpointed), gradients(model), 1e-12)
    assert_equal(checkpointed.state_dict(), model.state_dict(), 1e-12)


@pytest.mark.parametrize("mode", ["local", "frozen"])
def test_the_gradient_of_a_single_sample_is_right(mode: str) -> None:
    """On the CPU, where torch 2.14's own batch norm gets it wrong."""
    layer = nn.Sequential(nn.BatchNorm2d(3)).double()
    convert_batch_norm(layer, mode)
    weights = torch.arange(3.0 * 64, dtype=torch.float64).view(1, 3, 8, 8).sin()
    gradients = []
    for become in (lambda maps: maps, lambda maps: maps.flatten(2).transpose(1, 2)):
        images = samples(1).requires_grad_()
        (become(layer(images)) * become(weights).contiguous()).sum().backward()
        gradients.append(
            [images.grad, *(parameter.grad.clone() for parameter in layer.parameters())]
        )
        layer.zero_grad()
    for of_maps, of_tokens in zip(*gradients, strict=True):
        torch.testing.assert_close(of_tokens, of_maps, rtol=1e-10, atol=1e-10)


def compile_shared() -> int:
    """Trains a compiled model beside a plain one; returns the number of graphs."""
    model, compiled = small_model(), small_model()
    for each in (model, compiled):
        convert_batch_norm(each, "global")
    torch._dynamo.utils.counters.clear()
    compiled.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    x = samples(6)[2 * dist.get_rank() :][:2]
    for each in (model, compiled):
        loss_of(each(x), 0).backward()
        update_running_statistics(each)
    assert_equal(gradients(compiled), gradients(model), 1e-10)
    assert_equal(compiled.state_dict(), model.state_dict(), 1e-10)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_a_compiled_model_agrees_and_is_one_graph(processes: Processes) -> None:
    assert processes.run(compile_shared, ranks=2) == [1, 1]


def alone_and_together() -> torch.Tensor:
    """On rank 0 a forward and backward pass that rank 1 never makes, also of a sample without a
    variance; then one of both.
    """
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
    convert_batch_norm(model, "global")
    with batch_norm.normalize_per_rank(model):
        if dist.get_rank() == 0:
            for images in (samples(4), samples(1)[:, :, :3, :3]):
                model(images).square().mean().backward()
    discard_statistics(model)
    return model(samples(4)[2 * dist.get_rank() :][:2]).mean((0, 2, 3)).detach()


def test_within_alone_no_rank_waits(processes: Processes) -> None:
    """Afterwards a rank's own outputs do not have a mean of 0, as they would alone."""
    means, others = processes.run(alone_and_together, ranks=2)
    assert means.abs().max() > 1e-4
    torch.testing.assert_close(means, -others, atol=1e-6, rtol=0)


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
        model(samples(4) * torch.inf)
        discard_statistics(model)  # a warm-up that overflowed
        model(samples(4) * scale)
        update_running_statistics(model)
        if scale < torch.inf:
            plain(samples(4) * scale)
    for name, buffer in plain.named_buffers():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(model.state_dict()[name], buffer, rtol=1e-12, atol=1e-12)


def test_an_update_takes_few_operators_for_any_number_of_layers() -> None:
    counts = []
    for layers in (1, 9):
        model = nn.Sequential(*(nn.BatchNorm2d(3) for _ in range(layers))).double()
        convert_batch_norm(model, "local")
        discard_statistics(model)
        model(samples(2))
        with Counted() as counted:
            update_running_statistics(model)
        counts.append(counted.count)
    assert counts[0] == counts[1] < 8
