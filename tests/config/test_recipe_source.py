"""A recipe's source is its file and its own modules; comments and formatting do not change it."""

import sys
import types
from pathlib import Path

import pytest

from common.config import recipe_source
from common.errors import Refused

pytestmark = pytest.mark.smoke
LOSS = '''"""A loss."""
import torch


class Focal(torch.nn.Module):
    gamma: float = 2.0
    """How much less an easy sample counts."""

    def forward(self, losses):
        """[B] -> [B]"""
        return (1 - (-losses).exp()) ** self.gamma * losses  # Lin et al., 2017
'''


def start(folder: Path, monkeypatch, **files: str) -> recipe_source.Source:
    """The source of hard.py among these files, by name with / as __."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", [str(folder / "hard.py"), "--seed", "1"])
    # No notebook.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "hard.py"), raising=False)
    return recipe_source.read_source()


def test_a_recipe_is_its_file_and_the_modules_beside_it(tmp_path, monkeypatch) -> None:
    hard = "import os, losses.focal\nfrom mine import model\nfrom common import run\nfrom . import near\n"
    files = {
        "losses__focal": LOSS,
        "losses____init__": "",
        "mine": "import deep",
        "deep": "import hard",
        "near": "",
    }
    read = start(
        tmp_path, monkeypatch, hard=hard, common____init__="", common__run="", far="", **files
    )
    assert next(iter(read)) == "hard.py"
    assert set(read) == {"hard.py", "losses/focal.py", "mine.py", "deep.py", "near.py"}
    assert read["losses/focal.py"] == LOSS
    assert (
        recipe_source.get_recipe_name() == "hard"
        and recipe_source.find_recipe_file() == tmp_path / "hard.py"
    )
    recipe_source.save_source(read, tmp_path / "run")
    assert {path.name: path.read_text() for path in (tmp_path / "run/source").rglob("*.py")} == {
        Path(name).name: text for name, text in read.items()
    }


def test_comments_and_formatting_do_not_change_a_source(tmp_path, monkeypatch) -> None:
    commented = (
        LOSS.replace("A loss", "The loss")
        .replace("  # Lin et al., 2017", "")
        .replace("How much", "By how much")
    )
    commented = commented.replace(
        "        return (1 - (-losses).exp())",
        "        return (\n            1 - (-losses).exp()\n        )",
    )
    assert commented != LOSS
    assert recipe_source.diff_sources({"hard.py": LOSS}, {"hard.py": commented}) == []
    # The recipe itself may be called otherwise.
    assert recipe_source.diff_sources({"cls.py": LOSS}, {"hard.py": LOSS}) == []


def test_other_code_is_shown_in_a_few_lines() -> None:
    before = {"hard.py": LOSS, "mine.py": "a = 1"}
    after = {"hard.py": LOSS.replace("2.0", "3.0"), "mine.py": "a = 1"}
    assert recipe_source.diff_sources(before, after) == [
        "--- hard.py before",
        "+++ hard.py now",
        "-    gamma: float = 2.0",
        "+    gamma: float = 3.0",
    ]
    assert "+a = 2" in recipe_source.diff_sources(before, before | {"mine.py": "a = 2"})
    assert "+a = 2" in recipe_source.diff_sources(before, before | {"other.py": "a = 2"})
    assert "-a = 1" in recipe_source.diff_sources(before, {"hard.py": LOSS})
    many = recipe_source.diff_sources(
        before, before | {"mine.py": "\n".join(f"a{number} = 2" for number in range(99))}
    )
    assert len(many) == 13 and many[-1] == "... and 90 more lines"
    spaces = f"x='{'a' * 114}  b'", f"x='{'a' * 114} b'"
    assert recipe_source.diff_sources({"hard.py": spaces[0]}, {"hard.py": spaces[1]}) != []
    # What is no Python is compared by its text.
    assert recipe_source.diff_sources({"hard.py": "%matplotlib"}, {"hard.py": "%matplotlib inline"})


def test_cells_of_a_notebook_are_refused(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    assert recipe_source.find_recipe_file(Path()).name == "pathlib.py"
    with pytest.raises(Refused, match="a recipe is a file"):
        recipe_source.read_source({})
