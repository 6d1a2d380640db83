"""Training waits only for the copy, one checkpoint is written at a time, failures are raised."""

import copy
import threading

import pytest
import torch

from common.checkpoints.writer import Writer
from tests.harness.outcomes import identical


def make_files(value: float) -> dict:
    weight = torch.full((2, 3), value)
    model = {
        "weight": weight,
        "tied": weight,
        "transposed": torch.full((2, 3), value).T,
        "empty": torch.zeros(0),
    }
    return {"model": model, "optimizer": {"step": torch.tensor(value, dtype=torch.float64)}}


def test_the_state_at_the_call_is_written_while_training_goes_on() -> None:
    writer = Writer()
    files = make_files(1.0)
    may_write = threading.Event()
    written = []

    def write(copies: dict) -> None:
        assert may_write.wait(60)
        written.append(copy.deepcopy(copies))

    writer.start(files, write)
    for tensors in files.values():
        for tensor in tensors.values():
            tensor.add_(1.0)
    second = threading.Thread(target=writer.start, args=(make_files(2.0), write))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert not written
    may_write.set()
    second.join(60)
    assert writer.wait() >= 0.0
    for copies, expected in zip(written, (make_files(1.0), make_files(2.0)), strict=True):
        assert copies.keys() == expected.keys()
        assert all(identical(copies[file], expected[file]) for file in expected)


@pytest.mark.parametrize("call", ["wait", "start"])
def test_a_failure_is_raised_once_in_the_training_thread(call: str) -> None:
    writer = Writer()
    written = []

    def fail(copies: dict) -> None:
        raise OSError(28, "No space left on device")

    writer.start(make_files(1.0), fail)
    writer._thread.join(60)
    assert writer.failed
    arguments = () if call == "wait" else (make_files(2.0), fail)
    with pytest.raises(OSError, match="No space left on device"):
        getattr(writer, call)(*arguments)
    assert not writer.failed
    writer.start(make_files(3.0), written.append)
    writer.wait()
    assert len(written) == 1


def test_a_tensor_is_copied_in_its_dtype_whatever_the_last_was() -> None:
    writer = Writer()
    written = []
    for dtype in (torch.float32, torch.float64):
        files = {"model": {"weight": torch.full((2, 3), 0.1, dtype=dtype)}}
        writer.start(files, lambda copies: written.append(copy.deepcopy(copies)))
        writer.wait()
        assert identical(written[-1]["model"], files["model"])
