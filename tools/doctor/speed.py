"""Speed: the slowest rank by name, from the same computation on each and the order in which they reach the others."""

import time
from collections import Counter
from statistics import median

import torch

from common.distributed.collectives import gather_objects
from tools.doctor.finding import Finding
from tools.doctor.world import World

ROUNDS = 15
ROUND_S = 0.05  # of computation between two meetings
AT_MOST = 10  # times as many as the slowest rank does in ROUND_S
LONGEST_S = 3.0  # of all rounds, once there are five
SLOWER = 1.25  # than the median of the others; equal GPUs differ by 1 to 5 %
_SIDE = {"cpu": 256, "cuda": 2048}  # of the matrices


def speed(world: World) -> list[Finding]:
    """Each round, all ranks compute the same and then meet: who comes last keeps the others waiting."""
    side = _SIDE[world.device.type]
    matrix = torch.full((side, side), 1 / side, device=world.device)
    _compute(world, matrix, 3)  # warm
    began = time.perf_counter()
    _compute(world, matrix, 5)
    repeats = max(1, int(ROUND_S / ((time.perf_counter() - began) / 5)))
    # As many as a typical rank does in time: short rounds would fit between the turns of other processes, and hide them.
    of_ranks = gather_objects(repeats)
    repeats = min(int(median(of_ranks)) + 1, AT_MOST * min(of_ranks))
    rounds: list[list[float]] = []  # the seconds of each rank
    while len(rounds) < ROUNDS and (len(rounds) < 5 or sum(map(max, rounds)) < LONGEST_S):
        began = time.perf_counter()
        _compute(world, matrix, repeats)
        rounds.append(gather_objects(time.perf_counter() - began))
    if not world.is_main:
        return []
    typical = [median(theirs) for theirs in zip(*rounds, strict=True)]
    flops = 2 * side**3 * repeats
    figures: dict = {
        "ms": [round(1000 * each, 2) for each in typical],
        "gflops": [round(flops / each / 1e9, 1) for each in typical],
    }
    if world.world_size == 1:
        return [Finding("speed", "ok", f"{figures['gflops'][0]:.0f} Gflop/s in fp32", figures=figures)]
    last = Counter(row.index(max(row)) for row in rounds)
    share = 1 - sum(sum(row) / len(row) for row in rounds) / sum(map(max, rounds))
    slowest = max(range(world.world_size), key=typical.__getitem__)
    ratio = typical[slowest] / median(typical[:slowest] + typical[slowest + 1 :])
    figures |= {"slowest": slowest, "ratio": ratio, "last": dict(last), "waited": share}
    measured = (
        f"{ratio:.2f} times the others' time, last in {last[slowest]} of {len(rounds)} rounds; "
        f"on average a rank waits {share:.0%} of its time"
    )
    if ratio < SLOWER:
        return [Finding("speed", "ok", f"slowest is {world.name(slowest)}: {measured}", figures=figures)]
    way_out = "every step waits for it: look there for other processes (top, nvidia-smi), throttling, and a CPU quota"
    return [Finding("speed", "warning", measured, way_out, world.name(slowest), figures)]


def _compute(world: World, matrix: torch.Tensor, repeats: int) -> None:
    for _ in range(repeats):
        torch.mm(matrix, matrix)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
