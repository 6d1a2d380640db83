"""How do tests run the real recipes, and compare what these leave behind?"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from common.checkpoints.store import Damaged, compare
from common.detection.data import sources
from tests.harness import as_digits
from tests.recipes.forked import Forks

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What became of one command line, and the run folder that it was to write."""

    outcome: str  # ok, refused, exit, failed: see several.py
    text: str
    stdout: str
    seconds: float
    folder: Path

    @property
    def rows(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def column(self, key: str) -> np.ndarray:
        """The values of `key` in the rows that have it: float64[rows]."""
        return np.array([row[key] for row in self.rows if key in row])

    @property
    def checkpoint(self) -> Path:
        """The newest checkpoint's folder."""
        return max((self.folder / "checkpoints").glob("step_*"))

    def tensors(self, file: str = "model") -> Tensors:
        """Tensors of the newest checkpoint: of its model, ema or optimizer."""
        return load_file(self.checkpoint / f"{file}.safetensors")


def parameters(tensors: Tensors) -> Tensors:
    """Of a model's state, the weights."""
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(buffers)}


def statistics(tensors: Tensors) -> Tensors:
    """Of a model's state, the running means and variances."""
    return {name: tensor for name, tensor in tensors.items() if name.endswith(("running_mean", "running_var"))}


def distance(one: Tensors, other: Tensors, start: Tensors) -> float:
    """How far `other` is from `one`, as a share of how far `one` has moved from `start`; 0 for the same bits."""
    assert one and one.keys() == other.keys() <= start.keys()
    apart, moved = (
        sum((tensor.double() - others[name].double()).square().sum() for name, tensor in one.items()).sqrt().item()
        for others in (other, start)
    )
    assert moved > 0, "nothing has moved: the comparison would prove nothing"
    return apart / moved


def identical(one: Tensors, other: Tensors) -> bool:
    """Whether two states have the same names, types and bits."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def best_files(run: Path) -> dict[str, bytes | dict]:
    """The content of the files in `best/`, by name; without the name of the run, which another one does not share."""
    files = {path.name: path.read_bytes() for path in (run / "best").iterdir()}
    return files | {"run.json": json.loads(files["run.json"]) | {"name": ""}}


def keeps_best(run: Path, record: dict) -> bool:
    """Whether the best model that a checkpoint's record names is whole, in `best/` or where the next start looks for it."""
    for name in ("best", ".best.tmp", ".best.old"):
        with contextlib.suppress(Damaged, OSError):
            compare(run / name, record["best"]["files"])
            return True
    return False


@pytest.fixture(scope="session")
def run_several(launch, tmp_path_factory) -> Callable[..., dict[str, Outcome]]:
    """Run a recipe's `main` for each of several named command lines, in one launch of `processes` ranks.

    run_several(2, {"a": ["--model", "test_vit"]}, config="multi_cpu", recipe="recipes/cls.py") -> {"a": Outcome}.
    A case's run folder is <output_dir>/<its name>; without --output_dir, --tracker and --workers it is a new temporary
    folder, none and 0. Pictures are drawn only if asked for. Own data have the defaults of digits, see `as_digits`, but
    with `as_typed`. An unexpected error in any case fails the test.
    """

    def run(
        processes: int,
        cases: Mapping[str, Sequence[object]],
        *,
        config: str = "",
        recipe: str | Path = "recipes/cls.py",
        pictures: bool = False,
        as_typed: bool = False,
        timeout: float = 300,
        launch: Callable[..., CompletedProcess] = launch,
        **options,
    ) -> dict[str, Outcome]:
        scratch = tmp_path_factory.mktemp("several")
        commands, folders = [], []
        for name, words in cases.items():
            words = [*map(str, words if as_typed else as_digits(words, Path(recipe).stem))]
            defaults = {"--name": name, "--output_dir": scratch / "runs", "--tracker": "none", "--workers": 0}
            for flag, value in defaults.items():
                words += [] if flag in words else [flag, str(value)]
            commands.append(words)
            folders.append(Path(words[words.index("--output_dir") + 1]) / words[words.index("--name") + 1])
        file = scratch / "CASES.json"
        file.write_text(json.dumps(commands))
        config = config or ("cpu" if processes == 1 else "multi_cpu")
        flags = [*options.pop("flags", ()), *(["--num_processes", processes] if processes > 1 else [])]
        words = [recipe, file, *([] if pictures else ["without_pictures"])]
        done = launch(config, "tests/recipes/several.py", *words, flags=flags, timeout=timeout, **options)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        outcomes = json.loads((scratch / "OUTCOMES.json").read_text())
        return {
            name: Outcome(**outcome, folder=folder)
            for name, outcome, folder in zip(cases, outcomes, folders, strict=True)
        }

    return run


