"""A checkpoint is complete or missing, all damage is detected, and nothing in it can execute code."""

import io
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch

from common.checkpoints.store import Checkpoints, Damaged, verify
from tests.harness.odd_files import Malicious
from tests.harness.outcomes import identical, seal


def tensors(step: int, size: int = 50) -> dict:
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
    return [
        checkpoints.save({"step": step, "best": {"top1": 0.5}}, tensors(step)) for step in steps
    ]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def newest(folder: Path) -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = Checkpoints(folder).find_newest(said.append)
    return found and found.step, said


def test_tensors_come_back_as_they_were_also_tied_and_strided(tmp_path: Path) -> None:
    whole = torch.arange(48.0).reshape(2, 3, 2, 4)
    odd = {
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
    expected = tensors(200) | {"odd": odd}
    path = Checkpoints(tmp_path).save({"step": 200, "best": {"top1": 0.5}}, expected)
    assert path == tmp_path / "step_00000200"
    assert names(path) == [
        "manifest.json",
        *sorted(f"{file}.safetensors" for file in expected),
        "record.json",
    ]
    # Whoever may read the folder may read the files.
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {path.stat().st_mode & 0o666}
    found = verify(path)
    assert found.record == {"step": 200, "best": {"top1": 0.5}} and found.step == 200
    loaded = found.load_tensors()
    assert loaded.keys() == expected.keys()
    assert all(identical(loaded[file], expected[file]) for file in expected)
    assert found.read_shapes()["optimizer"] == {"weight/exp_avg": (50,), "weight/step": ()}
    assert newest(tmp_path) == (200, [])


def test_the_newest_are_kept_also_where_their_names_grow_longer(tmp_path: Path) -> None:
    steps = [5, 99_999_999, 100_000_000, 1_000_000_000]
    for keep in (1, 3):
        save(tmp_path / str(keep), *steps, keep=keep)
        assert [
            int(path.name[5:]) for path in Checkpoints(tmp_path / str(keep)).list_paths()
        ] == steps[::-1][:keep]
    assert newest(tmp_path / "missing") == newest(tmp_path) == (None, [])


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped at the start": lambda path: flip(path, 0.0),
    "flipped in the middle": lambda path: flip(path, 0.5),
    "flipped at the end": lambda path: flip(path, 1.0),
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
    step, said = newest(tmp_path)
    assert step == 1
    assert (
        len(said) == 1
        and str(second) in said[0]
        and "is damaged" in said[0]
        and "the one before it" in said[0]
    )
    assert file in said[0] or file == "manifest.json"
    # It is put aside, so that it does not count as kept and the same step can be made, and damaged,
    # again.
    damaged = "step_00000002.damaged"
    assert names(tmp_path) == ["step_00000001", damaged]
    DAMAGES[damage](save(tmp_path, 2)[0] / file)
    assert newest(tmp_path)[0] == 1 and names(tmp_path) == ["step_00000001", damaged]
    save(tmp_path, 2, 3)
    assert newest(tmp_path) == (3, []) and names(tmp_path) == [
        "step_00000002",
        damaged,
        "step_00000003",
    ]


def test_drafts_are_swept_and_a_checkpoint_is_written_once(
    tmp_path: Path,
) -> None:
    (whole,) = save(tmp_path, 1)
    shutil.copytree(whole, tmp_path / ".step_00000002.tmp")
    (tmp_path / "step_00000003").touch()  # not a folder
    (tmp_path / "step_3").mkdir()  # not the name of one
    assert newest(tmp_path) == (1, [])
    Checkpoints(tmp_path).remove_drafts()
    assert names(tmp_path) == ["step_00000001", "step_00000003", "step_3"]
    shutil.copytree(whole, tmp_path / ".step_00000002.tmp")
    assert save(tmp_path, 2) and newest(tmp_path) == (2, [])
    before = content(tmp_path)
    assert (
        Checkpoints(tmp_path).save({"step": 1}, tensors(0)) == whole and content(tmp_path) == before
    )


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("target", [(os, "fsync"), (Path, "rename"), (Path, "write_text")])
def test_a_failure_at_any_point_leaves_the_old_ones_and_no_draft(
    tmp_path: Path, target: tuple, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2)
    before = content(tmp_path)

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        with pytest.raises(type(error)):
            save(tmp_path, 3)
    assert content(tmp_path) == before
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def as_torch(payload: Malicious) -> bytes:
    torch.save({"weight": payload}, buffer := io.BytesIO())
    return buffer.getvalue()


PAYLOADS = {
    "pickle": pickle.dumps,
    "torch": as_torch,
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
    """Instead of a file or beside it; not even where the manifest has been made to fit."""
    trace = tmp_path / "executed"
    _, second = save(tmp_path / "checkpoints", 1, 2)
    content = PAYLOADS[how](Malicious(trace))
    (second / file).write_bytes(content)
    with pytest.raises(Damaged):
        verify(second)
    if file in ("model.safetensors", "optimizer.safetensors", "record.json"):
        seal(second)
    step, said = newest(tmp_path / "checkpoints")
    assert step == 1 and len(said) == 1 and not trace.exists()
    if how == "pickle":
        pickle.loads(content)
        assert trace.exists()  # it would have been
