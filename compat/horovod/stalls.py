"""Stalls: what a rank that waits can learn from the ranks' store: which ranks do not wait with it, and that a set is broken."""

import logging
import os
import time

import torch.distributed as dist

from compat.horovod.requests import JOIN, Request

LOG = logging.getLogger("compat.horovod")


class Stalls:
    """Of one process set. `look` and `broken` are called about once a second by threads that wait."""

    def __init__(self, store: dist.Store, set_id: int, ranks: list[int], rank: int) -> None:
        self.store, self.ranks, self.rank = dist.PrefixStore(f"set/{set_id}", store), ranks, rank
        disabled = os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
        self.warn_s = 0.0 if disabled else float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", 60))
        self.fail_s = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0))
        self.number = 0  # of collectives that have ended: the same on all ranks
        self.told: set[float] = set()  # when operations were asked for that ranks were told or warned of

    def look(self, request: Request, asked: float) -> str:
        """Warn of an operation that waits for long. Returns why it has to fail, if it has to."""
        waited, key = time.monotonic() - asked, f"asked/{self.number}/{request.name}"
        if request.name == JOIN:
            return ""
        if asked not in self.told:
            self.told.add(asked)
            self.store.set(f"{key}/{self.rank}", "")
        elif self.fail_s and waited > self.fail_s:
            return f"{self._text(request, key)} in {self.fail_s:g} s"
        elif self.warn_s and waited > self.warn_s and -asked not in self.told:
            self.told.add(-asked)
            if self.rank == self.ranks[0]:
                LOG.warning("%s for more than %g s", self._text(request, key), self.warn_s)
        return ""

    def _text(self, request: Request, key: str) -> str:
        missing = [rank for rank in self.ranks if not self.store.check([f"{key}/{rank}"])]
        return f"{request.kind} '{request.name}' waits for ranks {missing}, which have not submitted it"

    def tell_broken(self, error: str) -> None:
        """Let the other ranks' waiting threads know, who may not notice it in the collective that they are in."""
        try:
            if not self.store.check(["broken"]):
                self.store.set("broken", error)
        except RuntimeError:  # its keeper has died, which the others see as well
            return

    def broken(self) -> str:
        """Why the set is broken; "" if it is not."""
        try:
            return self.store.get("broken").decode() if self.store.check(["broken"]) else ""
        except RuntimeError as error:
            return f"the ranks' store can't be reached: rank 0 has died or left ({' '.join(str(error).split())[:100]})"
