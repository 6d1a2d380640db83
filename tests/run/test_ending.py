"""A process that closes its run is not closed a second time from within."""

import os
import signal

import pytest

from common.launching import launch
from common.run import ending as ending_module
from common.run.ending import Ending

pytestmark = pytest.mark.smoke


@pytest.fixture
def leaves(monkeypatch) -> list[str]:
    """What a process did that left its run by itself; waits may be left at once."""
    done: list[str] = []
    monkeypatch.setattr(ending_module, "GRACE_S", 0.0)
    monkeypatch.setattr(launch, "leave_now", lambda is_leaving: done.append("leave"))
    return done


def test_a_signal_after_an_error_does_not_interrupt_the_closing(leaves) -> None:
    """The error of a lost process ends the wait; the launcher's SIGTERM may come only then."""
    ending = Ending(lambda: leaves.append("save"))
    ending.handle_signals()
    try:
        with pytest.raises(RuntimeError, match="lost"), ending.leavable(is_evaluating=True):
            raise RuntimeError("lost")
        assert ending.is_evaluating, "what was interrupted is known"
        ending.cancel_alarm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ending.requested_by and leaves == []
    finally:
        ending.cancel_alarm()
        ending.restore_handlers()


def test_a_signal_within_a_wait_leaves_it(leaves) -> None:
    ending = Ending(lambda: leaves.append("save"))
    ending.handle_signals()
    try:
        with ending.leavable():
            os.kill(os.getpid(), signal.SIGTERM)
        assert leaves == ["save", "leave"]
    finally:
        ending.cancel_alarm()
        ending.restore_handlers()
