"""Exceptions of the Horovod API."""


class HorovodInternalError(RuntimeError):
    """A collective could not be completed: ranks disagree, one has left, or the network failed.

    It is raised on all ranks that take part. After a disagreement the world can still be used;
    after a rank has died, only after `shutdown()` and `init()`. `elastic.run` restores the last
    commit when it sees this error.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """`elastic.run` starts again without restoring the last commit.

    Nothing here raises it: scripts import it.
    """
