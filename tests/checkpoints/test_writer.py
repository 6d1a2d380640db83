"""Training waits only for the copy, one checkpoint is written at a time, and every failure is raised."""

import threading

import pytest
import torch

from common.checkpoints.writer import Writer


def files(value: float) -> dict:
    weight = torch.full((2, 3), value)
    model = {"weight": weight, "tied": weight, "turned": torch.full((2, 3), value).T, "empty": torch.zeros(0)}
    return {"model": model, "optimizer": {"step": torch.tensor(value, dtype=torch.float64)}}


def test_the_state_at_the_call_is_written_while_training_continues() -> None:
    writer, live, go, written = Writer(), files(1.0), threading.Event(), []

    def write(copies: dict) -> None:
        assert go.wait(60)
        written.append({file: {name: copy.clone() for name, copy in each.items()} for file, each in copies.items()})

    writer.start(live, write)
    for tensors in live.values():
        for tensor in tensors.values():
            tensor.add_(1.0)
    assert not written
    go.set()
    assert writer.wait() >= 0.0
    (copies,), expected = written, files(1.0)
    assert copies.keys() == expected.keys()
    for file, tensors in expected.items():
        assert copies[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(copies[file][name], tensor) and copies[file][name].dtype == tensor.dtype, name


def test_the_next_waits_for_the_one_before() -> None:
    writer, go, order = Writer(), threading.Event(), []

    def slowly(copies: dict) -> None:
        go.wait(60)
        order.append(copies["optimizer"]["step"].item())

    writer.start(files(1.0), slowly)
    second = threading.Thread(target=writer.start, args=(files(2.0), slowly))
    second.start()
    second.join(0.2)
    assert second.is_alive() and order == []
    go.set()
    second.join(60)
    writer.wait()
    assert order == [1.0, 2.0]


@pytest.mark.parametrize("at", ["the end", "the next"])
def test_a_failure_is_seen_and_raised_once_in_the_training_thread(at: str) -> None:
    writer, go = Writer(), threading.Event()

    def fail(copies: dict) -> None:
        go.wait(60)
        raise OSError(28, "No space left on device")

    writer.start(files(1.0), fail)
    assert not writer.failed
    go.set()
    writer._thread.join(60)
    assert writer.failed
    with pytest.raises(OSError, match="No space left on device"):
        writer.wait() if at == "the end" else writer.start(files(2.0), fail)
    assert not writer.failed
    writer.wait()
    done = []
    writer.start(files(3.0), lambda copies: done.append(True))
    writer.wait()
    assert done
