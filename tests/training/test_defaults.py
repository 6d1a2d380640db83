"""Data other than digits get defaults for photographs; presets and flags override them."""

import dataclasses
import json
from pathlib import Path

import pytest

from common.config.parsing import parse, save
from common.detection import defaults as detection
from common.training import defaults
from tests.harness.launching import OF_DIGITS, ROOT
from tests.harness.several import load

pytestmark = pytest.mark.smoke

CONFIGS = {name: load(ROOT / "recipes" / f"{name}.py").Config for name in ("cls", "det")}
SUITED = {"cls": defaults.suited, "det": detection.suited}
MIRRORED = {"lr": 1e-3, "warmup_epochs": 1.0, "crop_scale": 0.35, "hflip": 0.5}
PHOTOGRAPHS = {**MIRRORED, "model": "convnext_atto", "image_size": 224, "crop_pct": 0.875}
BOXES = {"lr": 2e-4, "warmup_epochs": 1.0, "short_sides": "480", "hflip": 0.5}
ALL_BOXES = {**BOXES, "model": "convnext_atto", "levels": "3-7", "width": 128, "long_side": 800}


def chosen(recipe: str, *words: str) -> dict:
    """What a command line has, but for itself, that the defaults of digits don't have."""
    config = parse(CONFIGS[recipe], [*words], suit=SUITED[recipe])
    plain = dataclasses.asdict(parse(CONFIGS[recipe], [*words]))
    return {name: value for name, value in dataclasses.asdict(config).items() if value != plain[name]}


@pytest.mark.parametrize("recipe", CONFIGS)
def test_digits_keep_the_defaults_that_their_runs_began_with(recipe) -> None:
    assert chosen(recipe) == chosen(recipe, "--data", "digits") == chosen(recipe, "--lr", "1") == {}
    assert parse(CONFIGS[recipe], [], suit=SUITED[recipe]) == CONFIGS[recipe]()
    assert defaults.describe(CONFIGS[recipe](), SUITED[recipe]) == {}


@pytest.mark.parametrize("recipe", CONFIGS)
def test_tests_on_small_drawings_know_all_defaults_that_others_have(recipe) -> None:
    fields = dataclasses.fields(CONFIGS[recipe])
    own = {f"--{field.name}": field.default for field in fields if field.metadata.get("photographs") is not None}
    assert own == OF_DIGITS[recipe]


@pytest.mark.parametrize(
    "recipe, words, expected",
    {
        "own data": ("cls", "", PHOTOGRAPHS),
        "a folder called digits": ("cls", "--data ./digits", PHOTOGRAPHS),
        "another model": ("cls", "--model test_vit", {**MIRRORED, "image_size": 160, "crop_pct": 0.95}),
        "what digits have, by flags": (
            *("cls", "--hflip 0 --crop_pct 1 --model test_resnet --image_size 32 --lr 4e-3"),
            {"warmup_epochs": 1.0, "crop_scale": 0.35},
        ),
        "a model on the hub": ("cls", "--model hf-hub:owner/name", {**MIRRORED, "image_size": 0, "crop_pct": 0.0}),
        "no model": ("cls", "--model nosuch", {**MIRRORED, "image_size": 0, "crop_pct": 0.0}),
        "no weights": ("cls", "--model resnet18.nosuch", {**MIRRORED, "image_size": 0, "crop_pct": 0.0}),
        "boxes": ("det", "", ALL_BOXES),
        "boxes on squares": ("det", "--detector dfine", {**BOXES, "model": "convnext_atto", "width": 128}),
        "weights to begin with": (
            *("det", "--init torchvision:fcos_resnet50_fpn"),
            {**ALL_BOXES, "model": "resnet50", "width": 256, "convolutions": 4, "short_sides": "800", "long_side": 1333}
            | {"variant": "torchvision", "batch_norm": "frozen"},
        ),
    }.values(),
)
def test_own_data_get_what_suits_photographs_where_nothing_is_given(recipe, words, expected) -> None:
    assert chosen(recipe, "--data", "~/flowers", *words.split()) == expected


def test_a_folder_brings_its_own_size(tmp_path) -> None:
    file = tmp_path / "config.json"
    config = CONFIGS["cls"](data="x", model=str(tmp_path))
    file.write_text(json.dumps({"pretrained_cfg": {"input_size": [3, 64, 64], "crop_pct": 0.9}}))
    found = defaults.suited(config)
    assert (found["image_size"], found["crop_pct"]) == (64, 0.9)
    for odd in ({}, {"pretrained_cfg": {"input_size": [3, 64, 32]}}, {"pretrained_cfg": {"input_size": 3}}, []):
        file.write_text(json.dumps(odd))
        found = defaults.suited(config)
        assert (found["image_size"], found["crop_pct"]) == (0, 0.0), odd


def test_a_preset_is_given_and_a_saved_configuration_stays_as_it_is(tmp_path) -> None:
    preset = tmp_path / "preset.yaml"
    preset.write_text("data: ~/flowers\nhflip: 0\nimage_size: 64\n")
    config = parse(CONFIGS["cls"], ["--config", str(preset), "--lr", "5e-3"], suit=defaults.suited)
    assert (config.hflip, config.image_size, config.lr, config.model) == (0.0, 64, 5e-3, "convnext_atto")
    save(config, Path(tmp_path / "config.yaml"))
    for suit in (defaults.suited, None):
        assert parse(CONFIGS["cls"], ["--config", str(tmp_path / "config.yaml")], suit=suit) == config


def test_the_start_table_says_what_was_chosen_and_nothing_that_was_given() -> None:
    words = ["--data", "x", "--hflip", "0", "--warmup_epochs", "3"]
    rows = defaults.describe(parse(CONFIGS["cls"], words, suit=defaults.suited))
    assert rows["defaults"] == (
        "for photographs: model convnext_atto, image_size 224, crop_pct 0.875, lr 0.001, crop_scale 0.35"
    )
    assert rows["pretrained"].startswith("no; --pretrained ")
    assert "pretrained" not in defaults.describe(parse(CONFIGS["cls"], [*words, "--pretrained"], suit=defaults.suited))
