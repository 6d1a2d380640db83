"""The usual shape of a Horovod script: horovodrun -np 2 python train.py FOLDER. Only its import
line was changed.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from fashion import Net, count_correct, load
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import compat.horovod as hvd  # was: import horovod.torch as hvd

EPOCHS, BATCH, RATE = 2, 64, 0.025  # batch and rate of one process

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--checkpoint", default="checkpoint.pt")
parser.add_argument("--fp16", action="store_true", help="compress gradients to 16 bits")
options = parser.parse_args()

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train, test = load(options.data, train=True), load(options.data, train=False)
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, BATCH, sampler=sampler)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), RATE * hvd.size(), momentum=0.9)

first = 0
if hvd.rank() == 0 and os.path.exists(options.checkpoint):
    saved = torch.load(options.checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"] + 1
first = hvd.broadcast_object(first, root_rank=0)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if options.fp16 else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)

for epoch in range(first, EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    part = torch.utils.data.Subset(test, range(hvd.rank(), len(test), hvd.size()))
    correct = hvd.allreduce(count_correct(model, part, device), op=hvd.Sum)
    if hvd.rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(saved, options.checkpoint)
        print(f"epoch {epoch}: accuracy {correct.item() / len(test):.4f}", flush=True)
