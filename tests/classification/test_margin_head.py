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

CLASSES, FEATURES, BATCH = 37, 6, 13


def body() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, FEATURES)).double()


def head_of(kind: str, share: float = 1.0, classes: int = CLASSES) -> MarginHead:
    options = {
        "kind": kind,
        "scale": 16.0,
        "margin": 0.4,
        "share": share,
        "seed": 3,
        "dtype": torch.float64,
    }
    return MarginHead(classes, FEATURES, **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 5, generator=draws, dtype=torch.float64)
    return images, torch.randint(CLASSES, (BATCH,), generator=draws)


def prepare(
    head: MarginHead, step: int, labels: torch.Tensor, limit: int = BATCH, is_trial: bool = False
) -> None:
    """As a step does that has one micro-batch of up to `limit` samples on each rank."""
    plan = BatchPlan(limit * world_size(), world_size(), limit)
    head.prepare_step(step, [SimpleNamespace(labels=labels)], plan, is_trial)


def dense_losses(
    kind: str, embeddings: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """As the papers write it, by autograd."""
    cosines = F.normalize(embeddings) @ F.normalize(weight).T
    true = cosines.gather(1, labels[:, None])
    if kind == "cosface":
        moved = true - 0.4
    else:
        within = true.clamp(-0.999, 0.999).acos() + 0.4 <= math.pi
        moved = torch.where(within, (true.acos() + 0.4).cos(), true - 0.4 * math.sin(0.4))
    return F.cross_entropy(
        16 * cosines.scatter(1, labels[:, None], moved), labels, reduction="none"
    )


@pytest.mark.parametrize("kind", ["cosface", "arcface"])
def test_losses_and_gradients_are_those_of_plain_torch(kind: str) -> None:
    """Also beyond an angle of pi, where the first sample points away from its class."""
    head, labels = head_of(kind), batch(0)[1]
    embeddings = torch.randn(
        BATCH, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    embeddings[0] = -head.weight[labels[0]].detach() + 0.001
    factors = torch.rand(BATCH, dtype=torch.float64)
    results = []
    for losses_of in (
        lambda x: head(x, labels),
        lambda x: dense_losses(kind, x, head.weight, labels),
    ):
        head.weight.grad, inputs = None, embeddings.clone().requires_grad_()
        prepare(head, 0, labels)
        losses = losses_of(inputs)
        (losses * factors).sum().backward()
        results.append((losses.detach(), inputs.grad, head.weight.grad))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_sampled_classes_are_the_positives_and_some_others() -> None:
    """Others than in the step before, and the same when the step is made again. The rest gets no gradient."""
    head, labels = head_of("cosface", 0.1, 5000), batch(0)[1]
    chosen = []
    for step in (0, 1, 0):
        prepare(head, step, labels)
        head.weight.grad = None
        head(torch.ones(BATCH, FEATURES, requires_grad=True), labels).sum().backward()
        chosen.append({*head.weight.grad.abs().sum(1).nonzero()[:, 0].tolist()})
        assert chosen[-1] >= {*labels.tolist()}
        assert 420 < len(chosen[-1]) < 580
    assert chosen[0] == chosen[2] and len(chosen[0] & chosen[1]) < 120


def rank_tries(share: float) -> tuple[list, bool]:
    """Rank 0 alone, then both; labels are of the other rank's classes, too."""
    head = head_of("arcface", share)
    labels, inputs = (
        torch.tensor([0, CLASSES - 1]),
        torch.ones(2, FEATURES, dtype=torch.float64, requires_grad=True),
    )
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
    ((expected, _),) = processes.run(rank_tries, share, ranks=1)
    for losses, is_cut in processes.run(rank_tries, share, ranks=2):
        assert losses == pytest.approx(expected, rel=1e-12) and is_cut


class Fp16:
    """Accelerate's part under fp16, which it refuses on a CPU."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def unscale_gradients(self, optimizers: list) -> None:
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)


def rank_overflows(culprit: int, fused: bool) -> tuple[float, float, float]:
    """One number of a rank's part of the head's gradient is infinite: scale and norm, and how far
    the weights moved.
    """
    model, accelerator = body().float(), Fp16()
    model.margin_head = head_of("cosface").float()
    head, (images, labels) = model.margin_head, batch(0)
    optimizer = torch.optim.AdamW(
        [{"params": [*model[0].parameters()]}, {"params": [head.weight]}], lr=1.0, fused=fused
    )
    prepare(head, 0, labels)
    accelerator.scaler.scale(head(model[:3](images.float()), labels).sum()).backward()
    before = [
        get_local_tensor(weight).detach().clone() for weight in (model[0].weight, head.weight)
    ]
    if rank() == culprit:
        get_local_tensor(head.weight.grad)[1, 2] = torch.inf
    unscale_gradients(accelerator, [optimizer], list(model.parameters()))
    norm = clip_gradients(model.parameters(), 0, "norm").item()
    accelerator.scaler.step(optimizer)
    accelerator.scaler.update()
    after = [get_local_tensor(weight).detach() for weight in (model[0].weight, head.weight)]
    moved = [(new - old).abs().max().item() for new, old in zip(after, before, strict=True)]
    assert (min(moved) > 0) == (max(moved) > 0)
    return accelerator.scaler.get_scale(), max(moved), norm


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_one_part_is_a_step_that_all_ranks_skip(processes, fused: bool) -> None:
    ((_, _, expected),) = processes.run(rank_overflows, -1, fused, ranks=1)
    for scale, moved, norm in processes.run(rank_overflows, -1, fused, ranks=2):
        assert scale == 16.0 and moved > 0 and norm == pytest.approx(expected, rel=1e-5), (
            "unscaled as on one process"
        )
    for scale, moved, norm in processes.run(rank_overflows, 1, fused, ranks=2):
        assert (scale, moved) == (8.0, 0.0) and not math.isfinite(norm)


def rank_builds() -> list:
    if world_size() > 1:
        with pytest.raises(
            Refused, match="4 classes leave some of 3 processes without one: start fewer"
        ):
            head_of("cosface", classes=4)
    return get_full_tensor(head_of("cosface", classes=2500).weight.detach()).tolist()


def test_first_weights_do_not_depend_on_the_layout(processes) -> None:
    """More classes than are drawn at once."""
    expected = processes.run(rank_builds, ranks=1)
    assert torch.tensor(expected).std().item() == pytest.approx(0.01, rel=0.05)
    assert processes.run(rank_builds, ranks=3) == expected * 3


def test_soft_labels_are_refused() -> None:
    with pytest.raises(Refused, match="one class id per image: leave out --mixup"):
        head_of("cosface")(torch.ones(2, FEATURES), torch.ones(2, CLASSES))
    with pytest.raises(Refused, match="share=0; take cosface or arcface, and a share in"):
        head_of("cosface", share=0)
