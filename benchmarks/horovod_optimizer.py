"""Step times of the Horovod API's DistributedOptimizer and of DDP, on ResNet-18 in turns; prints their medians and ratio.

accelerate launch --config_file accelerate_configs/multi_cpu.yaml benchmarks/horovod_optimizer.py
"""

import argparse
import copy
import json
import statistics
import time

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compat.horovod as hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=30, help="steps of each kind that are measured")
parser.add_argument("--batch", type=int, default=8, help="images of 64 x 64 pixels per process")
arguments = parser.parse_args()
hvd.init()
torch.manual_seed(0)
model = timm.create_model("resnet18", num_classes=10)
other = copy.deepcopy(model)
optimizers = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, other)]
kinds = {
    "horovod": (model, hvd.DistributedOptimizer(optimizers[0], model.named_parameters())),
    "ddp": (DistributedDataParallel(other), optimizers[1]),
}
images = torch.randn(arguments.batch, 3, 64, 64, generator=torch.Generator().manual_seed(hvd.rank()))
labels = torch.arange(arguments.batch) % 10
seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
for number in range(arguments.steps + 3):
    for kind in sorted(kinds, reverse=bool(number % 2)):
        network, optimizer = kinds[kind]
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        seconds[kind].append(time.perf_counter() - began)
medians = {kind: statistics.median(times[3:]) for kind, times in seconds.items()}  # the first ones allocate
difference = max(
    float((one.detach() - two.detach()).abs().max())
    for one, two in zip(model.parameters(), other.parameters(), strict=True)
)
if hvd.rank() == 0:
    print(json.dumps({**medians, "ratio": medians["horovod"] / medians["ddp"], "difference of weights": difference}))
hvd.shutdown()
