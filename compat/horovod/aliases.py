"""Other names of this package, under which scripts import it."""

import importlib.machinery
import sys

import compat.horovod

_NAME = "compat.horovod"
# Where Horovod has what scripts import from outside of horovod.torch.
_COMMON = {"exceptions": "exceptions", "process_sets": "process_sets", "elastic": "elastic"}


def alias(name: str) -> None:
    """Make `name` and its submodules stand for this package and its submodules."""
    for own, module in [*sys.modules.items()]:
        if own == _NAME or (own.startswith(f"{_NAME}.") and own != f"{_NAME}.torch"):
            sys.modules[name + own.removeprefix(_NAME)] = module


def alias_common(name: str) -> None:
    """Make `name` stand for horovod.common: the exceptions and process sets."""
    for own, module in _COMMON.items():
        if f"{_NAME}.{module}" in sys.modules:
            sys.modules[f"{name}.{own}"] = sys.modules[f"{_NAME}.{module}"]


def warn_of_installed(package: str, folder: str) -> None:
    """Say on stderr that an installed `package` is hidden by this one, which lies in `folder`."""
    elsewhere = [place for place in sys.path if place != folder]
    spec = importlib.machinery.PathFinder.find_spec(package, elsewhere)
    if spec and spec.origin:
        print(
            f"{package} is installed ({spec.origin}), but {folder} comes first on PYTHONPATH: this process uses "
            f"{compat.horovod.__name__}; take that folder away to use the installed one",
            file=sys.stderr,
        )
