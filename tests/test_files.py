"""Only regular files are read, up to a size limit; each real folder is visited once; YAML aliases can't expand."""

import os
from pathlib import Path

import pytest

from common.files import OddFile, check_regular, open_regular, read_bytes, read_yaml, walk
from tests.harness.odd_files import IRREGULAR, bounded, huge

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    IRREGULAR[kind](tmp_path / "file")
    for read in (
        open_regular,
        check_regular,
        lambda path: read_bytes(path, 10),
        lambda path: check_regular(path.parent),
    ):
        with bounded(), pytest.raises(OddFile, match="file: not a regular file"):
            read(tmp_path / "file")


def test_a_file_is_read_up_to_its_limit_and_a_larger_one_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234567890")
    assert read_bytes(tmp_path / "file", 10) == b"1234567890"
    with pytest.raises(OddFile, match="file: 10 bytes, the limit is 9"):
        read_bytes(tmp_path / "file", 9)
    huge(tmp_path / "huge")
    with bounded(), pytest.raises(OddFile, match="huge: 1,099,511,627,776 bytes, the limit is 10"):
        read_bytes(tmp_path / "huge", 10)


def test_folders_that_link_to_each_other_are_visited_once(tmp_path: Path) -> None:
    """Twelve folders with links to all of them have more than 12! paths."""
    for number in range(12):
        folder = tmp_path / f"{number:02}"
        folder.mkdir()
        (folder / "file").touch()
        for other in range(12):
            (folder / f"to {other:02}").symlink_to(f"../{other:02}")
    with bounded():
        found = [(folder, [entry.name for entry in entries]) for folder, entries in walk(tmp_path)]
    assert len(found) == 1 + 12 and [names for _, names in found].count([]) == 0
    assert {folder for folder, _ in found} == {str(tmp_path), *(f"{tmp_path}/{number:02}" for number in range(12))}
    assert found == [(folder, [entry.name for entry in entries]) for folder, entries in walk(tmp_path)]


def test_a_folder_may_be_deeper_than_the_recursion_limit(tmp_path: Path) -> None:
    deep = [str(tmp_path) + "/a" * depth for depth in range(1, 1101)]
    for folder in deep:
        os.mkdir(folder)
    assert [folder for folder, _ in walk(tmp_path)] == [str(tmp_path), *deep]
    for folder in reversed(deep):  # which pytest could not
        os.rmdir(folder)


def laughs(levels: int) -> str:
    """YAML of a few lines that stands for 10^levels entries."""
    return "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 10}]\n" for n in range(1, levels))


@pytest.mark.parametrize(
    "text, told",
    [
        (laughs(9), "repeats a list or mapping"),
        ("a: &a {x: 1}\nb: {<<: [*a, *a]}", "repeats a list or mapping"),
        ("[" * 20_000, "nested too deeply"),
        ("a: !!int abc", "unknown tag"),
        ("a: !!python/object/apply:os.getpid []", "unknown tag"),
        ("a: 1\na: 2", "a is given twice"),
        ("[a]: 1", "a key must be text"),
        ('a: "\\U00110000"', "not in range"),
        (b"\xff", "can't decode"),
        ("a: 1\n---\nb: 2", "single document"),
    ],
)
def test_other_yaml_is_refused_in_one_line(tmp_path: Path, text: str | bytes, told: str) -> None:
    (tmp_path / "file").write_bytes(text if isinstance(text, bytes) else text.encode())
    with bounded(), pytest.raises(ValueError, match=told) as raised:
        read_yaml(tmp_path / "file", 2**20)
    assert "\n" not in str(raised.value)


def test_yaml_values_are_text_or_switches(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a: [1, yes, ~, '~', 010, 2024-01-01]\nb: &b {c: no}\n3: &x y\n4: *x\nno: !!str 1")
    switched = {"a": ["1", True, None, "~", "010", "2024-01-01"], "b": {"c": False}, "3": "y", "4": "y", "no": "1"}
    assert read_yaml(tmp_path / "file", 200) == switched
    plain = {"a": ["1", "yes", "~", "~", "010", "2024-01-01"], "b": {"c": "no"}, "3": "y", "4": "y", "no": "1"}
    assert read_yaml(tmp_path / "file", 200, switches=False) == plain
