"""Replicas of shards: which processes hold a model together, and which hold the same shard of it."""

import torch
import torch.distributed as dist

from common.distributed import sharding
from common.distributed.sharding import Sharding
from tests.harness.processes import Processes


def groups() -> list[list[int]]:
    sharding.begin(Sharding(shards=2), torch.device("cpu"))
    assert sharding._begun
    return [dist.get_process_group_ranks(sharding._begun[1].get_group(name)) for name in ("replica", "shard")]


def test_neighbours_share_a_model_and_replicas_the_same_shard(processes: Processes) -> None:
    found = processes.run(groups, ranks=4)
    assert found == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]
