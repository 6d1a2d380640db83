"""The preset for own boxes learns twenty-five images of one class: AP50 on the held-out part rises to more than 50 %.

All digits of the scenes are of the class "digit". The run begins with a detector that knows digits by their numbers, trained by
this recipe; no row of its classes fits.
"""

import json
import shutil
from pathlib import Path

import pytest

# What of the preset is too large for here: the photographs, and with them the network, its rate and the number of steps.
SMALL = "--short_sides 112,128 --long_side 128 --levels 3-4 --width 64 --lr 2e-3 --min_epoch_steps 6".split()


@pytest.mark.long
def test_images_of_one_class_are_learnt(run_several, scenes: Path, tmp_path: Path) -> None:
    boxes, output = tmp_path / "boxes", ["--output_dir", tmp_path / "runs"]
    shutil.copytree(scenes / "train", boxes / "train")
    content = json.loads((scenes / "train.json").read_text())
    for one in content["annotations"]:
        one["category_id"] = 1
    content["categories"] = [{"id": 1, "name": "digit"}]
    (boxes / "train.json").write_text(json.dumps(content))
    base = ["--config", "recipes/presets/det_digits.yaml", "--max_steps", 20, "--eval_every", 20, *output]
    own = ["--config", "recipes/presets/det_own.yaml", "--data", boxes, "--init", tmp_path / "runs/base/best", *SMALL]
    runs = run_several(2, {"base": base, "own": [*own, *output]}, recipe="recipes/det.py", timeout=600)
    assert {each.outcome for each in runs.values()} == {"ok"}, runs
    run = runs["own"]
    found = run.column("eval/ema_AP50")
    assert run.rows[-1]["eval/count"] == len(content["images"]) // 5, "a fifth of the images is held out"
    assert found[0] < 0.3 and found.max() > 0.5, found
    assert "frozen " in run.stdout and " of 6 steps each" in run.stdout
    steps = [row["step"] for row in run.rows if "eval/AP50" in row]
    assert steps == [6 * (1 + place) for place in range(len(steps))], "evaluated at the end of each of its epochs"
