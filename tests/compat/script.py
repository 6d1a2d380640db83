"""A script for the Horovod API, as users have them, but for its import line. It writes one line of JSON per rank."""

import json
import os
import sys

import torch

import compat.horovod as hvd

hvd.init()
torch.manual_seed(hvd.rank())
reduced = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, name="ranks")
first = hvd.broadcast(torch.rand(2), root_rank=0)
gathered = hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank()))
numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()]
torch.manual_seed(0)
assert torch.equal(first, torch.rand(2))
line = {
    "numbers": numbers,
    "sum": reduced.item(),
    "gathered": gathered.tolist(),
    "launcher": os.environ.get("LAUNCHER"),
}
with open(f"{sys.argv[1]}/{hvd.rank()}.json", "w") as file:
    json.dump(line, file)
