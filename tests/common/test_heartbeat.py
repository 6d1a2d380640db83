"""The threads that watch a process have ended before it does: one inside torch at that moment would abort it."""

import threading
import time

import pytest
from torch.distributed import HashStore

from common import heartbeat


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
    monkeypatch.setattr(heartbeat, "BEAT", 0.001)
    monkeypatch.setattr(heartbeat, "PrefixStore", lambda prefix, store: store)  # torch's would not call Python
    store = SlowStore()
    heartbeat.begin(store, rank=0, world_size=1, patience=1000, name="test")
    assert store.asked.wait(60), "no beat: this would prove nothing"
    heartbeat.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
