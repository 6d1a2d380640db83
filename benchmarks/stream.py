"""Measures what the order and the batches of a training set cost one rank, at its start and later, as the set grows.

    python benchmarks/stream.py [--quick] [--output FILE]

`Stream` and `BatchPlan` are compared with torch's `DistributedSampler`, which lists the whole set on every rank in every epoch.
Each row is a fresh process that acts as the last rank of a larger run. Imports are not counted. Then all ranks of a run are
simulated, and every sample that any of them draws is counted: see `cover`.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
from table import Row

from common.data.batch_plan import BatchPlan
from common.data.stream import Stream

SHARE = 32  # samples of one rank in a global batch
CHUNK = 8192  # positions per call when the cost of one index is measured in bulk
ROWS = [  # sampler, samples in the set, processes
    ("DistributedSampler", 10**4, 8),
    ("Stream", 10**4, 8),
    ("DistributedSampler", 10**6, 8),
    ("Stream", 10**6, 8),
    ("DistributedSampler", 10**7, 8),  # 10**8 takes 8 s and 4.6 GB
    ("Stream", 10**7, 8),
    ("Stream", 10**8, 8),
    ("Stream", 10**10, 8),
    ("Stream", 10**10, 4_096),
    ("Stream", 10**10, 65_536),
]
QUICK = [("DistributedSampler", 10**4, 8), ("Stream", 10**4, 8), ("Stream", 10**10, 65_536)]
COVERED = [  # samples in the set, processes, samples in a global batch, the most in a micro-batch
    (10**6 + 3, 3, 8_192, 1_000),
    (10**7 + 19, 65_536, 32 * 65_536, 32),  # neither batches nor shares end with an epoch
    (10**7 + 19, 65_536, 32 * 65_536 + 12_345, 16),  # two sizes of shares, three micro-steps
]
QUICK_COVERED = [(10**5 + 3, 65_536, 65_536 + 345, 2)]
EPOCHS = 2


def our_batches(size: int, world_size: int) -> Iterator[list[int]]:
    """Yields the sample indices of the last rank's batches."""
    stream = Stream(size, SHARE * world_size, seed=0)
    span = BatchPlan(SHARE * world_size, world_size, max_micro_batch_size=SHARE).span(world_size - 1, 0)
    for step in range(sys.maxsize):
        yield stream.indices(stream.positions(step, span)).tolist()


def torch_batches(size: int, world_size: int) -> Iterator[list[int]]:
    """The same with torch's sampler."""
    from torch.utils.data import BatchSampler, DistributedSampler

    sampler = DistributedSampler(range(size), world_size, world_size - 1, seed=0)
    for epoch in range(sys.maxsize):
        sampler.set_epoch(epoch)
        yield from BatchSampler(sampler, SHARE, drop_last=True)


def our_indices(size: int, _world_size: int) -> int:
    """Draws many indices; returns how many."""
    stream = Stream(size, CHUNK, seed=0)
    steps = 100
    for step in range(steps):
        stream.indices(stream.positions(step, (0, CHUNK)))
    return steps * CHUNK


def torch_indices(size: int, world_size: int) -> int:
    """Draws the indices of one rank for an epoch, the smallest unit of this sampler; returns how many."""
    from torch.utils.data import DistributedSampler

    return len(list(DistributedSampler(range(size), world_size, world_size - 1, seed=0)))


