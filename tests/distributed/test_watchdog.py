"""Who is to blame, and the threads that watch a process have ended before it does: one inside torch would abort it."""

import threading
import time

import pytest
from torch.distributed import HashStore

from common.distributed import watchdog


class SlowStore(HashStore):
    """A store whose answers take their time, as that of a process that waits for a core."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if threading.current_thread().name == "heartbeat":
            self.asked.set()
            time.sleep(0.5)


@pytest.mark.smoke
def test_the_watching_threads_have_ended_when_it_is_told_to_end(monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT", 0.001)
    monkeypatch.setattr(watchdog, "PrefixStore", lambda prefix, store: store)  # torch's would not call Python
    store = SlowStore()
    watchdog.begin(store, rank=0, world_size=1, patience=1000, name="test")
    assert store.asked.wait(60), "no beat: this would prove nothing"
    watchdog.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def beat(collectives: int, waits: bool = False, step: int = 5) -> watchdog.Beat:
    return watchdog.Beat("here", 1, 1, collectives=collectives, waits=waits, step=step)


@pytest.mark.smoke
def test_who_has_begun_the_fewest_collectives_is_to_blame() -> None:
    """Wherever the others stand: a device that waits lets its host run on, and stops it in any line."""
    assert watchdog.blamed({0: beat(12), 1: beat(10), 2: beat(12)}) == [1]
    assert watchdog.blamed({0: beat(12), 1: beat(10, waits=True), 2: beat(11, waits=True)}) == [1]
    assert watchdog.blamed({0: beat(12), 1: beat(12, waits=True)}) == [0]
    assert watchdog.blamed({0: beat(12, waits=True), 1: beat(12, waits=True, step=4)}) == [1]
    assert watchdog.blamed({0: beat(12, waits=True), 1: beat(12, waits=True)}) == [0, 1]
