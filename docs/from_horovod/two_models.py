"""Two models in one optimizer: horovodrun -np 2 python two_models.py FOLDER. Only its import line was changed."""

import sys

import torch
import torch.nn.functional as F
from fashion import Encoder, count_correct, load
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import compat.horovod as hvd  # was: import horovod.torch as hvd

EPOCHS, BATCH, RATE = 2, 64, 0.025  # batch and rate of one process

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train, test = load(sys.argv[1], train=True), load(sys.argv[1], train=False)
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, BATCH, sampler=sampler)
encoder = Encoder().to(device)
head = torch.nn.Sequential(torch.nn.Linear(800, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)

named = [(f"encoder.{name}", parameter) for name, parameter in encoder.named_parameters()]
named += [(f"head.{name}", parameter) for name, parameter in head.named_parameters()]
optimizer = torch.optim.SGD([parameter for _, parameter in named], RATE * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
for model in (encoder, head):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = F.cross_entropy(head(encoder(images.to(device))), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    part = torch.utils.data.Subset(test, range(hvd.rank(), len(test), hvd.size()))
    correct = hvd.allreduce(count_correct(torch.nn.Sequential(encoder, head), part, device), op=hvd.Sum)
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy {correct.item() / len(test):.4f}", flush=True)
