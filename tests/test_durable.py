"""A name reaches the disk only after its content, and nothing is written through somebody else's link."""

import os
from pathlib import Path

import pytest

from common.durable import make_folder, remove, replace_file, replace_folder, sync_folder


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and renamed, in order."""
    done: list[str] = []
    fsync = os.fsync
    rename = os.rename
    replace = os.replace

    def synced(descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = next(
            path
            for path in (tmp_path, *tmp_path.rglob("*"))
            if os.path.samestat(path.stat(), status)
        )
        done.append(f"sync {path.relative_to(tmp_path)}")
        fsync(descriptor)

    def renamed(how):
        def move(source, target) -> None:
            done.append(f"{Path(source).name} -> {Path(target).name}")
            how(source, target)

        return move

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed(rename))
    monkeypatch.setattr(os, "replace", renamed(replace))
    return done


def write_folder(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "file").write_text(text)
    return path


def test_a_file_is_synced_then_named_then_its_folder_is_synced(
    tmp_path: Path, steps: list[str]
) -> None:
    for content in (b"one", b"two"):
        replace_file(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert steps == ["sync .file.tmp", ".file.tmp -> file", "sync ."] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_synced_with_all_in_it(tmp_path: Path, steps: list[str]) -> None:
    write_folder(tmp_path / "one/two", "")
    sync_folder(tmp_path / "one")
    assert steps == ["sync one/two", "sync one/two/file", "sync one"]


def test_the_old_folder_goes_only_once_the_new_one_is_durable(
    tmp_path: Path, steps: list[str]
) -> None:
    final = tmp_path / "best"
    for text in ("one", "two"):
        write_folder(tmp_path / ".best.tmp", text)
        write_folder(tmp_path / ".best.old", "left by a kill")
        replace_folder(final, tmp_path / ".best.tmp")
        assert (final / "file").read_text() == text
        assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert steps == [
        ".best.tmp -> best",
        "sync .",
        "best -> .best.old",
        ".best.tmp -> best",
        "sync .",
    ]


def test_the_names_of_new_folders_are_durable(tmp_path: Path, steps: list[str]) -> None:
    make_folder(tmp_path / "runs/here/a")
    assert steps == ["sync .", "sync runs", "sync runs/here"]
    make_folder(tmp_path / "runs/here/a")
    assert len(steps) == 3
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        make_folder(tmp_path / "file/a")


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        replace_file(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


@pytest.mark.parametrize("final", ["nothing", "a link"])
def test_a_link_in_the_place_of_a_draft_is_not_followed(tmp_path: Path, final: str) -> None:
    victim = tmp_path / "victim"
    run = tmp_path / "run"
    victim.write_text("mine")
    run.mkdir()
    for name in (".file.tmp", *["file"] * (final == "a link")):
        (run / name).symlink_to(victim)
    replace_file(run / "file", b"new")
    assert victim.read_text() == "mine"
    assert (run / "file").read_bytes() == b"new" and not (run / "file").is_symlink()


def test_removing_a_link_keeps_its_target(tmp_path: Path) -> None:
    write_folder(tmp_path / "victim", "mine")
    for path in (tmp_path / "victim", tmp_path / "victim/file", tmp_path / "nowhere"):
        (tmp_path / "link").symlink_to(path)
        remove(tmp_path / "link")
        assert not os.path.lexists(tmp_path / "link")
    assert (tmp_path / "victim/file").read_text() == "mine"
    remove(tmp_path / "victim/file/nothing")
    remove(tmp_path / "victim")
    assert not list(tmp_path.iterdir())
