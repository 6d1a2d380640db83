"""What do order and batches of a training set cost a rank, at its start and later, as the set grows?

    python benchmarks/stream.py [--quick] [--output FILE]

Our `Stream` and `BatchPlan` against torch's `DistributedSampler`, which lists the whole set on every rank, every epoch.
Each row is a fresh process that plays the last rank of a larger run. Imports are not counted.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from common.plan import BatchPlan
from common.stream import Stream

SHARE = 32  # samples of one rank in a global batch
CHUNK = 8192  # positions that are asked for at once where the cost of one is measured in bulk
ROWS = [  # sampler, samples in the set, processes
    ("DistributedSampler", 10**4, 8),
    ("Stream", 10**4, 8),
    ("DistributedSampler", 10**6, 8),
    ("Stream", 10**6, 8),
    ("DistributedSampler", 10**8, 8),
    ("Stream", 10**8, 8),
    ("Stream", 10**8, 4096),
    ("Stream", 10**9, 4096),
    ("Stream", 10**10, 4096),
]


def our_batches(size: int, world_size: int) -> Iterator[list[int]]:
    """Sample indices of the last rank's batches."""
    stream = Stream(size, SHARE * world_size, seed=0)
    span = BatchPlan(SHARE * world_size, world_size, max_micro_batch_size=SHARE).span(world_size - 1, 0)
    for step in range(sys.maxsize):
        yield stream.indices(stream.positions(step, span)).tolist()


def torch_batches(size: int, world_size: int) -> Iterator[list[int]]:
    """The same from torch."""
    sampler = DistributedSampler(range(size), world_size, world_size - 1, seed=0)
    for epoch in range(sys.maxsize):
        sampler.set_epoch(epoch)
        yield from BatchSampler(sampler, SHARE, drop_last=True)


def our_indices(size: int, world_size: int) -> int:
    """Draw many indices; returns how many."""
    stream = Stream(size, CHUNK, seed=0)
    steps = 100
    for step in range(steps):
        stream.indices(stream.positions(step, (0, CHUNK)))
    return steps * CHUNK


def torch_indices(size: int, world_size: int) -> int:
    """Draw one rank's indices of an epoch: fewer can't be had; returns how many."""
    return len(list(DistributedSampler(range(size), world_size, world_size - 1, seed=0)))


def measure(sampler: str, size: int, world_size: int) -> dict:
    """One row, in this process."""
    batches, indices = {"Stream": (our_batches, our_indices), "DistributedSampler": (torch_batches, torch_indices)}[
        sampler
    ]
    before, began = peak_memory(), time.perf_counter()
    drawn = batches(size, world_size)
    next(drawn)
    first = time.perf_counter() - began
    later, _ = timed(lambda: [next(drawn) for _ in range(30)])
    memory = peak_memory() - before
    bulk, count = timed(lambda: indices(size, world_size))
    return {
        "sampler": sampler,
        "samples": size,
        "processes": world_size,
        "first_batch_ms": 1e3 * first,
        "later_batch_ms": 1e3 * later / 30,
        "bulk_us_per_index": 1e6 * bulk / count,
        "memory_mib": memory,
    }


def timed(function: Callable) -> tuple[float, object]:
    """How many seconds a call takes, and what it returns."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def peak_memory() -> float:
    """The most memory that this process has had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only see that it works: leave out what takes long")
    parser.add_argument("--output", type=Path, help="write the rows to this JSON file, too")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)  # for the process of one row
    arguments = parser.parse_args()
    if arguments.row is not None:
        return print(json.dumps(measure(*ROWS[arguments.row])))

    print(f"the last rank, {SHARE} samples a batch; torch {torch.__version__}, NumPy {np.__version__}")
    print("sampler             samples  processes   first batch   later batch    an index in bulk      memory")
    rows = []
    for number, (_, size, _) in enumerate(ROWS):
        if arguments.quick and size not in (10**4, 10**10):
            continue
        command = [sys.executable, __file__, "--row", str(number)]
        row = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        print(
            f"{row['sampler']:18}{row['samples']:9.0e}{row['processes']:11,}{row['first_batch_ms']:11,.2f} ms"
            f"{row['later_batch_ms']:11.3f} ms{row['bulk_us_per_index']:17.2f} µs{row['memory_mib']:8,.0f} MiB",
            flush=True,
        )
        rows.append(row)
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
