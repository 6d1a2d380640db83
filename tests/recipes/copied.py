"""How do tests copy a recipe and change it as a person would?

A change is a file of `tests/recipes/copies/`, or a text like it: a line about it, and parts that begin with a line @@. The
lines of a part begin with a blank where they stay, - where they go, and + where they come. It has no line numbers: what stays
and goes must be found once.
"""

from pathlib import Path

COPIES = Path(__file__).parent / "copies"


def change(name: str) -> str:
    """The text of `copies/<name>.diff`."""
    return (COPIES / f"{name}.diff").read_text()


def apply(diff: str, source: str) -> str:
    """`source` with a change."""
    _, *parts = diff.split("@@\n")
    for part in parts:
        lines = part.splitlines()
        assert {line[:1] for line in lines} <= {*" -+", ""}, f"neither blank, - nor +:\n{part}"
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != other) for other in "+-")
        assert old and source.count(old) == 1, f"{source.count(old)} times in the recipe, and not once:\n{old}"
        source = source.replace(old, new)
    return source


def changed_lines(diff: str) -> int:
    """How many lines a person writes for it."""
    return sum(line.startswith("+") and bool(line[1:].strip()) for line in diff.splitlines())


def copy(to: Path, *diffs: str, recipe: str = "cls") -> Path:
    """A copy of recipes/<recipe>.py in the file `to`, with changes."""
    source = Path(f"recipes/{recipe}.py").read_text()
    for diff in diffs:
        source = apply(diff, source)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(source)
    return to
