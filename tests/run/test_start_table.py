"""The start table names the settings of a training that are not at the recipe's defaults, and its
real length.
"""

import re

import pytest

from common.config.parsing import parse
from common.run.start_table import _describe_settings
from tests.harness.several import load_recipe
from tests.recipes.copied import ROOT, copy

FLAG = """A flag of one's own, and another default.
@@ Config
-    label_smoothing: float = option(0.0, low=0, high=1)
+    label_smoothing: float = option(0.1, low=0, high=1)
@@ Config
-    repeats: int = option(1, low=1)
+    focal_gamma: float = 0.0
+    repeats: int = option(1, low=1)
"""
CHANGED = (
    "--class_weights sqrt --sampling balanced --ema_decay 0.999 --color_jitter 0.4 "
    "--random_erasing 0.25 --patience 3 --freeze_stages 1 --focal_gamma 2"
)


def test_the_dry_run_names_settings_and_the_real_length(run_several, tmp_path) -> None:
    script = copy(tmp_path / "mine.py", FLAG)
    args = f"--max_steps 50 --dry_run {CHANGED}".split()
    outcome = run_several(1, {"mine": [script] + args})["mine"]
    assert outcome.outcome == "ok", outcome.text
    table = dict(re.findall(r"^  ([a-z ]+?)  +(.*)$", outcome.stdout, re.M))
    named = set(table["settings"].split(", "))
    pairs = re.findall(r"--(\w+) (\S+)", CHANGED)
    assert {f"{name} {value}".removesuffix(".0") for name, value in pairs} <= {
        text.removesuffix(".0") for text in named
    }
    assert not {text.split()[0] for text in named} & {
        "data",
        "model",
        "lr",
        "label_smoothing",
        "max_steps",
        "dry_run",
    }
    assert re.fullmatch(r"50 steps, 2\.2 epochs; the dry run makes 2 of them", table["length"])


@pytest.mark.smoke
def test_settings_at_a_copys_defaults_are_not_named(tmp_path) -> None:
    recipe = load_recipe(copy(tmp_path / "copied.py", FLAG))
    preset = f"--config {ROOT}/recipes/presets/cifar10.yaml".split()
    assert _describe_settings(parse(recipe.Config, ["--data", "digits"])) == ""
    assert (
        _describe_settings(parse(recipe.Config, ["--data", "digits", "--label_smoothing", "0"]))
        == "label_smoothing 0.0"
    )
    named = _describe_settings(parse(recipe.Config, preset))
    assert (
        "warmup_epochs 5.0" in named
        and "channels_last True" in named
        and "lr 0.1" not in named.split(", ")
    )
