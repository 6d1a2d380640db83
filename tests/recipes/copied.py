"""Copies of recipes with changes, made as a person would make them: the diffs of docs/change_it.md,
and others like them.

A diff has parts, each begun by a line `@@`, or `@@ name` if the part stands in the function or
class of that name. The lines of a part begin with a blank if they stay, - if they go, and + if they
come. There are no line numbers: what stays and goes is found exactly once.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/change_it.md").read_text()
_SECTIONS = {
    title.replace(" ", "-").lower(): text
    for title, text in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, re.M)
}
CHANGES = {  # by anchor of the page
    name: diff[1]
    for name, text in _SECTIONS.items()
    if (diff := re.search("```diff\n(.*?)```", text, re.S))
}


def recipe_of(change: str) -> str:
    """The recipe that a change of the page is a diff of."""
    return "det" if change.startswith("detection-") else "cls"


def apply(diff: str, source: str) -> str:
    """`source` with a change."""
    for place, part in re.findall(r"^@@ ?(.*)\n((?:(?!@@).*\n)+)", diff, re.M):
        lines = part.splitlines()
        assert {line[:1] for line in lines} <= {*" -+", ""}, f"neither blank, - nor +:\n{part}"
        old, new = (
            "".join(f"{line[1:]}\n" for line in lines if line[:1] != other) for other in "+-"
        )
        before, inside, after = _cut(source, place)
        assert old and inside.count(old) == 1, (
            f"{inside.count(old)} times in {place or 'the recipe'}, not once:\n{old}"
        )
        source = before + inside.replace(old, new) + after
    return source


def _cut(source: str, name: str) -> tuple[str, str, str]:
    """What stands before, in and after a function or class; without a name, all is in it."""
    found = (
        re.search(rf"^(?:def|class) {name}\b(?:.*\n)(?:(?:[ )].*)?\n)*", source, re.M)
        if name
        else None
    )
    assert found or not name, f"no function or class {name}"
    start, end = found.span() if found else (0, len(source))
    return source[:start], source[start:end], source[end:]


def copy(to: Path, *diffs: str, recipe: str = "cls") -> Path:
    """A copy of recipes/<recipe>.py in the file `to`, with changes."""
    source = (ROOT / f"recipes/{recipe}.py").read_text()
    for diff in diffs:
        source = apply(diff, source)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(source)
    return to
