"""A profile of the backward pass of two gloo processes, for docs/ideas.md: as DDP runs it, and with all-reduces after it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import network
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TRIES = 7  # of each way
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def overlap(quick: bool) -> dict:
    """A profile of the backward pass of two gloo processes: {"overlap" or "after": [of each rank, events in ms]}.

    As root with iproute2 they are two network namespaces that a cable of 1 Gbit/s joins; "cable" says so.
    """
    cable = not quick and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))
    network.CABLE_MBIT = 1000
    with tempfile.TemporaryDirectory() as folder, network.two_machines() if cable else contextlib.nullcontext():
        processes = []
        for rank, space in enumerate(network.NAMESPACES):
            words = [sys.executable, __file__, str(rank), folder, "128" if quick else "1024"]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0" if cable else LOOPBACK}
            before = ["ip", "netns", "exec", space] if cable else []
            processes.append(subprocess.Popen([*before, *words], env=environ, stderr=subprocess.DEVNULL))
        if any([process.wait() for process in processes]):  # noqa: C419 (waits for both)
            raise RuntimeError("a process of the profile failed")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    return {"cable": cable} | {way: [rank[way] for rank in ranks] for way in ranks[0]}


def profile(rank: int, folder: str, width: int) -> None:
    """One of the two processes: makes backward passes of both ways in turn, and writes the fastest of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(minutes=2), rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 10)), bucket_cap_mb=8 * (width / 1024) ** 2)
    images = torch.randn(width // 2, width)
    tries: dict[str, list] = {"overlap": [], "after": []}
    for step in range(2 + TRIES):
        for way, timelines in tries.items():
            with torch.profiler.profile() if step > 1 else contextlib.nullcontext() as profiler:
                with model.no_sync() if way == "after" else contextlib.nullcontext():
                    loss = model(images).square().mean()
                    dist.barrier()
                    loss.backward()
                if way == "after":  # as a script does that reduces gradients itself
                    grads = [weight.grad for weight in model.parameters()]
                    for bucket in (grads[-6:], grads[-10:-6], grads[-14:-10], grads[:-14]):
                        dist.all_reduce(torch.cat([grad.flatten() for grad in bucket]))
            model.zero_grad()
            if profiler:
                timelines.append(_timeline(profiler.events()))
    found = {}
    for way, timelines in tries.items():
        times: list = [None, None]
        dist.all_gather_object(times, [exposed([timeline])[1] for timeline in timelines])
        found[way] = timelines[min(range(TRIES), key=lambda number: max(time[number] for time in times))]
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _timeline(events: list) -> dict[str, list[list[float]]]:
    """Start and end of each layer's backward and of each all-reduce, in ms since the backward began."""
    kinds = {"layers": "autograd::engine::evaluate_function: AddmmBackward0", "reduces": "gloo:all_reduce"}
    spans = {
        kind: [[event.time_range.start / 1e3, event.time_range.end / 1e3] for event in events if event.name == name]
        for kind, name in kinds.items()
    }
    begin = min(start for start, _ in spans["layers"])
    return {kind: sorted([start - begin, end - begin] for start, end in part) for kind, part in spans.items()}


def exposed(ranks: list[dict]) -> tuple[float, float]:
    """Of rank 0: milliseconds of all-reduces after the backward's end, and the time until gradients are complete."""
    backward, complete = (max(end for _, end in ranks[0][kind]) for kind in ("layers", "reduces"))
    return max(0.0, complete - backward), max(backward, complete)


if __name__ == "__main__":
    profile(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
