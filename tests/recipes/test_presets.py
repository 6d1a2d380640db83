"""Every preset says what it is, and trains."""

import math
import re
import shlex
from pathlib import Path

import pytest
import yaml

from common.config.parsing import parse, save_config
from common.data.batch_plan import BatchPlan
from common.data.stream import Stream
from tests.harness.outcomes import Outcome
from tests.harness.several import load_recipe

ROOT = Path(__file__).parent.parent.parent
PRESETS = [
    path
    for path in sorted((ROOT / "recipes/presets").glob("*.yaml"))
    if not path.name.startswith("sweep_")
]
IMAGENET = 1_281_167  # training images
# What a preset is too large for here: its data, its model and its pixels. Everything else of it
# stays.
SMALL = {
    "cls": "--model test_resnet --no_pretrained --image_size 32 --global_batch_size 96 --max_steps 2",
    "det": (
        "--model test_resnet --no_pretrained --width 32 --short_sides 128 --global_batch_size 8 "
        "--max_steps 2"
    ),
    "seg": (
        "--model test_vit --no_pretrained --width 32 --crop_size 64 --short_side 0 "
        "--eval_short_side 0 --global_batch_size 8 --max_steps 2"
    ),
}
LONG = {"coco_fasterrcnn_r50_1x", "coco_retinanet_r50", "voc", "coco_rtdetrv2_r18"}
IMAGES = {"cls": 23, "det": 7, "seg": 7}  # to evaluate on
RECIPES = {name: load_recipe(ROOT / "recipes" / f"{name}.py") for name in SMALL}


def read_opening(path: Path) -> str:
    return re.match(r"(#.*\n)+", path.read_text()).group()


def find_commands(path: Path) -> list[list[str]]:
    """The command lines of the opening comment, as words."""
    return [
        shlex.split(line) for line in re.findall(r"#   (accelerate launch .*)", read_opening(path))
    ]


def get_recipe(path: Path) -> str:
    """Which recipe a preset's commands run."""
    return Path(find_commands(path)[0][4]).stem


@pytest.mark.smoke
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_a_configuration_for_usual_numbers_of_gpus(path, tmp_path) -> None:
    config = parse(RECIPES[get_recipe(path)].Config, ["--config", str(path), "--data", "x"])
    values = yaml.safe_load(path.read_text()) | {"data": "x"}
    assert {name: type(value)(getattr(config, name)) for name, value in values.items()} == values
    save_config(config, tmp_path / "config.yaml")
    assert parse(type(config), ["--config", str(tmp_path / "config.yaml")]) == config

    is_mixed = get_recipe(path) == "cls" and (config.mixup or config.cutmix)  # in pairs
    unit = math.lcm(
        2 if is_mixed else 1, config.norm_batch_size if config.batch_norm == "group" else 1
    )
    Stream(IMAGENET, config.global_batch_size, config.seed, getattr(config, "repeats", 1))
    for world_size in (1, 2, 4, 8, 16, 32):
        if world_size * unit <= config.global_batch_size:
            BatchPlan(config.global_batch_size, world_size, config.max_micro_batch_size, unit)


@pytest.mark.smoke
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_opens_with_its_commands_and_kind_of_figure(path, monkeypatch) -> None:
    """A reported figure must not pass for a measured one."""
    reported = "Reported by the source, not measured here: "
    kinds = re.findall(
        rf"^# (Expected: measured here: |Expected: no figure|{reported})",
        read_opening(path),
        re.MULTILINE,
    )
    assert len(kinds) == 1
    assert kinds != [reported] or re.search(r"arXiv:\d{4}\.\d{5}", read_opening(path)), (
        "a reported result needs its source"
    )
    monkeypatch.chdir(ROOT)
    assert find_commands(path)
    for args in find_commands(path):
        assert args[:3] == ["accelerate", "launch", "--config_file"]
        assert Path(args[3]).is_file()
        assert args[4] == f"recipes/{get_recipe(path)}.py"
        assert args[args.index("--config") + 1] == f"recipes/presets/{path.name}"
        flags = args[5:]
        if "--eval_only" in flags:  # of a run that is not there
            index = flags.index("--eval_only")
            del flags[index : index + 2]
        parse(RECIPES[get_recipe(path)].Config, flags)


@pytest.mark.smoke
def test_the_sweep_searches_flags_of_the_recipe_for_its_metric(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = yaml.safe_load(Path("recipes/presets/sweep_cls.yaml").read_text())
    assert sweep["program"] == "recipes/cls.py" and sweep["metric"] == {
        "name": "eval/top1",
        "goal": "maximize",
    }
    values = {
        flag: settings.get("min", settings.get("values", [0])[0])
        for flag, settings in sweep["parameters"].items()
    }
    args = sweep["command"][sweep["command"].index("${program}") + 1 : -1]
    assert Path(sweep["command"][4]).is_file() and sweep["command"][-1] == "${args}"
    config = parse(
        RECIPES["cls"].Config, args + [f"--{flag}={value}" for flag, value in values.items()]
    )
    assert {flag: getattr(config, flag) for flag in values} == values


@pytest.fixture(scope="module")
def trained(run_several, stripes, scenes, regions, rf_detr, thorough) -> dict[str, Outcome]:
    """Runs of two steps, with the preset's optimizer, schedule, augmentation, mixing and averaging."""
    cases = {}
    for path in PRESETS:
        if path.stem in LONG and not thorough:
            continue
        recipe = get_recipe(path)
        data = {"cls": stripes, "det": scenes, "seg": regions}[recipe]
        flags = f"--config {path} --data {data} --split val {SMALL[recipe]}"
        # Fewer levels and smaller images, where its family has these.
        if "\nlong_side" in path.read_text():
            flags += " --levels 3-5 --long_side 128"
        if path.stem == "coco_rfdetr_nano":  # has no timm backbone
            flags += f" --model {rf_detr} --width 128"
        cases[path.stem] = [ROOT / f"recipes/{recipe}.py"] + flags.split()
    return run_several(1, cases, timeout=600)


TRAINED = [
    pytest.param(path, marks=[pytest.mark.long] * (path.stem in LONG), id=path.stem)
    for path in PRESETS
]


@pytest.mark.parametrize("path", TRAINED)
def test_every_preset_trains_for_two_steps(path, trained) -> None:
    run = trained[path.stem]
    assert run.outcome == "ok", run.text
    assert run.rows[-1]["step"] == 2
    assert run.rows[-1]["eval/count"] == IMAGES[get_recipe(path)]
    assert (run.folder / "best/model.safetensors").is_file()
