"""Elastic training: a script that continues from its last commit when processes die, leave or join.

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            ...
            state.commit()

Start it with `accelerate launch --max_restarts 3` or `torchrun --max-restarts 3`: when a
process dies, the launcher replaces all of them, and each calls `train` with the state of
the last commit.
Where commits lie: see `commits`.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from compat.horovod import world
from compat.horovod.elastic.sampler import ElasticSampler
from compat.horovod.elastic.state import ObjectState, TorchState
from compat.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["ElasticSampler", "ObjectState", "TorchState", "run"]

LIMIT = 3  # failures in this process without a commit between them


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, whose first argument is a state, so that it outlives failures.

    Before each call the state is synchronised from rank 0; a new process first loads the
    last commit from disk. After a HorovodInternalError on all ranks the state is restored
    from the last commit, Horovod starts again, and the function is called again. It may
    repeat the steps since the last commit.

    Raises:
        HorovodInternalError: the fourth in a row without a commit between them.
    """

    @functools.wraps(func)
    def wrapper(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        commits = state._commits
        if (stored := commits.newest()) is not None:
            state._take_stored(stored)
            state.restore()
            state.on_reset()
        failures, number = 0, commits.number
        while True:
            try:
                state.sync()
                result = func(state, *args, **kwargs)
            except HorovodInternalError as error:
                failures = failures + 1 if commits.number == number else 1
                number = commits.number
                if failures > LIMIT:
                    raise
                print(f"rank {world.rank()}: {error}; restoring the last commit", file=sys.stderr)
                state.restore()
            except HostsUpdatedInterrupt:  # of the script's own
                pass
            else:
                commits.remove_at_exit()
                return result
            world.shutdown()
            world.init()
            state.on_reset()

    return wrapper
