"""What does a recipe send and compile? For several.py in the place of `recipes/cls.py`, whose `main` this one counts.

Prints one more line: {"parameters": number of trained parameters, "sent": how many numbers each backward pass's gradient
buckets had, "compiled": graphs that torch.compile made, "broken": why it broke a graph in two}.
"""

import json
from pathlib import Path

import torch
from several import load
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from common import launch

cls = load(Path(__file__).parents[2] / "recipes" / "cls.py")
wrap = DistributedDataParallel.__init__


def main() -> None:
    sent, parameters = [], []

    def send(_, bucket):
        sent.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    def counting_wrap(model, *arguments, **options):
        wrap(model, *arguments, **options)
        model.register_comm_hook(None, send)
        parameters.append(sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))

    counters.clear()
    torch._dynamo.reset()
    DistributedDataParallel.__init__ = counting_wrap
    cls.main()
    compiled, broken = counters["stats"].get("unique_graphs", 0), list(counters["graph_break"])
    launch.say(json.dumps({"parameters": sum(parameters), "sent": sent, "compiled": compiled, "broken": broken}))
