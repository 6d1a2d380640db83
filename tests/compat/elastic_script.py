"""Trains a small model elastically, as a script written for Horovod does; the tests kill its ranks.

Arguments: the folder for results, and "RANK:STEP" of kills, each of which happens once. At the end
rank 0 writes the weights; each rank notes the samples of each step that it has committed.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import compat.horovod as hvd

SAMPLES = 50
GLOBAL_BATCH = 8
EPOCHS = 3
folder = Path(sys.argv[1])
kills = sys.argv[2:]

hvd.init()
torch.manual_seed(hvd.rank())  # rank 0's weights are broadcast
generator = torch.Generator().manual_seed(0)
dataset = TensorDataset(
    torch.randn(SAMPLES, 6, generator=generator).double(), torch.arange(SAMPLES)
)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // hvd.size(), sampler=sampler, num_workers=1)


def set_rate() -> None:
    # A script would scale it with hvd.size(); here the global batch stays.
    optimizer.param_groups[0]["lr"] = 0.01


@hvd.elastic.run
def train(state):
    seen = []

    def commit() -> None:
        state.commit()
        with (folder / f"samples {hvd.rank()}").open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in seen))
        seen.clear()

    while state.epoch < EPOCHS:
        for images, numbers in loader:
            for kill in kills:
                died = folder / f"killed {kill}"
                if kill == f"{hvd.rank()}:{state.step}" and not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            # The last batches of an epoch differ in size, so sums are divided by what all ranks
            # have.
            count = (
                hvd.allreduce(torch.tensor(float(len(numbers))), op=hvd.Sum, name="count").item()
                / hvd.size()
            )
            (model(images).squeeze(1) - numbers.double() / 50).square().sum().div(count).backward()
            optimizer.step()
            sampler.record_batch(0, len(numbers))
            seen += [(state.epoch, number) for number in numbers.tolist()]
            state.step += 1
            if state.step % 3 == 0:
                commit()
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        commit()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)
state.register_reset_callbacks([set_rate])
set_rate()
train(state)
if hvd.rank() == 0:
    torch.save([parameter.detach() for parameter in model.parameters()], folder / "weights.pt")
    (folder / "steps").write_text(str(state.step))
hvd.shutdown()
