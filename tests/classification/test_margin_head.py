"""A head cut by class computes what plain PyTorch computes of whole weights, on any number of processes."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from common.classification.margin_head import MarginHead
from common.data.batch_plan import BatchPlan
from common.distributed.collectives import rank, world_size
from common.distributed.sharding import get_full_tensor, get_local_tensor
from common.errors import Refused
from common.training.optimizer import clip_gradients, unscale_gradients

CLASSES = 37
FEATURES = 6
BATCH = 13


def build_body() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, FEATURES)).double()


def build_head(kind: str, share: float = 1.0, classes: int = CLASSES) -> MarginHead:
    options = {
        "kind": kind,
        "scale": 16.0,
        "margin": 0.4,
        "share": share,
        "seed": 3,
        "dtype": torch.float64,
    }
    return MarginHead(classes, FEATURES, **options)


def draw_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 5, generator=draws, dtype=torch.float64)
    return images, torch.randint(CLASSES, (BATCH,), generator=draws)


def prepare(
    head: MarginHead, step: int, labels: torch.Tensor, limit: int = BATCH, is_trial: bool = False
) -> None:
    """As a step does that has one micro-batch of up to `limit` samples on each rank."""
    plan = BatchPlan(limit * world_size(), world_size(), limit)
    head.prepare_step(step, [SimpleNamespace(labels=labels)], plan, is_trial)


def compute_dense_losses(
    kind: str, embeddings: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """As the papers write it, by autograd."""
    cosines = F.normalize(embeddings) @ F.normalize(weight).T
    true = cosines.gather(1, labels[:, None])
    if kind == "cosface":
        target = true - 0.4
    else:
        within = true.clamp(-0.999, 0.999).acos() + 0.4 <= math.pi
        target = torch.where(within, (true.acos() + 0.4).cos(), true - 0.4 * math.sin(0.4))
    logits = 16 * cosines.scatter(1, labels[:, None], target)
    return F.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("kind", ["cosface", "arcface"])
def test_losses_and_gradients_are_those_of_plain_torch(kind: str) -> None:
    """Also beyond an angle of pi, where the first sample points away from its class."""
    head = build_head(kind)
    labels = draw_batch(0)[1]
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(BATCH, FEATURES, dtype=torch.float64, generator=generator)
    embeddings[0] = -head.weight[labels[0]].detach() + 0.001
    factors = torch.rand(BATCH, dtype=torch.float64)
    results = []
    for compute_losses in (
        lambda x: head(x, labels),
        lambda x: compute_dense_losses(kind, x, head.weight, labels),
    ):
        head.weight.grad = None
        inputs = embeddings.clone().requires_grad_()
        prepare(head, 0, labels)
        losses = compute_losses(inputs)
        (losses * factors).sum().backward()
        results.append((losses.detach(), inputs.grad, head.weight.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_sampled_classes_are_the_positives_and_some_others() -> None:
    """Others than in the step before, and the same when the step is made again. The rest gets no gradient."""
    head = build_head("cosface", 0.1, 5000)
    labels = draw_batch(0)[1]
    sampled_by_step = []
    for step in (0, 1, 0):
        prepare(head, step, labels)
        head.weight.grad = None
        head(torch.ones(BATCH, FEATURES, requires_grad=True), labels).sum().backward()
        sampled = set(head.weight.grad.abs().sum(1).nonzero()[:, 0].tolist())
        assert sampled.issuperset(labels.tolist())
        assert 420 < len(sampled) < 580
        sampled_by_step.append(sampled)
    first, second, first_again = sampled_by_step
    assert first == first_again
    assert len(first & second) < 120


def try_on_rank(share: float) -> tuple[list, bool]:
    """Rank 0 alone, then both; labels are of the other rank's classes, too."""
    head = build_head("arcface", share)
    labels = torch.tensor([0, CLASSES - 1])
    inputs = torch.ones(2, FEATURES, dtype=torch.float64, requires_grad=True)
    if rank() == 0:
        prepare(head, 0, labels, limit=3, is_trial=True)
        head(inputs, labels).sum().backward()
        head.weight.grad = None
    prepare(head, 0, labels, limit=3)
    losses = head(inputs, labels)
    losses.sum().backward()
    return losses.tolist(), isinstance(head.weight.grad, DTensor)


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_a_trial_waits_for_no_rank(processes, share: float) -> None:
    ((expected, _),) = processes.run(try_on_rank, share, ranks=1)
    for losses, is_cut in processes.run(try_on_rank, share, ranks=2):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert is_cut


class Fp16:
    """Accelerate's part under fp16, which it refuses on a CPU."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def unscale_gradients(self, optimizers: list) -> None:
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)


def overflow_on_rank(culprit: int, fused: bool) -> tuple[float, float, float]:
    """One number of a rank's part of the head's gradient is infinite: scale, how far the weights
    moved, and norm.
    """
    model = build_body().float()
    accelerator = Fp16()
    head = build_head("cosface").float()
    model.margin_head = head
    images, labels = draw_batch(0)
    groups = [{"params": list(model[0].parameters())}, {"params": [head.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, fused=fused)
    prepare(head, 0, labels)
    accelerator.scaler.scale(head(model[:3](images.float()), labels).sum()).backward()
    weights = [get_local_tensor(weight).detach() for weight in (model[0].weight, head.weight)]
    before = [weight.clone() for weight in weights]
    if rank() == culprit:
        get_local_tensor(head.weight.grad)[1, 2] = torch.inf
    unscale_gradients(accelerator, [optimizer], list(model.parameters()))
    norm = clip_gradients(model.parameters(), 0, "norm").item()
    accelerator.scaler.step(optimizer)
    accelerator.scaler.update()
    moved = [(new - old).abs().max().item() for new, old in zip(weights, before, strict=True)]
    assert (min(moved) > 0) == (max(moved) > 0)
    return accelerator.scaler.get_scale(), max(moved), norm


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_one_part_is_a_step_that_all_ranks_skip(processes, fused: bool) -> None:
    ((_, _, expected),) = processes.run(overflow_on_rank, -1, fused, ranks=1)
    for scale, moved, norm in processes.run(overflow_on_rank, -1, fused, ranks=2):
        assert scale == 16.0
        assert moved > 0
        assert norm == pytest.approx(expected, rel=1e-5), "unscaled as on one process"
    for scale, moved, norm in processes.run(overflow_on_rank, 1, fused, ranks=2):
        assert scale == 8.0
        assert moved == 0.0
        assert not math.isfinite(norm)


def build_on_rank() -> list:
    if world_size() > 1:
        reason = "4 classes leave some of 3 processes without one: start fewer"
        with pytest.raises(Refused, match=reason):
            build_head("cosface", classes=4)
    return get_full_tensor(build_head("cosface", classes=2500).weight.detach()).tolist()


def test_first_weights_do_not_depend_on_the_layout(processes) -> None:
    """More classes than are drawn at once."""
    expected = processes.run(build_on_rank, ranks=1)
    assert torch.tensor(expected).std().item() == pytest.approx(0.01, rel=0.05)
    assert processes.run(build_on_rank, ranks=3) == expected * 3


def test_soft_labels_are_refused() -> None:
    with pytest.raises(Refused, match="one class id per image: leave out --mixup"):
        build_head("cosface")(torch.ones(2, FEATURES), torch.ones(2, CLASSES))
    with pytest.raises(Refused, match="share=0; take cosface or arcface, and a share in"):
        build_head("cosface", share=0)
