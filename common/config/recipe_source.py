"""The source of a recipe, which checkpoints record so that a changed recipe does not resume unnoticed.

It consists of the recipe's file and the modules beside it that it imports, such as a custom loss,
but not `common`. Two sources are equal if they differ only in comments, docstrings and formatting.
"""

import ast
import contextlib
import difflib
import functools
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from common.durable import make_folder, replace_file
from common.errors import Refused

FOLDER = "source"  # in a run folder: the source of the run's newest start
_LINES, _WIDTH = 12, 120  # limits of a difference that is shown

Source = dict[str, str]  # name of a file, relative to the folder of the recipe -> its text


def started(config: object = None) -> Path | None:
    """The recipe's file: the script that Python runs, else the module that defines the class of
    `config`; None without both.

    Raises `Refused` for a class that is defined in cells of a notebook, whose changes no file would tell.
    """
    if hasattr(sys.modules["__main__"], "__file__") and Path(sys.argv[0]).is_file():
        return Path(sys.argv[0])
    file = getattr(sys.modules.get(type(config).__module__), "__file__", None) or ""
    if Path(file).is_file():
        return Path(file)
    if config is not None:
        raise Refused(
            "a recipe is a file: begin its cell with %%writefile mine.py, and start the main of "
            "`import mine`"
        )
    return None


def stem(config: object = None) -> str:
    """The recipe's name, from which run names are made: `hard` for hard.py."""
    file = started(config)
    return file.stem if file else ""


def read(config: object = None) -> Source:
    """The recipe's source, its main file first. Each file is read once, when this module is imported."""
    file = started(config)
    if not file:
        return {}
    file = file.resolve()
    folder, names = file.parent, [file.name]
    for name in names:  # grows in the loop
        names += [other for other in _imported(name, folder) if other not in names]
    return {name: _text(folder / name) for name in names}


def digests(source: Source) -> dict[str, str]:
    """The SHA-256 of each file."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in source.items()}


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A short unified diff of two sources without comments and docstrings; empty if they are equal."""
    lines = []
    # The recipe itself, which may have been renamed.
    mains = next(iter(before), ""), next(iter(now), "")
    others = sorted((before.keys() | now.keys()) - {*mains})
    for was, name in (mains, *zip(others, others, strict=True)):
        texts = before.get(was, ""), now.get(name, "")
        plain = texts if texts[0] == texts[1] else [*map(_plain, texts)]
        if plain[0] != plain[1]:
            old, new = (text.splitlines() for text in plain)
            found = difflib.unified_diff(old, new, f"{was} before", f"{name} now", lineterm="", n=0)
            # Whose numbers are not the file's.
            lines += [line[:_WIDTH] for line in found if not line.startswith("@@")]
    more = len(lines) - _LINES
    return lines if more <= 0 else [*lines[:_LINES], f"... and {more} more lines"]


@functools.cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@functools.cache
def _imported(file: str, folder: Path) -> list[str]:
    """Files in `folder` that `file` imports, except `common`."""
    names = set()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(_text(folder / file))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names |= {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
    places = [
        name.replace(".", "/") for name in sorted(names) if name and name.split(".")[0] != "common"
    ]
    files = [f"{place}{end}" for place in places for end in (".py", "/__init__.py")]
    return [file for file in files if (folder / file).is_file()]


def keep(source: Source, run: Path) -> None:
    """Write the source into a run folder, durably."""
    for name, text in source.items():
        make_folder((run / FOLDER / name).parent)
        replace_file(run / FOLDER / name, text.encode())


def _plain(text: str) -> str:
    """`text` without comments and docstrings, in a normal form; unchanged if this Python version
    can't parse it.
    """
    try:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(body := getattr(node, "body", None), list):
                body[:] = [
                    line
                    for line in body
                    if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                ]
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


read()  # now, before somebody edits the file: the other imports take seconds
