"""The watchdog blames the right rank, and its threads end before the process: one inside torch
would abort it.
"""

import threading
import time

import pytest
from torch.distributed import HashStore

from common.distributed import watchdog

pytestmark = pytest.mark.smoke


class SlowStore(HashStore):
    """A store that answers slowly, as on a busy machine."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if threading.current_thread().name == "watchdog":
            self.is_asked.set()
            time.sleep(0.5)


def test_end_waits_for_the_threads_of_the_watchdog(monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "INTERVAL", 0.001)
    # torch's would not call Python.
    monkeypatch.setattr(watchdog, "PrefixStore", lambda prefix, store: store)
    store = SlowStore()
    watchdog.start(store, rank=0, world_size=1, timeout=1000, program="test")
    assert store.is_asked.wait(60), "no heartbeat: this would prove nothing"
    watchdog.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def test_the_rank_with_the_fewest_collectives_is_blamed() -> None:
    """Wherever the hosts are: a host whose device waits continues for a while, and then waits in any line."""
    for beats, late in (
        ([(12, False, 5), (10, False, 5), (12, False, 5)], [1]),
        ([(12, False, 5), (10, True, 5), (11, True, 5)], [1]),
        ([(12, False, 5), (12, True, 5)], [0]),
        ([(12, True, 5), (12, True, 4)], [1]),
        ([(12, True, 5), (12, True, 5)], [0, 1]),
    ):
        heartbeats = []
        for rank, (count, waits, step) in enumerate(beats):
            heartbeats.append(
                watchdog.Heartbeat(rank, "host", 1, 1, collectives=count, waits=waits, step=step)
            )
        assert [beat.rank for beat in watchdog.find_stragglers(heartbeats)] == late
