"""Only regular files are read, up to a size limit; each real folder is visited once; YAML aliases
can't expand.
"""

import os
from pathlib import Path

import pytest

from common.files import read_yaml, walk
from tests.harness.odd_files import bounded

pytestmark = pytest.mark.smoke


def test_a_folder_may_be_deeper_than_the_recursion_limit(tmp_path: Path) -> None:
    deep = [str(tmp_path) + "/a" * depth for depth in range(1, 1101)]
    for folder in deep:
        os.mkdir(folder)
    assert [folder for folder, _ in walk(tmp_path)] == ([str(tmp_path)] + deep)
    for folder in reversed(deep):  # which pytest could not
        os.rmdir(folder)


def build_laughs(levels: int) -> str:
    """YAML of a few lines that stands for 10^levels entries."""
    return "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [{f'*a{n - 1}, ' * 10}]\n" for n in range(1, levels)
    )


@pytest.mark.parametrize(
    "text, message",
    [
        (build_laughs(9), "repeats a list or mapping"),
        (f"a: &a {[0] * 17}\nb: *a", "repeats a list or mapping"),
        ("a: &a {x: 1}\nb: {<<: [*a, *a]}", "repeats a list or mapping"),
        ("[" * 20_000, "nested too deeply"),
        ("a: !!int 1", "constructor for the tag"),
        ("a: !!python/object/apply:os.getpid []", "constructor for the tag"),
        ("a: 1\na: 2", "a is given twice"),
        ("[a]: 1", "a key must be text"),
        ('a: "\\U00110000"', "not in range"),
        (b"\xff", "can't decode"),
        ("a: 1\n---\nb: 2", "single document"),
    ],
)
def test_other_yaml_is_refused_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(text if isinstance(text, bytes) else text.encode())
    with bounded(), pytest.raises(ValueError, match=message) as raised:
        read_yaml(tmp_path / "file", 2**20)
    assert "\n" not in str(raised.value)


def test_yaml_values_are_text_or_switches(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a: &l [x, y]\nb: *l")
    assert read_yaml(tmp_path / "file", 200) == {"a": ["x", "y"], "b": ["x", "y"]}
    (tmp_path / "file").write_text(
        "a: [1, yes, ~, '~', 010, 2024-01-01]\nb: &b {c: no}\n3: &x y\n4: *x\nno: !!str 1"
    )
    switched = {
        "a": ["1", True, None, "~", "010", "2024-01-01"],
        "b": {"c": False},
        "3": "y",
        "4": "y",
        "no": "1",
    }
    assert read_yaml(tmp_path / "file", 200) == switched
