"""A trained model, ready for use: its recipe, its configuration, and the origin of its weights.

Tools name a model as `--eval_only` does: a run's best/, a checkpoint, an exported folder, for
detectors also torchvision:NAME and files of torchvision's detectors. The model, its preprocessing
and its loader are built by the recipe that trained it, so there is one way to read and resize
images for training, evaluation and tools.
"""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate import Accelerator

from common.checkpoints.store import AUDIT_FOLDER
from common.config import Origin
from common.config.parsing import parse, suggest_path
from common.config.recipe_source import FOLDER, diff_sources
from common.detection.evaluation.evaluation import restore_sizes
from common.detection.weights.sources import read_origin
from common.errors import Refused
from common.files import SMALL, read_text
from common.launching import launch
from common.run import eval_only
from common.run.eval_batches import EvalBatches
from common.segmentation import EvalDataset
from common.segmentation.evaluation import predict_pixels
from tools.command_line import create_parser

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# Stands for the data where only the model is needed: what a stranger's run names is not opened.
_ANY_DATA = "digits"
# What tools call of a recipe.
_NEEDED_NAMES = (
    "Config",
    "build_data",
    "build_model",
    "build_transforms",
    "EvalDataset",
    "predict",
)


@dataclass(frozen=True)
class TrainedModel:
    """A model that a recipe has trained; `build` loads it."""

    recipe: ModuleType
    config: Any  # the recipe's Config, with `eval_only` naming the weights
    origin: Origin

    @property
    def is_detector(self) -> bool:
        return hasattr(self.config, "detector")

    @property
    def is_segmenter(self) -> bool:
        return issubclass(self.recipe.EvalDataset, EvalDataset)

    @property
    def task(self) -> str:
        """classification, detection or segmentation."""
        if self.is_detector:
            return "detection"
        return "segmentation" if self.is_segmenter else "classification"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names by class id; the ids themselves if the weights name none.

        Raises `Refused` if the weights do not even say how many classes there are.
        """
        if self.origin.classes:
            return self.origin.classes
        if not self.origin.num_classes:
            raise Refused(
                f"{self.origin.path}: does not say which classes it knows; take a run's best/"
            )
        return tuple(str(class_id) for class_id in range(self.origin.num_classes))

    def load_data(self) -> Any:
        """Open the images to evaluate on, with their classes matched with the model's.

        Logs which images these are. Raises `Refused`.
        """
        _, val = self.recipe.build_data(self.config, self.origin)
        launch.print_on_main(eval_only.describe_data(self.config, self.origin, val))
        return val

    def build(self, data: Any, accelerator: Accelerator) -> tuple[Any, EvalBatches]:
        """Build the model with its own classes, and the batches of `data`, as the recipe evaluates.

        `data` is a source of images as the recipe's `build_data` returns, or one without labels.
        """
        model = self.recipe.build_model(self.config, self.classes, accelerator.device)
        eval_only.load_weights(model, self.origin)
        transforms = self.recipe.build_transforms(self.config, model, accelerator.device)
        dataset = self.recipe.EvalDataset(data, transforms)
        return model, eval_only.build_batches(self.config, dataset, accelerator)

    @torch.no_grad()
    def predict(self, model: Any, batches: EvalBatches) -> Iterator[tuple]:
        """Yield each batch of this rank's share with the model's outputs.

        These are logits [B, K], or detections in pixels of the original images, or the class id of
        each pixel of these.
        """
        model.eval()
        for batch in batches:
            with batches.autocast():
                outputs = self.recipe.predict(model, batch)
            if self.is_detector:
                outputs = restore_sizes(batches.loader.dataset.source, batch, outputs)
            elif self.is_segmenter:
                outputs = predict_pixels(batch, outputs)
            yield batch, outputs


def load(
    weights: str,
    flags: Sequence[str] = (),
    *,
    reads_data: bool = False,
    takes_segmenters: bool = False,
) -> TrainedModel:
    """Load the model that `weights` names; a run folder means its best/.

    `flags` are the recipe's, such as `--workers 4` or `--data FOLDER`, and --recipe. `find_recipe`
    chooses the recipe, which is executed. With `reads_data`, the flags or the run must name the
    data. Raises `Refused`, also for a model of seg.py without `takes_segmenters`.
    """
    folder = Path(weights)
    if (folder / "config.yaml").is_file() and (folder / "best").is_dir():
        folder = folder / "best"
        weights = str(folder)
    # A path in a folder that is there is no name on the hub.
    if not folder.exists() and folder.parent.is_dir() and str(folder.parent) != ".":
        raise Refused(
            f"{weights}: nothing is there{suggest_path(folder)}; name a run folder, its best/ or "
            "a checkpoint"
        )
    origin = read_origin(weights)
    name = origin.run.get("recipe")
    if not name:
        name = "det" if "detector" in origin.config else "cls"
    folder = folder.absolute()
    is_checkpoint = folder.parent.name in ("checkpoints", AUDIT_FOLDER)
    run = folder.parent.parent if is_checkpoint else folder.parent
    file, flags = find_recipe(weights, run, name, flags)
    recipe = load_recipe(file)
    missing = [name for name in _NEEDED_NAMES if not hasattr(recipe, name)]
    if missing:
        raise Refused(
            f"{file}: has no {', '.join(missing)}, which tools call; write it as "
            f"{RECIPES / 'cls.py'} does"
        )
    argv = ["--eval_only", weights] + flags
    if not reads_data and not any(arg.partition("=")[0] == "--data" for arg in argv):
        argv += ["--data", _ANY_DATA]
    trained = TrainedModel(recipe, parse(recipe.Config, argv, file.name), origin)
    if trained.is_segmenter and not takes_segmenters:
        raise Refused(
            f"{weights}: is a model for segmentation, which this tool does not take yet; "
            "tools.predict does, and recipes/seg.py --eval_only evaluates it"
        )
    return trained


def find_recipe(title: str, run: Path, name: str, flags: Sequence[str]) -> tuple[Path, list[str]]:
    """Find the file of the recipe `name`; returns it and the flags without --recipe. Raises `Refused`.

    It is one of the files that --recipe names, which may stand several times, else one of this
    project's. `name` was read from a file that a stranger may have written. So it is compared with
    the names of files, and never becomes a path, and what the folder `run` keeps in source/ is only
    executed if the user names it.
    """
    parser = create_parser(Path(sys.argv[0]).name, None)
    parser.add_argument("--recipe", action="append", type=Path)
    options, other_flags = parser.parse_known_args(flags)
    candidates = options.recipe or sorted(RECIPES.glob("*.py"))
    files = [file for file in candidates if file.stem == name and file.is_file()]
    source_folder = run / FOLDER
    # Of several that are named, the one that the run keeps comes first.
    files.sort(key=lambda file: file.resolve().parent != source_folder.resolve())
    if not files:
        searched = options.recipe[0] if options.recipe else RECIPES
        advice = "name that file by --recipe, which executes it"
        raise Refused(f"{title}: was trained by {name!s:.60}.py, which is not {searched}; {advice}")
    file = files[0]
    run_file = source_folder / file.name
    try:
        source = read_text(run_file, SMALL) if run_file.exists() else file.read_text()
    except (OSError, ValueError):
        source = ""
    if not options.recipe and diff_sources({name: source}, {name: file.read_text()}):
        raise Refused(
            f"{title}: was trained by another {file.name} than {file}; choose by --recipe {file}, "
            f"or by --recipe {run_file}, which executes what the run folder keeps"
        )
    return file, other_flags


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
