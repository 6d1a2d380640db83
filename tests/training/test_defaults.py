"""Defaults are for photographs; presets, flags and weights to begin with override them."""

import dataclasses

import pytest

from common.config.parsing import parse
from common.detection import defaults as detection
from recipes import cls, det
from tests.harness.launching import ROOT

pytestmark = pytest.mark.smoke


def test_weights_to_begin_with_decide_where_nothing_is_given(tmp_path) -> None:
    argv = ["--data", "x", "--init", "torchvision:fcos_resnet50_fpn"]
    expected = det.Config(
        data="x",
        init="torchvision:fcos_resnet50_fpn",
        detector="fcos",
        model="resnet50",
        levels="3-7",
        width=256,
        convolutions=4,
        short_sides="800",
        long_side=1333,
        variant="torchvision",
        batch_norm="frozen",
    )
    assert parse(det.Config, argv) == expected
    preset = tmp_path / "preset.yaml"
    preset.write_text("width: 64\nshort_sides: 320\n")
    config = parse(det.Config, argv + ["--config", str(preset), "--short_sides", "400"])
    assert config == dataclasses.replace(expected, width=64, short_sides="400")
    rows = detection.describe_settings(config)
    assert rows.keys() == {"as the weights"}
    assert "levels 3-7" in rows["as the weights"]
    assert "width" not in rows["as the weights"]
    assert "short_sides" not in rows["as the weights"]


@pytest.mark.parametrize(
    "recipe, preset, names",
    [
        (cls, "digits", "model image_size crop_pct lr crop_scale hflip"),
        (det, "det_digits", "model levels width short_sides long_side lr hflip"),
    ],
)
def test_presets_of_digits_say_all_that_is_not_for_photographs(
    recipe, preset: str, names: str
) -> None:
    """A digit is small, and a mirrored one is a different sign."""
    config = parse(recipe.Config, ["--config", str(ROOT / f"recipes/presets/{preset}.yaml")])
    defaults = recipe.Config(data="x")
    for name in names.split():
        assert getattr(config, name) != getattr(defaults, name), name
    assert config.hflip == 0