def measure(sampler: str, size: int, world_size: int) -> dict:
    """Measures one row in this process."""
    batches, indices = {"Stream": (our_batches, our_indices), "DistributedSampler": (torch_batches, torch_indices)}[
        sampler
    ]
    if sampler == "DistributedSampler":
        import torch.utils.data  # noqa: F401 (before measuring)
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
    """Returns the seconds that a call takes, and its result."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def peak_memory() -> float:
    """Peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def cover(size: int, world_size: int, global_batch_size: int, max_micro_batch_size: int) -> dict:
    """Simulates every rank of a run for two epochs, and counts how often each sample is drawn per epoch.

    The positions of a rank come from its own `span`, micro-step by micro-step. Their samples are computed for all ranks
    at once, and for some ranks again on their own. `exactly_once`: every sample was drawn exactly once per epoch, and those
    ranks drew the same on their own.
    """
    began = time.perf_counter()
    stream = Stream(size, global_batch_size, seed=0)
    plan = BatchPlan(global_batch_size, world_size, max_micro_batch_size)
    ranks, micro_steps = range(world_size), range(plan.micro_steps)
    spans = np.array([plan.span(rank, micro_step) for rank in ranks for micro_step in micro_steps])
    lengths = np.diff(spans)[:, 0]
    starts = np.cumsum(lengths) - lengths
    places = np.repeat(spans[:, 0] - starts, lengths) + np.arange(lengths.sum())  # of all ranks in order
    alone = {0, len(spans) - 1, *np.random.default_rng(0).integers(len(spans), size=64).tolist()}
    draws, same = np.zeros((EPOCHS, size), np.int32), True
    for step in range(stream.steps(EPOCHS)):
        positions = step * global_batch_size + places
        samples = stream.indices(positions)
        for part in alone:
            own = stream.indices(stream.positions(step, tuple(spans[part].tolist())))
            same &= np.array_equal(own, samples[starts[part] : starts[part] + lengths[part]])
        for epoch in range(EPOCHS):  # a batch may reach into the next epoch
            draws[epoch] += np.bincount(samples[positions // size == epoch], minlength=size)
    return {
        "samples": size,
        "processes": world_size,
        "global_batch_size": global_batch_size,
        "micro_steps": plan.micro_steps,
        "micro_batch_sizes": plan.micro_batch_sizes,
        "steps": stream.steps(EPOCHS),
        "exactly_once": bool(same and (lengths > 0).all() and (draws == 1).all()),
        "seconds": time.perf_counter() - began,
    }


def rows(quick: bool = False) -> Iterator[dict]:
    """Rows of the first table, each measured in its own process."""
    for row in QUICK if quick else ROWS:
        command = [sys.executable, __file__, "--row", json.dumps(row)]
        yield json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def coverage(quick: bool = False) -> Iterator[dict]:
    """Rows of the second table."""
    for run in QUICK_COVERED if quick else COVERED:
        yield cover(*run)


def table(result: dict) -> list[Row]:
    """Rows for the common table: the largest run of each sampler; these differ in size."""
    ours, theirs = (
        max(
            (row for row in result["rows"] if row["sampler"] == name),
            key=lambda row: (row["samples"], row["processes"]),
        )
        for name in ("Stream", "DistributedSampler")
    )
    covered = max(result["coverage"], key=lambda run: run["processes"])
    where = "of {samples:.0e} samples on {processes:,} processes"
    rows = [
        Row(
            f"{what} {where.format(**ours)}",
            unit,
            ours[key],
            f"DistributedSampler, {theirs['samples']:.0e} on {theirs['processes']}",
            theirs[key],
            theirs[key] / max(ours[key], least),
        )
        for what, key, unit, least in (
            ("first batch", "first_batch_ms", "ms", 1e-9),
            ("memory", "memory_mib", "MiB", 0.1),
        )
    ]
    drawn = float(all(run["exactly_once"] for run in result["coverage"]))
    what = f"share drawn exactly once, {covered['processes']:,} processes"
    return [*rows, Row(what, "", drawn, "the promise", 1.0, drawn, goal=1.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: without the long rows")
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON file")
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)  # internal: measure this row
    arguments = parser.parse_args()
    if arguments.row is not None:
        return print(json.dumps(measure(*arguments.row)))

    print(f"the last rank, {SHARE} samples per batch; torch {version('torch')}, NumPy {np.__version__}")
    print("sampler             samples  processes   first batch   later batch    an index in bulk      memory")
    measured, covered = [], []
    for row in rows(arguments.quick):
        print(
            f"{row['sampler']:18}{row['samples']:9.0e}{row['processes']:11,}{row['first_batch_ms']:11,.2f} ms"
            f"{row['later_batch_ms']:11.3f} ms{row['bulk_us_per_index']:17.2f} µs{row['memory_mib']:8,.0f} MiB",
            flush=True,
        )
        measured.append(row)
    print(f"all ranks, {EPOCHS} epochs")
    print("   samples  processes  global batch  micro-batches   steps  every sample once per epoch      time")
    for row in coverage(arguments.quick):
        sizes = f"{row['micro_steps']} x {' or '.join(map(str, row['micro_batch_sizes']))}"
        print(
            f"{row['samples']:10,}{row['processes']:11,}{row['global_batch_size']:14,}{sizes:>15}{row['steps']:8,}"
            f"{'yes' if row['exactly_once'] else 'NO':>29}{row['seconds']:8.1f} s",
            flush=True,
        )
        covered.append(row)
    if arguments.output:
        arguments.output.write_text(json.dumps({"rows": measured, "coverage": covered}, indent=2) + "\n")


if __name__ == "__main__":
    main()
