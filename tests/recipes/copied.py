"""Copies of recipes with changes, made as a person would make them: the diffs of docs/change_it.md,
and others like them.

A diff has hunks, each begun by a line `@@`, or `@@ name` if the hunk stands in the function or
class of that name. The lines of a hunk begin with a blank if they stay, - if they go, and + if they
come. What stays and goes is found exactly once. The diffs of the page also have line numbers, as
`patch` needs them: `python -m tests.recipes.copied` writes them anew.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_FILE = ROOT / "docs/change_it.md"
PAGE = _FILE.read_text()
_SECTIONS = {
    title.replace(" ", "-").lower(): text
    for title, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.M)
}
CHANGES = {  # by anchor of the page
    name: diff[1]
    for name, text in _SECTIONS.items()
    if (diff := re.search("```diff\n(.*?)```", text, re.S))
}


class Hunk(NamedTuple):
    """Lines that replace others."""

    start: int  # where `old` begins in the source, in characters
    old: str
    new: str
    scope: str  # the name of a function or class, or ""
    lines: str  # as the diff has them


def get_recipe(change: str) -> str:
    """The recipe that a change of the page is a diff of."""
    recipes = {"detection": "det", "segmentation": "seg"}
    return recipes.get(change.partition("-")[0], "cls")


def find_hunks(diff: str, source: str) -> list[Hunk]:
    """The hunks of `diff`, in the order of `source`."""
    hunks = []
    for scope, lines in re.findall(r"^@@(?: -.* @@)? ?(.*)\n((?:(?!@@).*\n)+)", diff, re.M):
        assert {line[:1] for line in lines.splitlines()} <= {*" -+", ""}, (
            f"neither blank, - nor +:\n{lines}"
        )
        old, new = (
            "".join(f"{line[1:]}\n" for line in lines.splitlines() if line[:1] != sign)
            for sign in "+-"
        )
        before, inside = _cut(source, scope)
        assert old and inside.count(old) == 1, (
            f"{inside.count(old)} times in {scope or 'the recipe'}, not once:\n{old}"
        )
        hunks.append(Hunk(before + inside.index(old), old, new, scope, lines))
    return sorted(hunks)


def _cut(source: str, name: str) -> tuple[int, str]:
    """Where a function or class begins, and its text; without a name, all of the source."""
    matches = (
        re.search(rf"^(?:def|class) {name}\b(?:.*\n)(?:(?:[ )].*)?\n)*", source, re.M)
        if name
        else None
    )
    assert matches or not name, f"no function or class {name}"
    return (matches.start(), matches[0]) if matches else (0, source)


def apply(diff: str, source: str) -> str:
    """`source` with a change."""
    for hunk in reversed(find_hunks(diff, source)):
        source = source[: hunk.start] + hunk.new + source[hunk.start + len(hunk.old) :]
    return source


def number_lines(diff: str, source: str) -> str:
    """`diff` as `patch` takes it: with the line numbers of `source`, in its order."""
    text = ""
    shift = 0
    for hunk in find_hunks(diff, source):
        first = source.count("\n", 0, hunk.start) + 1
        old = hunk.old.count("\n")
        new = hunk.new.count("\n")
        numbers = f"-{first},{old} +{first + shift},{new}".replace(",1 ", " ").removesuffix(",1")
        text += f"@@ {numbers} @@ {hunk.scope}".rstrip() + f"\n{hunk.lines}"
        shift += new - old
    return text


def read_recipe(recipe: str) -> str:
    return (ROOT / f"recipes/{recipe}.py").read_text()


def copy(to: Path, *diffs: str, recipe: str = "cls") -> Path:
    """A copy of recipes/<recipe>.py in the file `to`, with changes."""
    source = read_recipe(recipe)
    for diff in diffs:
        source = apply(diff, source)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(source)
    return to


if __name__ == "__main__":
    for change, diff in CHANGES.items():
        PAGE = PAGE.replace(diff, number_lines(diff, read_recipe(get_recipe(change))))
    _FILE.write_text(PAGE)
