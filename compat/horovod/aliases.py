"""Other names of this package, under which scripts import it."""

import importlib
import pkgutil
import sys

import compat.horovod

_OWN = "compat.horovod"


def alias(name: str) -> None:
    """Make `name` and its submodules stand for this package and its submodules."""
    parent, _, child = name.rpartition(".")
    sys.modules[name] = compat.horovod
    setattr(sys.modules[parent], child, compat.horovod)  # as an import does
    for part in pkgutil.walk_packages(compat.horovod.__path__, "."):
        sys.modules[name + part.name] = importlib.import_module(_OWN + part.name)
