"""Ordered all-reduces in progress: their end, or the end of the world."""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from compat.horovod.exceptions import HorovodInternalError

_TURN = timedelta(seconds=1)  # after which a thread that waits looks whether a rank has died


class OrderedWork:
    """One ordered all-reduce. `broken` tells why the world has ended, "" while it has not; `break_off` ends it."""

    def __init__(
        self, work: dist.Work, on_device: bool, broken: Callable[[], str], break_off: Callable[[str], None]
    ) -> None:
        self.work, self.on_device, self.broken, self.break_off = work, on_device, broken, break_off

    def wait(self) -> None:
        """Return when the tensor holds the sum; on CUDA, when the current stream will wait for it.

        Raises HorovodInternalError if a rank has died or gave another tensor.
        """
        while not (why := self.broken()):
            try:
                if self.on_device:
                    self.work.wait()
                else:
                    self.work.wait(_TURN)
                return
            except RuntimeError as error:
                if self.on_device or self.work.is_completed():
                    self.break_off(f"an ordered all-reduce failed: {error}")
        raise HorovodInternalError(why)
