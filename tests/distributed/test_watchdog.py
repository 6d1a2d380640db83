"""The watchdog blames the right rank, and its threads end before the process: one inside torch would abort it."""

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
        self.asked = threading.Event()

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if threading.current_thread().name == "watchdog":
            self.asked.set()
            time.sleep(0.5)


def test_end_waits_for_the_threads_of_the_watchdog(monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "INTERVAL", 0.001)
    monkeypatch.setattr(watchdog, "PrefixStore", lambda prefix, store: store)  # torch's would not call Python
    store = SlowStore()
    watchdog.begin(store, rank=0, world_size=1, patience=1000, name="test")
    assert store.asked.wait(60), "no heartbeat: this would prove nothing"
    watchdog.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def beat(collectives: int, waits: bool = False, step: int = 5) -> watchdog.Heartbeat:
    return watchdog.Heartbeat("here", 1, 1, collectives=collectives, waits=waits, step=step)


def test_the_rank_with_the_fewest_collectives_is_blamed() -> None:
    """Wherever the hosts are: a host whose device waits continues for a while, and then waits in any line."""
    assert watchdog.blamed({0: beat(12), 1: beat(10), 2: beat(12)}) == [1]
    assert watchdog.blamed({0: beat(12), 1: beat(10, waits=True), 2: beat(11, waits=True)}) == [1]
    assert watchdog.blamed({0: beat(12), 1: beat(12, waits=True)}) == [0]
    assert watchdog.blamed({0: beat(12, waits=True), 1: beat(12, waits=True, step=4)}) == [1]
    assert watchdog.blamed({0: beat(12, waits=True), 1: beat(12, waits=True)}) == [0, 1]
