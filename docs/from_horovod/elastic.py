"""Horovod's elastic shape: the number of processes may change. Only its import line was changed."""

import sys

import torch
import torch.nn.functional as F
from fashion import Net, count_correct, load
from torch.utils.data import DataLoader

import compat.horovod as hvd  # was: import horovod.torch as hvd

EPOCHS, BATCH, RATE = 2, 64, 0.025  # batch and rate of one process

hvd.init()
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
train, test = load(sys.argv[1], train=True), load(sys.argv[1], train=False)
sampler = hvd.elastic.ElasticSampler(train)
loader = DataLoader(train, BATCH, sampler=sampler)
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), RATE * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())


@hvd.elastic.run
def fit(state):
    while state.epoch < EPOCHS:
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(state.batch, BATCH)
            state.batch += 1
            if state.batch % 20 == 0:
                state.commit()
        part = torch.utils.data.Subset(test, range(hvd.rank(), len(test), hvd.size()))
        correct = hvd.allreduce(count_correct(model, part, device), op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: accuracy {correct.item() / len(test):.4f}", flush=True)
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        state.commit()


def adapt_rate():
    """The rate belongs to the number of processes."""
    for group in optimizer.param_groups:
        group["lr"] = RATE * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([adapt_rate])
fit(state)
