"""Counts what `recipes/cls.py` sends and compiles. several.py runs this file in its place.

Prints one more line: {"parameters": number of trained parameters, "sent": how many numbers each
backward pass's gradient buckets had, of 1 MiB here, before a --comm_hook compresses them,
"compiled": graphs that torch.compile made, "cut": into how many parts DDP's buckets cut each of
them, "broken": why it broke a graph in two}. With COMPILE_BACKEND in the environment, torch.compile
uses that one, such as eager. Neither torch nor Accelerate offers a way to look at this, so
functions of theirs are replaced.
"""

import json
import os
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from common.launching import launch
from tests.harness.several import load_recipe

HOOKS = {
    DDPCommunicationHookType.NO: default_hooks.allreduce_hook,
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
    DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
}
cls = load_recipe(Path(__file__).parents[2] / "recipes" / "cls.py")
compile_cut = DDPOptimizer.compile_fn
if "COMPILE_BACKEND" in os.environ:
    torch.compile = partial(torch.compile, backend=os.environ["COMPILE_BACKEND"])


def main() -> None:
    sent = []
    parameters = []
    cut = []

    def counting_compile(self, *arguments, **options):
        compiled = compile_cut(self, *arguments, **options)
        cut.append(len(self.buckets))
        return compiled

    def counting_register(self, model):
        def send(state, bucket):
            sent.append(bucket.buffer().numel())
            return HOOKS[self.comm_hook](state, bucket)

        model.register_comm_hook(None, send)
        parameters.append(
            sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        )

    counters.clear()
    torch._dynamo.reset()
    DistributedDataParallelKwargs.register_comm_hook = counting_register
    launch.DistributedDataParallelKwargs = partial(DistributedDataParallelKwargs, bucket_cap_mb=1)
    DDPOptimizer.compile_fn = counting_compile
    cls.main()
    compiled = counters["stats"].get("unique_graphs", 0)
    broken = list(counters["graph_break"])
    counted = {
        "parameters": sum(parameters),
        "sent": sent,
        "compiled": compiled,
        "cut": cut,
        "broken": broken,
    }
    launch.print_on_main(json.dumps(counted))
