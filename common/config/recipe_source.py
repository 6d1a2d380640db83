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
# Of a difference in a message.
_MAX_LINES = 12
_MAX_COLUMNS = 120

Source = dict[str, str]  # name of a file, relative to the folder of the recipe -> its text


def find_recipe_file(config: object = None) -> Path | None:
    """The recipe's file: the script that Python runs, else the module of the class of `config`.

    None without both. Raises `Refused` for a class that is defined in cells of a notebook, whose
    changes no file would show.
    """
    if hasattr(sys.modules["__main__"], "__file__") and Path(sys.argv[0]).is_file():
        return Path(sys.argv[0])
    module = sys.modules.get(type(config).__module__)
    file = getattr(module, "__file__", None)
    if file and Path(file).is_file():
        return Path(file)
    if config is not None:
        raise Refused(
            "a recipe is a file: begin its cell with %%writefile mine.py, and start the main of "
            "`import mine`"
        )
    return None


def get_recipe_name(config: object = None) -> str:
    """The recipe's name, from which run names are made: `hard` for hard.py."""
    file = find_recipe_file(config)
    return file.stem if file else ""


def read_source(config: object = None) -> Source:
    """The recipe's source, its main file first. Each file is read once, when this module is imported."""
    file = find_recipe_file(config)
    if not file:
        return {}
    file = file.resolve()
    folder = file.parent
    names = [file.name]
    for name in names:  # grows in the loop
        for imported in _find_imports(name, folder):
            if imported not in names:
                names.append(imported)
    return {name: _read_text(folder / name) for name in names}


def hash_files(source: Source) -> dict[str, str]:
    """The SHA-256 of each file."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in source.items()}


def diff_sources(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A short unified diff of two sources without comments and docstrings; empty if they are equal."""
    # The recipe itself, which may have been renamed.
    main_before = next(iter(before), "")
    main_after = next(iter(after), "")
    lines = _diff_files(before, after, main_before, main_after)
    for name in sorted((before.keys() | after.keys()) - {main_before, main_after}):
        lines += _diff_files(before, after, name, name)
    if len(lines) > _MAX_LINES:
        num_more = len(lines) - _MAX_LINES
        lines = lines[:_MAX_LINES] + [f"... and {num_more} more lines"]
    return lines


def _diff_files(
    before: Mapping[str, str], after: Mapping[str, str], name_before: str, name_after: str
) -> list[str]:
    """The lines in which a file of two sources differs."""
    text_before = before.get(name_before, "")
    text_after = after.get(name_after, "")
    if text_before == text_after:
        return []
    lines = difflib.unified_diff(
        _strip_comments(text_before).splitlines(),
        _strip_comments(text_after).splitlines(),
        fromfile=f"{name_before} before",
        tofile=f"{name_after} now",
        lineterm="",
        n=0,
    )
    # The numbers in lines with @@ are not the file's.
    return [line[:_MAX_COLUMNS] for line in lines if not line.startswith("@@")]


@functools.cache
def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@functools.cache
def _find_imports(file: str, folder: Path) -> list[str]:
    """Files in `folder` that `file` imports, except `common`."""
    modules: set[str] = set()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in ast.walk(ast.parse(_read_text(folder / file))):
            if isinstance(node, ast.Import):
                modules.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = "" if node.module is None else node.module
                modules.add(package)
                for alias in node.names:
                    modules.add(f"{package}.{alias.name}".lstrip("."))
    files = []
    for module in sorted(modules):
        if module and module.split(".")[0] != "common":
            path = module.replace(".", "/")
            files += [f"{path}.py", f"{path}/__init__.py"]
    return [name for name in files if (folder / name).is_file()]


def save_source(source: Source, run: Path) -> None:
    """Write the source into a run folder, durably."""
    for name, text in source.items():
        file = run / FOLDER / name
        make_folder(file.parent)
        replace_file(file, text.encode())


def _strip_comments(text: str) -> str:
    """`text` without comments and docstrings, in a normal form.

    It stays unchanged if this Python version can't parse it.
    """
    try:
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                body[:] = [statement for statement in body if not _is_constant(statement)]
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _is_constant(statement: ast.AST) -> bool:
    """True for a docstring, or another value that a statement consists of."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


read_source()  # now, before somebody edits the file: the other imports take seconds
