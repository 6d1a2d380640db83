"""Does every preset say what it is, and train?"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from common.config import parse, save
from common.plan import BatchPlan
from common.stream import Stream
from tests.recipes.several import load

ROOT = Path(__file__).parent.parent.parent
PRESETS = sorted((ROOT / "recipes" / "presets").glob("*.yaml"))
IMAGENET = 1_281_167  # training images
# What a preset is too large for here: its data, its model and its pixels. Everything else of it stays.
SMALL = "--data digits --model test_resnet --no_pretrained --image_size 32 --global_batch_size 48 --max_steps 2".split()


@pytest.fixture(scope="module")
def recipe():
    return load(ROOT / "recipes" / "cls.py")


def opening(path: Path) -> str:
    return re.match(r"(#.*\n)+", path.read_text()).group()


def commands(path: Path) -> list[list[str]]:
    """The command lines of the opening comment, as words."""
    return [shlex.split(line) for line in re.findall(r"#   (accelerate launch .*)", opening(path))]


@pytest.mark.smoke
def test_the_presets_that_are_promised_are_there() -> None:
    promised = {"digits", "cifar10", "imagenet_resnet50", "imagenet_resnet50_a2", "imagenet_vit_small", "finetune"}
    assert {path.stem for path in PRESETS} == promised


@pytest.mark.smoke
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_a_configuration_and_survives_being_saved(path, recipe, tmp_path) -> None:
    config = parse(recipe.Config, ["--config", str(path)])
    given = yaml.safe_load(path.read_text())
    assert {name: type(value)(getattr(config, name)) for name, value in given.items()} == given
    save(config, tmp_path / "config.yaml")
    assert parse(recipe.Config, ["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.smoke
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_opens_with_commands_that_run_it(path, recipe, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    assert commands(path)
    for words in commands(path):
        assert words[:3] == ["accelerate", "launch", "--config_file"]
        assert Path(words[3]).is_file()
        assert words[4] == "recipes/cls.py"
        assert words[words.index("--config") + 1] == f"recipes/presets/{path.name}"
        parse(recipe.Config, words[5:])


@pytest.mark.smoke
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_says_which_result_to_expect_and_never_passes_a_reported_one_off_as_measured(path) -> None:
    text = opening(path)
    assert re.search(r"^# (Expected|Reported by the source, not measured here): ", text, re.MULTILINE)
    if "Reported" in text:
        assert re.search(r"arXiv:\d{4}\.\d{5}", text), "a reported result needs its source"


@pytest.mark.smoke
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_can_be_spread_over_the_usual_numbers_of_gpus(path, recipe) -> None:
    config = parse(recipe.Config, ["--config", str(path)])
    Stream(IMAGENET, config.global_batch_size, config.seed, config.repeats)
    for world_size in (1, 2, 4, 8, 16, 32):
        pair = 2 if config.mixup or config.cutmix else 1
        BatchPlan(config.global_batch_size, world_size, config.max_micro_batch_size, unit=pair)


def test_every_preset_trains_for_two_steps(run_several) -> None:
    """On two processes, with the preset's optimizer, schedule, augmentation, mixing and averaging."""
    cases = {path.stem: ["--config", path, *SMALL] for path in PRESETS}
    outcomes = run_several(2, cases, timeout=600)
    for name, outcome in outcomes.items():
        assert outcome.outcome == "ok", f"{name}: {outcome.text}"
        assert outcome.rows[-1]["step"] == 2
        assert outcome.rows[-1]["eval/count"] == 359
        assert (outcome.folder / "best" / "model.safetensors").is_file()
