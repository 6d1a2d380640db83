"""Measures the margin head: memory of a process, and the time of a step with all classes and with a tenth as negatives.

    python benchmarks/margin_head.py
    torchrun --nproc_per_node 2 benchmarks/margin_head.py

A step chooses classes, compares a global batch of embeddings with them, goes back, and moves weights by AdamW. Steps of both
kinds are made in turn. Memory is the most that a process has held, less what it held before the head was made.
"""

import argparse
import resource
import statistics
import time

import psutil
import torch
import torch.distributed as dist

from common.distributed.collectives import gather_objects, is_main, rank, world_size
from common.training import MarginHead

KINDS = {"all classes": 1.0, "a tenth": 0.1}


def step(head: MarginHead, optimizer: torch.optim.Optimizer, number: int, samples: int) -> float:
    """Seconds of a step with `samples` on this rank."""
    draws = torch.Generator().manual_seed(number * world_size() + rank())
    embeddings = torch.randn(samples, head.weight.shape[1], generator=draws, requires_grad=True)
    labels = torch.randint(head.classes, (samples,), generator=draws)
    dist.barrier() if world_size() > 1 else None
    start = time.perf_counter()
    head.begin(number, labels, samples)
    (head(embeddings, labels).sum() / samples).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--global_batch_size", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    samples = options.global_batch_size // world_size()
    before = psutil.Process().memory_info().rss
    head = MarginHead(options.classes, 128)
    optimizer = torch.optim.AdamW(head.parameters(), fused=True)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(options.pairs + 1):
        for kind, share in KINDS.items():
            head.share = share
            seconds[kind].append(step(head, optimizer, number, samples))
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = gather_objects([peak, peak - before])
    if is_main():
        whole, tenth = ([1e3 * each for each in times[1:]] for times in seconds.values())
        ratio = statistics.median(slow / fast for slow, fast in zip(whole, tenth, strict=True))
        print(
            f"{options.classes:,} classes x 128, global batch {options.global_batch_size}, {world_size()} processes: "
            f"{statistics.median(whole):.0f} ms per step with all classes, {statistics.median(tenth):.0f} ms with a tenth "
            f"({ratio:.2f} times as fast); {max(own for _, own in peaks) / 2**30:.2f} GiB per process "
            f"({max(peak for peak, _ in peaks) / 2**30:.2f} with Python and torch)"
        )
    if world_size() > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
