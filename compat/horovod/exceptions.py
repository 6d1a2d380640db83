"""Exceptions of the Horovod API."""


class HorovodInternalError(RuntimeError):
    """A collective that could not be completed: ranks disagree about it, one of them has left, or the network failed.

    It is raised on all ranks that take part. After a disagreement the world can still be used; after a rank has died, only
    after `shutdown()` and `init()`. `elastic.run` restores the last commit when it sees this error.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed. `elastic.run` starts again with the new hosts, without restoring the last commit."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync
