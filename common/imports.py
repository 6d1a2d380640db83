"""Rooms' faces, which import a module when it is needed, so that start-up takes no longer than it must."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def export_lazily(room: str) -> tuple[list[str], Callable[[str], Any]]:
    """`__all__` and `__getattr__` of a room (PEP 562): a name is imported when it is first asked for.

    The names, and where they are from, stand in the block `if TYPE_CHECKING:` of the room's
    `__init__.py`, which people, mypy and editors read as well: `from common.run.run import Run`
    gives `Run`.
    """
    source = Path(sys.modules[room].__file__ or "").read_text()
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    lines = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    homes = {
        alias.asname or alias.name: (line.module or "", alias.name)
        for line in lines
        for alias in line.names
    }

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        home, own = homes[name]
        module = importlib.import_module(home)
        found = (
            importlib.import_module(f"{home}.{own}")
            if hasattr(module, "__path__")
            else getattr(module, own)
        )
        setattr(sys.modules[room], name, found)
        return found

    return sorted(homes), load