@pytest.fixture(scope="session")
def thorough(request) -> bool:
    """Whether long tests are among those that run: fixtures then make the runs that only these look at."""
    return any(item.get_closest_marker("long") for item in request.session.items)


@pytest.fixture(scope="session")
def stripes(tmp_path_factory) -> Path:
    """199 + 23 photographs of five striped stuffs, some rarer than others: soon learnt, also when varied a lot."""
    folder = tmp_path_factory.mktemp("stripes")
    draw_stripes(folder / "train", (67, 51, 40, 27, 14))
    draw_stripes(folder / "val", (7, 5, 5, 3, 3), seed=1)
    return folder


def draw_stripes(folder: Path, counts: Sequence[int], seed: int = 0) -> None:
    """A folder a class, each with that many 32 x 32 PNGs of stripes in a direction and a colour of the class's own."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:32, :32] / 32
    for number, count in enumerate(counts):
        (folder / f"stuff_{number}").mkdir(parents=True)
        share = number / len(counts)
        colour = np.cos(2 * np.pi * (share + np.arange(3) / 3))  # of red, green, blue
        for index in range(count):
            phase = 4 * np.pi * (x * np.cos(np.pi * share) + y * np.sin(np.pi * share) + generator.random())
            pixels = 128 + 30 * colour + 40 * np.sin(phase)[..., None] + generator.normal(0, 30, (32, 32, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / f"stuff_{number}" / f"{index}.png")


@pytest.fixture(scope="session")
def scenes(tmp_path_factory) -> Path:
    """25 + 7 scenes of digits in COCO's format, of many sizes; every third has no box, so that some ranks have none."""
    folder = tmp_path_factory.mktemp("scenes")
    draw_scenes(folder)
    return folder


def draw_scenes(folder: Path) -> None:
    """Into a folder that is there: train.json, val.json, and the images of each in a folder beside it."""
    train, val = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    for part, source, count in (("train", train, 25), ("val", val, 7)):
        (folder / part).mkdir()
        images, annotations = [], []
        for number in range(count):
            width, height = 96 + 7 * number % 33, 96 + 11 * number % 31
            pixels, boxes, labels, *_ = source.sample(number, number)
            inside = (boxes[:, 2:] <= (width, height)).all(1) if number % 3 else np.zeros(len(boxes), bool)
            Image.fromarray(pixels[:height, :width]).save(folder / part / f"{number}.png")
            images.append({"id": number, "file_name": f"{part}/{number}.png", "width": width, "height": height})
            for (left, top, right, bottom), label in zip(boxes[inside].tolist(), labels[inside].tolist(), strict=True):
                box = [left, top, right - left, bottom - top]
                annotations.append(
                    {"id": len(annotations), "image_id": number, "category_id": 3 * label + 1, "bbox": box}
                )
        categories = [{"id": 3 * number + 1, "name": name} for number, name in enumerate(source.classes)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (folder / f"{part}.json").write_text(json.dumps(content))


@pytest.fixture(scope="session")
def forks(tmp_path_factory) -> Forks:
    """`forks("--max_steps", 5)` runs recipes/cls.py in a fork of a process that has imported it, see forked.py."""
    return Forks(tmp_path_factory.mktemp("forks"))
