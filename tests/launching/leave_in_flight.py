"""Pairs of processes that leave their run while collectives are in flight, for test_launch.py; prints
their exit codes. Its argument is a folder.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from common.launching import launch
from common.launching.exit_codes import RESUMABLE


def leave_pair(store: Path) -> list[int]:
    """Exit codes of two processes that meet in the file `store` and leave."""
    processes = []
    for rank in range(2):
        process = os.fork()
        if process == 0:
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
            # In a group with threads of its own, which a barrier does not wait for.
            group = dist.new_group([0, 1])
            for _ in range(300):
                dist.all_reduce(torch.ones(2_000), group=group, async_op=True)
            launch.leave(RESUMABLE, [])
        processes.append(process)
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


if __name__ == "__main__":
    for trial in range(2):
        print(*leave_pair(Path(sys.argv[1]) / str(trial)))
