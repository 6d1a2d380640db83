"""A trained model, ready for use: its recipe, its configuration, and what says where its weights are from.

Tools name a model as `--eval_only` does: a run's best/, a checkpoint, an exported folder, for detectors also
torchvision:NAME and files of torchvision's detectors. The model, its preprocessing and its loader are built by the recipe that
trained it, so there is one way to read and resize images for training, evaluation and tools.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from common.config import Origin
from common.config.parsing import nearest_path, parse
from common.config.recipe_source import FOLDER, difference
from common.detection.weights import sources as sources_of_weights
from common.errors import Refused
from common.files import SMALL, read_text

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
_ANY_DATA = "digits"  # if only the model is asked for: the data that a stranger's run names are not opened


@dataclass(frozen=True)
class Trained:
    """A model that a recipe has trained; `build` loads it."""

    recipe: ModuleType
    config: Any  # the recipe's Config, with `eval_only` naming the weights
    origin: Origin

    @property
    def is_detector(self) -> bool:
        return hasattr(self.config, "detector")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names by class id; the numbers themselves if the weights name none. Raises `Refused` if not even these are known."""
        if not self.origin.classes and not self.origin.count:
            raise Refused(f"{self.origin.path}: does not say which classes it knows; take a run's best/")
        return self.origin.classes or tuple(map(str, range(self.origin.count or 0)))

    def build(self, data: Any, device: Any) -> tuple:
        """(model, normalize, loader of `data`), as the recipe evaluates; `recipe.predict` takes these.

        `data` is a source of images as the recipe's `build_data` returns, or one without labels.
        """
        return self.recipe.build_evaluation(self.config, self.origin, data, self.classes, device)


def load(
    weights: str,
    flags: Sequence[str] = (),
    *,
    recipes: Sequence[Path] = (),
    reads_data: bool = False,
) -> Trained:
    """The model that `weights` names; `flags` are the recipe's, such as `--workers 4` or `--data FOLDER`.

    A run folder means its best/. `find_recipe` chooses the recipe, which is executed. With `reads_data`, the flags or the
    run must name the data. Raises `Refused`.
    """
    folder = Path(weights)
    if (folder / "config.yaml").is_file() and (folder / "best").is_dir():
        weights, folder = str(folder / "best"), folder / "best"
    if not folder.exists() and folder.parent.is_dir() and str(folder.parent) != ".":  # no name on the hub
        raise Refused(
            f"{weights}: nothing is there{nearest_path(folder)}; name a run folder, its best/ or a checkpoint"
        )
    origin = sources_of_weights.origin(weights)
    name = origin.run.get("recipe") or ("det" if "detector" in origin.config else "cls")
    folder = folder.absolute()
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    file = find_recipe(weights, run, name, recipes)
    recipe = load_recipe(file)
    if missing := [
        name for name in ("Config", "build_data", "build_evaluation", "predict") if not hasattr(recipe, name)
    ]:
        raise Refused(f"{file}: has no {', '.join(missing)}, which tools call; write it as {RECIPES / 'cls.py'} does")
    words = ["--eval_only", weights, *flags]
    if not reads_data and not any(word.partition("=")[0] == "--data" for word in words):
        words += ["--data", _ANY_DATA]
    return Trained(recipe, parse(recipe.Config, words, file.name), origin)


def find_recipe(title: str, run: Path, name: object, recipes: Sequence[Path]) -> Path:
    """The file of the recipe `name`: among `recipes`, which the user has named, or else among those of this project.

    `name` was read from a file that a stranger may have written. So it is compared with the names of files, and never
    becomes a path, and what the folder `run` keeps in source/ is only executed if the user names it. Raises `Refused`.
    """
    kept = run / FOLDER
    files = [file for file in recipes or sorted(RECIPES.glob("*.py")) if file.stem == name and file.is_file()]
    files.sort(key=lambda file: file.resolve().parent != kept.resolve())  # each of several runs has its own
    if not files:
        searched = ", ".join(str(file) for file in recipes) or str(RECIPES)
        raise Refused(
            f"{title}: was trained by {name!s:.60}.py, which is not in {searched}; name that file by --recipe, "
            "which executes it"
        )
    if not recipes and (kept / files[0].name).is_file() and _differs(kept, files[0]):
        raise Refused(
            f"{title}: was trained by another {files[0].name} than {files[0]}; choose by --recipe {files[0]}, or by "
            f"--recipe {kept / files[0].name}, which executes what the run folder keeps"
        )
    return files[0]


def _differs(kept: Path, file: Path) -> bool:
    """True if the source in the folder `kept` is not that of the recipe `file`."""
    names = [file.name]
    names += [str(path.relative_to(kept)) for path in sorted(kept.rglob("*.py")) if path != kept / file.name]
    try:
        before = {name: read_text(kept / name, SMALL) for name in names}
        now = {name: read_text(file.parent / name, SMALL) for name in names}
    except (OSError, ValueError):  # one is missing, or no text
        return True
    return bool(difference(before, now))


def load_recipe(file: Path) -> ModuleType:
    """Execute a recipe's file as a module of its own; it finds modules beside it, as when it is run."""
    spec = importlib.util.spec_from_file_location(f"recipe_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise Refused(f"{file}: is no Python file")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data workers find its classes by this name
    spec.loader.exec_module(module)
    return module
