"""Other names of this package, under which scripts import it."""

import importlib
import pkgutil
import sys

import compat.horovod

_PACKAGE = "compat.horovod"


def alias(name: str) -> None:
    """Make `name` and its submodules stand for this package and its submodules."""
    parent, _, child = name.rpartition(".")
    sys.modules[name] = compat.horovod
    setattr(sys.modules[parent], child, compat.horovod)  # as an import does
    for module in pkgutil.walk_packages(compat.horovod.__path__, "."):
        sys.modules[name + module.name] = importlib.import_module(_PACKAGE + module.name)
