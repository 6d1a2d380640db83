"""Other names of this package, under which scripts import it."""

import importlib
import importlib.machinery
import pkgutil
import sys
from pathlib import Path

import compat.horovod

_OWN = "compat.horovod"


def alias(name: str) -> None:
    """Make `name` and its submodules stand for this package and its submodules."""
    parent, _, child = name.rpartition(".")
    sys.modules[name] = compat.horovod
    setattr(sys.modules[parent], child, compat.horovod)  # as an import does
    for part in pkgutil.walk_packages(compat.horovod.__path__, "."):
        if part.name != ".torch":  # which stands for the package itself
            sys.modules[name + part.name] = importlib.import_module(_OWN + part.name)


def warn_of_installed(package: str, file: str) -> None:
    """Say on stderr that an installed `package` is hidden by the one of ours whose __init__.py is `file`."""
    folder = Path(file).resolve().parents[1]
    others = [place for place in sys.path if Path(place).resolve() != folder]
    spec = importlib.machinery.PathFinder.find_spec(package, others)
    if spec and (place := spec.origin or next(iter(spec.submodule_search_locations or ()), "")):
        print(
            f"{package} is installed in {place}, but {folder} comes before it on PYTHONPATH: this process uses {_OWN}. Take "
            "the folder off PYTHONPATH to use the installed one",
            file=sys.stderr,
        )
