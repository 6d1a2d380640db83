"""Runs a recipe several times in one world: starting ranks and importing torch costs more than a small run.

The file of cases is a list of command lines (lists of words, without the program's name; or with
that of another recipe, such as a copy). On every rank the recipe's own `main` runs once for each,
in one process group that lives to the end. OUTCOMES.json beside it is rewritten after each case, a
list of

    {"outcome": "ok" | "refused" | "exit" | "failed", "text": what was refused, the exit code or the
    traceback,
     "stdout": what the main process printed}

A case that ends otherwise on another rank than on rank 0 is "failed", and after a failed one none
is started: its ranks may wait for each other no longer. Then the exit code is 1; else it is 0,
whatever was refused.
"""

import contextlib
import importlib.util
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

from common.distributed.collectives import gather_objects, leave_process_group
from common.errors import Refused
from common.launching import launch
from common.launching.exit_codes import EXIT_FOLDER
from common.run import Observer, Run, plots


def load_recipe(recipe: Path) -> ModuleType:
    """The recipe as a module: a script's folder is no package."""
    spec = importlib.util.spec_from_file_location(recipe.stem, recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules[recipe.stem] = module
    spec.loader.exec_module(module)
    return module


def run_observed(recipe: ModuleType, observer: Observer | None) -> None:
    """Be the script `recipe`, with the command line of this process. `observer` sees its run."""
    if observer:
        recipe.Run = partial(Run, observer=observer)  # type: ignore[attr-defined]
    launch.run(recipe.main)


def run(main: Callable[[], None]) -> tuple[str, str]:
    """What became of one run on this rank: outcome and text."""
    try:
        main()
    except Refused as refusal:
        return "refused", str(refusal)
    except SystemExit as stop:
        return "exit", str(stop.code)
    except Exception:
        return "failed", traceback.format_exc()
    return "ok", ""


def draw_nothing() -> None:
    """Replace the functions that draw: pictures take longer than a small run, and no flag leaves them out."""
    plots.attempt = lambda *_: None
    plots.curves = lambda *_: None


def main(recipe: Path, cases: Path, pictures: bool) -> None:
    """The cases of a file, on this rank."""
    if not pictures:
        draw_nothing()
    # Else the launcher ends all processes with the first run that announces its exit.
    os.environ.pop(EXIT_FOLDER, None)
    original = load_recipe(recipe)
    outcomes = []
    for args in json.loads(cases.read_text()):
        copy = Path(args[0]) if args[0].endswith(".py") else None
        module = load_recipe(copy) if copy else original
        sys.argv = list(map(str, args))
        if not copy:
            sys.argv.insert(0, str(recipe))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            outcome, text = run(module.main)
        # Else the others are somewhere in the case, and this would be one more wait.
        if outcome != "failed":
            by_rank = gather_objects((outcome, text))
            if len(set(map(tuple, by_rank))) > 1:
                outcome = "failed"
                text = f"the ranks disagree: {by_rank}"
        outcomes.append({"outcome": outcome, "text": text, "stdout": printed.getvalue()})
        if os.environ.get("RANK", "0") == "0":  # also before there is a process group
            cases.with_name("OUTCOMES.json").write_text(json.dumps(outcomes, indent=2))
        if outcome == "failed":
            sys.exit(f"{' '.join(sys.argv)}\n{text}")
    leave_process_group()
