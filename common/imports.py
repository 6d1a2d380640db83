"""What a room exports is imported when it is first used, so that start-up takes no longer than it must."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class _Export(NamedTuple):
    """A name that a room's `__init__.py` imports, and the module that it is from."""

    module: str
    name: str


def export_lazily(room: str) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__` and `__getattr__` of a room (PEP 562): a name is imported when it is first used.

    The names, and where they are from, stand in the block `if TYPE_CHECKING:` of the room's
    `__init__.py`, which people, mypy and editors read as well: `from common.run.run import Run`
    gives `Run`.
    """
    exports = _parse_exports(Path(sys.modules[room].__file__ or "").read_text())

    def load(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        export = exports[name]
        value = importlib.import_module(export.module)
        if hasattr(value, "__path__"):  # a package, of which it is a module
            value = importlib.import_module(f"{export.module}.{export.name}")
        else:
            value = getattr(value, export.name)
        setattr(sys.modules[room], name, value)
        return value

    return sorted(exports), load


def _parse_exports(source: str) -> dict[str, _Export]:
    """What the `if` block of a module imports, by the name under which it exports it."""
    exports = {}
    for block in ast.parse(source).body:
        if isinstance(block, ast.If):
            for statement in block.body:
                if isinstance(statement, ast.ImportFrom):
                    for alias in statement.names:
                        export = _Export(statement.module or "", alias.name)
                        exports[alias.asname or alias.name] = export
    return exports
