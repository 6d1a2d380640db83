"""A checkpoint is complete or missing, all damage is detected, and nothing in it executes code."""

import io
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch

from common.checkpoints.store import Checkpoints, Damaged, get_step, verify
from tests.harness.odd_files import Malicious
from tests.harness.outcomes import identical, seal


def make_tensors(step: int, size: int = 50) -> dict:
    return {
        "model": {
            "weight": torch.arange(size, dtype=torch.float32) + step,
            "empty": torch.zeros(0),
        },
        "optimizer": {
            "weight/exp_avg": torch.full((size,), float(step)),
            "weight/step": torch.tensor(float(step)),
        },
    }


def save(folder: Path, *steps: int, keep: int = 2) -> list[Path]:
    checkpoints = Checkpoints(folder, keep)
    paths = []
    for step in steps:
        record = {"step": step, "best": {"top1": 0.5}}
        paths.append(checkpoints.save(record, make_tensors(step)))
    return paths


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def find_newest(folder: Path) -> tuple[int | None, list[str]]:
    """The step of the newest intact checkpoint, and what is logged."""
    messages: list[str] = []
    checkpoint = Checkpoints(folder).find_newest(messages.append)
    return checkpoint.step if checkpoint else None, messages


def test_tensors_come_back_as_they_were_also_tied_and_strided(tmp_path: Path) -> None:
    whole = torch.arange(48.0).reshape(2, 3, 2, 4)
    odd_tensors = {
        "whole": whole,
        "tied": whole,
        "channels_last": whole.to(memory_format=torch.channels_last),
        "transposed": whole[0, 0].T,
        "slice": whole[1],
        "other slice": whole[0],
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(whole[0, 0]),
        "half": whole.half(),
    }
    expected = make_tensors(200) | {"odd": odd_tensors}
    path = Checkpoints(tmp_path).save({"step": 200, "best": {"top1": 0.5}}, expected)
    assert path == tmp_path / "step_00000200"
    tensor_files = [f"{file}.safetensors" for file in expected]
    assert list_names(path) == sorted(["manifest.json"] + tensor_files + ["record.json"])
    # Whoever may read the folder may read the files.
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {path.stat().st_mode & 0o666}
    checkpoint = verify(path)
    assert checkpoint.record == {"step": 200, "best": {"top1": 0.5}}
    assert checkpoint.step == 200
    loaded = checkpoint.load_tensors()
    assert loaded.keys() == expected.keys()
    assert all(identical(loaded[file], expected[file]) for file in expected)
    assert checkpoint.read_shapes()["optimizer"] == {"weight/exp_avg": (50,), "weight/step": ()}
    assert find_newest(tmp_path) == (200, [])


def test_the_newest_are_kept_also_where_their_names_grow_longer(tmp_path: Path) -> None:
    steps = [5, 99_999_999, 100_000_000, 1_000_000_000]
    for keep in (1, 3):
        save(tmp_path / str(keep), *steps, keep=keep)
        paths = Checkpoints(tmp_path / str(keep)).list_paths()
        assert [get_step(path) for path in paths] == steps[::-1][:keep]
    assert find_newest(tmp_path / "missing") == (None, [])
    assert find_newest(tmp_path) == (None, [])


def flip_bit(path: Path, position: float) -> None:
    """Flip a bit of a file, at the start for 0, at the end for 1."""
    data = bytearray(path.read_bytes())
    data[int(position * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped at the start": lambda path: flip_bit(path, 0.0),
    "flipped in the middle": lambda path: flip_bit(path, 0.5),
    "flipped at the end": lambda path: flip_bit(path, 1.0),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.smoke
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.safetensors", "record.json", "manifest.json"]
)
def test_the_one_before_a_damaged_checkpoint_is_taken(
    tmp_path: Path, file: str, damage: str
) -> None:
    _, second = save(tmp_path, 1, 2)
    DAMAGES[damage](second / file)
    with pytest.raises(Damaged):
        verify(second)
    step, (message,) = find_newest(tmp_path)
    assert step == 1
    for text in (str(second), "is damaged", "the one before it"):
        assert text in message
    assert file in message or file == "manifest.json"
    # It is put aside, so that it does not count as kept and the same step can be made, and damaged,
    # again.
    damaged = "step_00000002.damaged"
    assert list_names(tmp_path) == ["step_00000001", damaged]
    DAMAGES[damage](save(tmp_path, 2)[0] / file)
    assert find_newest(tmp_path)[0] == 1
    assert list_names(tmp_path) == ["step_00000001", damaged]
    save(tmp_path, 2, 3)
    assert find_newest(tmp_path) == (3, [])
    assert list_names(tmp_path) == ["step_00000002", damaged, "step_00000003"]


def test_drafts_are_removed_and_a_checkpoint_is_written_once(tmp_path: Path) -> None:
    (path,) = save(tmp_path, 1)
    shutil.copytree(path, tmp_path / ".step_00000002.tmp")
    (tmp_path / "step_00000003").touch()  # not a folder
    (tmp_path / "step_3").mkdir()  # not the name of one
    assert find_newest(tmp_path) == (1, [])
    Checkpoints(tmp_path).remove_drafts()
    assert list_names(tmp_path) == ["step_00000001", "step_00000003", "step_3"]
    shutil.copytree(path, tmp_path / ".step_00000002.tmp")
    save(tmp_path, 2)
    assert find_newest(tmp_path) == (2, [])
    before = read_files(tmp_path)
    assert Checkpoints(tmp_path).save({"step": 1}, make_tensors(0)) == path
    assert read_files(tmp_path) == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("target", [(os, "fsync"), (Path, "rename"), (Path, "write_text")])
def test_a_failure_at_any_point_leaves_the_old_ones_and_no_draft(
    tmp_path: Path, target: tuple, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    before = read_files(tmp_path)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        with pytest.raises(type(error)):
            save(tmp_path, 3)
    assert read_files(tmp_path) == before
    assert list_names(tmp_path) == ["step_00000001", "step_00000002"]


def dump_by_torch(payload: Malicious) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": payload}, buffer)
    return buffer.getvalue()


PAYLOADS = {
    "pickle": pickle.dumps,
    "torch": dump_by_torch,
    "deep JSON": lambda payload: b"[" * 100_000,
    "endless header": lambda payload: struct.pack("<Q", 2**63) + pickle.dumps(payload),
}


@pytest.mark.parametrize("how", PAYLOADS)
@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "optimizer.safetensors",
        "record.json",
        "manifest.json",
        "model.pt",
        ".metadata",
    ],
)
def test_a_payload_is_damage_and_never_executed(tmp_path: Path, file: str, how: str) -> None:
    """Instead of a file or beside it, and even if the manifest fits."""
    trace = tmp_path / "executed"
    _, second = save(tmp_path / "checkpoints", 1, 2)
    content = PAYLOADS[how](Malicious(trace))
    (second / file).write_bytes(content)
    with pytest.raises(Damaged):
        verify(second)
    if file in ("model.safetensors", "optimizer.safetensors", "record.json"):
        seal(second)
    step, messages = find_newest(tmp_path / "checkpoints")
    assert step == 1
    assert len(messages) == 1
    assert not trace.exists()
    if how == "pickle":
        pickle.loads(content)
        assert trace.exists()  # it would have been
