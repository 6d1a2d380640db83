"""Training waits only for the copy, one checkpoint is written at a time, and every failure is raised."""

import threading

import pytest
import torch

from common.checkpoints.writer import Writer
from tests.harness.outcomes import identical


def files(value: float) -> dict:
    weight = torch.full((2, 3), value)
    model = {
        "weight": weight,
        "tied": weight,
        "turned": torch.full((2, 3), value).T,
        "empty": torch.zeros(0),
    }
    return {"model": model, "optimizer": {"step": torch.tensor(value, dtype=torch.float64)}}


def test_the_state_at_the_call_is_written_while_training_goes_on() -> None:
    writer, live, go, written = Writer(), files(1.0), threading.Event(), []

    def write(copies: dict) -> None:
        assert go.wait(60)
        written.append(
            {
                file: {name: copy.clone() for name, copy in each.items()}
                for file, each in copies.items()
            }
        )

    writer.start(live, write)
    for tensors in live.values():
        for tensor in tensors.values():
            tensor.add_(1.0)
    second = threading.Thread(target=writer.start, args=(files(2.0), write))
    second.start()
    second.join(0.2)
    assert second.is_alive() and not written
    go.set()
    second.join(60)
    assert writer.wait() >= 0.0
    for copies, expected in zip(written, (files(1.0), files(2.0)), strict=True):
        assert copies.keys() == expected.keys()
        assert all(identical(copies[file], expected[file]) for file in expected)


@pytest.mark.parametrize("at", ["the end", "the next"])
def test_a_failure_is_raised_once_in_the_training_thread(at: str) -> None:
    writer, done = Writer(), []

    def fail(copies: dict) -> None:
        raise OSError(28, "No space left on device")

    writer.start(files(1.0), fail)
    writer._thread.join(60)
    assert writer.failed
    with pytest.raises(OSError, match="No space left on device"):
        writer.wait() if at == "the end" else writer.start(files(2.0), fail)
    assert not writer.failed
    writer.start(files(3.0), lambda copies: done.append(True))
    writer.wait()
    assert done
