"""How does a recipe answer --help at once, and get through its imports soon?

`import common.startup` is a recipe's first import that is not of Python itself. torch and timm take seconds to import, but
the flags of a recipe don't need them. And half of those seconds is no import: Python's garbage collector looks again and
again through what was imported before, and timm imports a dashboard for a function that recipes don't call.
"""

import ast
import gc
import sys
from pathlib import Path

from common import source
from common.config import parse


def answer_help() -> None:
    """Print the flags of the recipe that is being run and end, where -h or --help asks for them.

    Of its file only the imports of Python's own modules and of `common.config`, and its `Config`, are executed. Where
    that is not enough (a copied recipe whose `Config` needs more), or something is wrong, nothing happens here: the
    recipe's own `main` answers.
    """
    if not {"-h", "--help"} & set(sys.argv[1:]):
        return
    recipe = sys.modules["__main__"]
    try:
        for node in ast.parse(Path(recipe.__file__).read_text()).body:
            if _is_light(node):
                exec(compile(ast.Module([node], []), recipe.__file__, "exec"), vars(recipe))
        parse(recipe.Config)
    except Exception:
        return


def import_soon() -> None:
    """Import torch, timm and accelerate without what makes it take long. Does nothing where timm is imported already."""
    if "timm" in sys.modules:
        return
    collects, tracker = gc.isenabled(), "wandb" not in sys.modules
    gc.disable()
    if tracker:
        # An ImportError to timm, whose `update_summary` can't write to W&B then; common/tracking.py imports it later.
        sys.modules["wandb"] = None
    try:
        import accelerate  # noqa: F401
        import timm  # noqa: F401
    finally:
        if tracker:
            del sys.modules["wandb"]
        if collects:
            gc.enable()
    # What is imported stays: no collection looks at it again, in no step, and none copies it into a data worker.
    gc.freeze()


def _is_light(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "common.config" or (node.module or ".").split(".")[0] in sys.stdlib_module_names
    if isinstance(node, ast.Import):
        return all(alias.name.split(".")[0] in sys.stdlib_module_names for alias in node.names)
    return isinstance(node, ast.ClassDef) and node.name == "Config"


answer_help()
source.read()  # before it can be edited: imports take seconds
import_soon()
