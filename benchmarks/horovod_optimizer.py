"""Step times of the Horovod API's DistributedOptimizer and of DDP, on the same model, in one run, in turns.

accelerate launch --config_file accelerate_configs/multi_cpu.yaml benchmarks/horovod_optimizer.py
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compat.horovod as hvd


def steps_of(model: nn.Module, network: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> Callable[[], float]:
    """A function that makes a step and returns its seconds."""
    images = torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(hvd.rank()))
    labels = torch.arange(batch) % 10

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        return time.perf_counter() - began

    model.train()
    return step


def compare(steps: int, batch: int) -> dict[str, float]:
    """Median seconds of a step, both kinds, and the ratio. Every rank calls it after `hvd.init()`."""
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=10)
    other = copy.deepcopy(model)
    ddp = DistributedDataParallel(other)
    kinds = {
        "horovod": steps_of(
            model,
            model,
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model.named_parameters()
            ),
            batch,
        ),
        "ddp": steps_of(other, ddp, torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9), batch),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(steps + 3):  # the first ones allocate, and agree on buckets
        for kind in sorted(kinds, reverse=bool(number % 2)):
            took = kinds[kind]()
            if number >= 3:
                seconds[kind].append(took)
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    difference = max(
        float((one.detach() - two.detach()).abs().max())
        for one, two in zip(model.parameters(), other.parameters(), strict=True)
    )
    return {**medians, "ratio": medians["horovod"] / medians["ddp"], "difference of weights": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="steps of each kind that are measured")
    parser.add_argument("--batch", type=int, default=8, help="images of 64 x 64 pixels per process")
    arguments = parser.parse_args()
    hvd.init()
    result = compare(arguments.steps, arguments.batch)
    if hvd.rank() == 0:
        print(json.dumps(result))
    hvd.shutdown()


if __name__ == "__main__":
    main()
