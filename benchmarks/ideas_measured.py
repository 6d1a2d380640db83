"""Experiments of docs/ideas.md: small trainings on scikit-learn's digits. They repeat exactly on a machine."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from common.data.digits import read_digits
from common.training import batch_norm

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 2**16  # with which GradScaler starts
BINS = range(-44, 17)  # powers of two


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images float32[1797, 1, 8, 8] in 0..1, and labels int64[1797]; every fifth is left for evaluation."""
    found = read_digits()
    return torch.tensor(found.images / 16, dtype=torch.float32)[:, None], torch.tensor(found.target)


def network(channels: int = 32, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    """Images [B, 1, 8, 8] -> logits [B, 10]: three convolutions, each with a norm."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, channels, 1), (channels, 2 * channels, 2), (2 * channels, 2 * channels, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), norm(outputs), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * channels, 10))


def batches(count: int, size: int, epochs: float, seed: int = 0) -> Iterator[torch.Tensor]:
    """Rows of the training set for each step: a new order in each epoch, no batch smaller than the others."""
    draw, rows = torch.Generator().manual_seed(seed), torch.zeros(0, dtype=torch.long)
    train = torch.arange(count)[torch.arange(count) % 5 > 0]
    for _ in range(round(epochs * len(train) / size)):
        while len(rows) < size:
            rows = torch.cat([rows, train[torch.randperm(len(train), generator=draw)]])
        yield rows[:size]
        rows = rows[size:]


def train(
    model: nn.Module, size: int, epochs: float, rate: Callable[[int], float], shares: int = 1
) -> list[list[float]]:
    """Trains with SGD; returns [epoch, loss] of each step. The batch is computed in `shares`, as that many GPUs would."""
    images, labels = digits()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    rows = []
    for step, batch in enumerate(batches(len(images), size, epochs)):
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.zero_grad()
        total = 0.0
        for share in batch.chunk(shares):  # each GPU: the sum of its losses times shares / size; DDP takes the mean
            loss = F.cross_entropy(model(images[share]), labels[share], reduction="sum") / size
            loss.backward()
            total += loss.item()
        optimizer.step()
        rows.append([(step + 1) * size / 1437, total])
    return rows


def gradients() -> dict:
    """Gradients of a trained network in three formats: histograms of log2, and the share of zeros.

    They are those that flow between layers (of activations), one batch of 256, after 20 epochs.
    """
    images, labels = digits()
    model = network()
    train(model, 64, 20, lambda step: 0.05)
    found, truth = {}, None
    for name, dtype, scale in [(name, dtype, 1) for name, dtype in FORMATS.items()] + [
        ("scaled", torch.float16, SCALE)
    ]:
        outputs: list[torch.Tensor] = []
        hook = nn.modules.module.register_module_forward_hook(partial(_keep, outputs))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(images[:256])
        hook.remove()
        (F.cross_entropy(logits.float(), labels[:256]) * scale).backward()
        values = torch.cat([output.grad.float().flatten() for output in outputs]).abs()
        powers = values[values > 0].log2()
        counts = torch.histc(powers, len(BINS) - 1, BINS[0], BINS[-1])
        truth = values if truth is None else truth
        lost = ((values == 0) & (truth > 0)).float().mean().item()
        found[name] = {"histogram": (counts / len(values)).tolist(), "zeros": lost, "values": len(values)}
    return found


def _keep(outputs: list[torch.Tensor], layer: nn.Module, _: tuple, output: torch.Tensor) -> None:
    if not isinstance(layer, nn.Sequential | nn.Linear | nn.Flatten):
        output.retain_grad()
        outputs.append(output)


def master_weights() -> dict:
    """A weight of 1 that grows by 1e-4 in each of 2,000 steps; and trainings whose weights are kept in half precision."""
    steps = 2000
    found: dict = {"steps": steps, "single": {}, "training": {}, "lost": {}}
    for name, dtype in FORMATS.items():
        weight, path = torch.ones((), dtype=dtype), [1.0]
        for step in range(steps):
            weight += torch.tensor(1e-4, dtype=dtype)
            if step % 50 == 49:
                path.append(weight.item())
        found["single"][name] = path
    images, labels = digits()
    for name in ("fp32", "bf16 with fp32 master", "bf16"):
        model = network(16)
        half = name == "bf16"
        # Rounded after every update, as a weight that is stored in bf16.
        masters = [weight.detach().clone() for weight in model.parameters()]
        rows, lost, moved = [], 0, 0
        for step, batch in enumerate(batches(len(images), 64, 10)):
            with torch.autocast("cpu", torch.bfloat16, enabled=name != "fp32"):
                loss = F.cross_entropy(model(images[batch]).float(), labels[batch])
            grads = torch.autograd.grad(loss, [*model.parameters()])
            with torch.no_grad():
                for weight, master, grad in zip(model.parameters(), masters, grads, strict=True):
                    before = master.clone()
                    master -= 5e-3 * grad
                    if half:
                        master.copy_(master.bfloat16())
                    lost += ((master == before) & (grad != 0)).sum().item()
                    moved += (grad != 0).sum().item()
                    weight.copy_(master)
            rows.append([(step + 1) * 64 / 1437, loss.item()])
        found["training"][name], found["lost"][name] = rows, lost / moved
    return found


def batch_and_rate(quick: bool) -> dict[str, list[list[float]]]:
    """Losses of one GPU with 32 samples, and of 8 GPUs: the same global batch, or 8 times the batch with three rates."""
    epochs, base = 2 if quick else 12, 0.03
    warm = 3 * 1437 // 256  # steps: three epochs

    def losses(size: int, rate: Callable[[int], float], shares: int = 1) -> list[list[float]]:
        return train(network(16, partial(nn.GroupNorm, 4)), size, epochs, rate, shares)

    return {
        "1 GPU, batch 32": losses(32, lambda step: base),
        "8 GPUs, batch 32": losses(32, lambda step: base, shares=8),
        "8 GPUs, batch 256": losses(256, lambda step: base),
        "8 GPUs, batch 256, rate x 8": losses(256, lambda step: 8 * base),
        "8 GPUs, batch 256, rate x 8, warm-up": losses(256, lambda step: 8 * base * min(1, (step + 1) / warm)),
    }


def network_in_groups(channels: int, samples: int) -> nn.Module:
    """`network` whose batch norm takes its statistics over groups of samples, as GPUs with so many samples each do."""
    model = network(channels)
    batch_norm.convert(model, "group", group_size=samples)
    return model


def batch_norms(quick: bool) -> dict:
    """Batch norm over 2 to 64 of the 64 samples of a step: how far its statistics scatter, and what the model learns."""
    images, labels = digits()
    spread = {}
    first = network(16)[0](images)[:, 0].detach()  # one channel: float[1797, 8, 8]
    for samples in (2, 4, 8, 16, 32, 64):
        groups = first[torch.randperm(len(first), generator=torch.Generator().manual_seed(1))]
        groups = groups[: len(first) // samples * samples].unflatten(0, (-1, samples)).flatten(1)
        spread[samples] = (groups.var(1).std() / first.var()).item()
    held_out = torch.arange(len(images)) % 5 == 0
    curves: dict[int, list[list[float]]] = {}
    for samples in (2, 4, 64):
        model, curves[samples] = network_in_groups(16, samples), []
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        for step, batch in enumerate(batches(len(images), 64, 3 if quick else 15)):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            batch_norm.update_running_statistics(model)
            if step % 22 == 21:
                model.eval()
                with torch.no_grad():
                    loss = F.cross_entropy(model(images[held_out]), labels[held_out]).item()
                model.train()
                curves[samples].append([(step + 1) * 64 / 1437, loss])
    return {"spread": spread, "curves": curves}


def limits(dtype: torch.dtype) -> tuple[float, float, float]:
    """Powers of two: the smallest subnormal, the smallest normal and the largest number of a format."""
    info = torch.finfo(dtype)
    return math.log2(info.smallest_normal * info.eps), math.log2(info.smallest_normal), math.log2(info.max)
