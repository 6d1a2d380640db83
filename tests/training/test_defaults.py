"""Defaults are for photographs, whatever the data; presets, flags and weights to begin with override them."""

import re

import pytest

from common.config.parsing import parse
from common.detection import defaults as detection
from common.errors import Refused
from recipes import cls, det
from tests.harness.launching import ROOT

pytestmark = pytest.mark.smoke

RECIPES = {"cls": cls, "det": det}
PHOTOGRAPHS = {
    "cls": {"model": "convnext_atto", "image_size": 0, "crop_pct": 0.0, "lr": 1e-3, "crop_scale": 0.35, "hflip": 0.5},
    "det": {
        "model": "convnext_atto",
        "levels": "3-7",
        "width": 128,
        "short_sides": "480",
        "long_side": 800,
        "lr": 2e-4,
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_flag_has_one_default_whatever_the_data(recipe) -> None:
    config_class = RECIPES[recipe].Config
    for data in ("digits", "~/flowers"):
        config = parse(config_class, ["--data", data])
        assert config == config_class(data=data)
        assert {name: getattr(config, name) for name in PHOTOGRAPHS[recipe]} == PHOTOGRAPHS[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_data_the_refusal_names_a_preset_that_trains_on_digits(recipe, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in ([], ["--data="], ["--lr", "1"]):
        with pytest.raises(Refused, match="--data is missing: name your images, or") as raised:
            parse(RECIPES[recipe].Config, words)
    preset = re.search("--config .*", str(raised.value))[0]
    assert parse(RECIPES[recipe].Config, preset.split()).data == "digits"


def test_weights_to_begin_with_decide_where_nothing_is_given(tmp_path) -> None:
    words = ["--data", "x", "--init", "torchvision:fcos_resnet50_fpn"]
    decided = {"detector": "fcos", "model": "resnet50", "levels": "3-7", "width": 256, "convolutions": 4}
    decided |= {"short_sides": "800", "long_side": 1333, "variant": "torchvision", "batch_norm": "frozen"}
    config = parse(det.Config, words)
    assert config == det.Config(data="x", init=words[-1], **decided)
    (tmp_path / "preset.yaml").write_text("width: 64\nshort_sides: 320\n")
    given = parse(det.Config, [*words, "--config", str(tmp_path / "preset.yaml"), "--short_sides", "400"])
    assert given == det.Config(data="x", init=words[-1], **decided | {"width": 64, "short_sides": "400"})
    rows = detection.describe(given)
    assert rows.keys() == {"as the weights"} and "levels 3-7" in rows["as the weights"]
    assert "width" not in rows["as the weights"] and "short_sides" not in rows["as the weights"]


def test_presets_of_digits_say_all_that_is_not_for_photographs() -> None:
    """A digit is small, and a mirrored one is a different sign."""
    for recipe, preset in (("cls", "digits"), ("det", "det_digits")):
        config = parse(RECIPES[recipe].Config, ["--config", str(ROOT / f"recipes/presets/{preset}.yaml")])
        left = [name for name, value in PHOTOGRAPHS[recipe].items() if getattr(config, name) == value]
        assert left == [] and config.hflip == 0, left
