"""Does a recipe answer --help without its long imports, and reach its first step without what is needed later?"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets

from common.digits import load_digits
from tests.conftest import ROOT, Launcher

RECIPES = ["cls", "det"]
NOT_FOR_HELP = {"torch", "timm", "accelerate", "numpy", "PIL", "wandb"}
# wandb: the tracker of the run, which starts after the first step; matplotlib draws at the end, datasets reads tables.
NOT_FOR_A_STEP = {"sklearn", "scipy", "pandas", "datasets", "matplotlib", "wandb", "tensorboard", "transformers"}


def imported(trace: str) -> set[str]:
    """Packages that `python -X importtime` lists."""
    return {name.partition(".")[0] for name in re.findall(r"^import time:.*\|\s+(\S+)$", trace, re.MULTILINE)}


def copy(recipe: str, old: str, new: str, folder: Path) -> Path:
    """A copy of a recipe with another text at one place."""
    source = (ROOT / "recipes" / f"{recipe}.py").read_text()
    assert source.count(old) == 1
    path = folder / f"{recipe}.py"
    path.write_text(source.replace(old, new))
    return path


@pytest.mark.smoke
@pytest.mark.parametrize("recipe", RECIPES)
def test_help_needs_no_long_import(launch: Launcher, recipe: str) -> None:
    done = launch.start_python("-X", "importtime", f"recipes/{recipe}.py", "--help").finish()
    assert done.returncode == 0 and "--global_batch_size" in done.stdout and "--data" in done.stdout
    assert {"common", "tyro"} <= imported(done.stderr) and not imported(done.stderr) & NOT_FOR_HELP


def test_help_ends_quietly_where_nobody_reads_on() -> None:
    """As by `--help | head`."""
    words = [sys.executable, "recipes/cls.py", "--help"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        script.stdout.close()
        assert (script.stderr.read(), script.wait(60)) == ("", 0)


def test_a_recipe_whose_config_needs_more_prints_the_same_help_later(launch: Launcher, tmp_path: Path) -> None:
    size = "image_size: int = option(32, "
    changed = copy("cls", size, size.replace("32", "torch.tensor(32).item()"), tmp_path)
    done = launch.start_python("-X", "importtime", changed, "--help").finish()
    assert done.returncode == 0 and "torch" in imported(done.stderr)
    assert done.stdout == launch.start_python("recipes/cls.py", "--help").finish().stdout


def test_help_shows_what_a_file_sets_and_a_wrong_file_is_still_refused(launch: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("lr: 0.125")
    assert "0.125" in launch.start_python("recipes/cls.py", "--config", file, "--help").finish().stdout
    file.write_text("lrr: 0.125")
    done = launch.start_python("recipes/cls.py", "--config", file, "--help").finish()
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"cls.py: --config {file}: unknown key lrr; did you mean lr?\n"


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_needed_later_is_not_imported_before_the_first_step(
    launch: Launcher, recipe: str, tmp_path: Path
) -> None:
    file = tmp_path / "step.json"
    flags = ["--max_steps", 2, "--workers", 0, "--output_dir", tmp_path]
    done = launch("cpu", "benchmarks/startup.py", "--first_step", file, f"recipes/{recipe}.py", *flags)
    assert done.returncode == 0, done.stderr
    packages = set(json.loads(file.read_text())["packages"])
    assert {"torch", "timm", "accelerate", "common"} <= packages and not packages & NOT_FOR_A_STEP


def test_what_is_imported_soon_is_as_after_any_import(launch: Launcher) -> None:
    code = (
        "import gc, common.startup, wandb, timm; print(gc.isenabled(), gc.get_freeze_count() > 100_000, wandb.__name__)"
    )
    assert launch.start_python("-c", code).finish().stdout == "True True wandb\n"


def test_the_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = sklearn.datasets.load_digits()
    for _ in range(2):
        ours = load_digits()
        for name in ("images", "target", "target_names"):
            assert np.array_equal(getattr(ours, name), theirs[name]) and getattr(ours, name).dtype == theirs[name].dtype
        monkeypatch.setattr(Path, "is_file", lambda path: False)  # where its file has another place
