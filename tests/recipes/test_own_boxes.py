"""The preset for own boxes learns twenty images of one class: AP50 on the held-out part rises above 85 %.

The images are parts of scikit-learn's two photographs with digits pasted into them, all of the class "digit". It begins with
a detector that knows digits by their numbers, trained by this recipe; no row of its classes fits.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from common.data.digits import read_digits
from tests.harness.outcomes import Outcome

IMAGES, SIDE = 20, 128
# What of the preset is too large for here: the photographs, and with them the network, its rate and the number of steps.
SMALL = "--short_sides 112,128 --long_side 128 --levels 3-4 --width 64 --lr 2e-3 --min_epoch_steps 6"


def draw_boxes(folder: Path) -> Path:
    """20 photographs of 128 x 128 pixels with one to three digits each, undivided, in COCO's format."""
    generator, photographs, digits = np.random.default_rng(0), load_sample_images().images, read_digits()[0]
    images, annotations = [], []
    folder.mkdir()
    for number in range(IMAGES):
        photograph = photographs[number % 2]
        top, left = (int(generator.integers(side - SIDE)) for side in photograph.shape[:2])
        pixels = photograph[top : top + SIDE, left : left + SIDE].copy()
        for column in range(generator.integers(1, 4)):  # in columns of their own, so that none hides another
            side = int(generator.integers(24, 40))
            ink = Image.fromarray((digits[generator.integers(len(digits))] * 15.9).astype(np.uint8)).resize(
                (side, side)
            )
            x, y = column * 42 + int(generator.integers(42 - side + 1)), int(generator.integers(SIDE - side))
            share = np.asarray(ink)[..., None] / 255
            place = pixels[y : y + side, x : x + side]
            place[:] = place * (1 - share) + 255 * share
            annotations.append(
                {"id": len(annotations), "image_id": number, "category_id": 1, "bbox": [x, y, side, side]}
            )
        Image.fromarray(pixels).save(folder / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": SIDE, "height": SIDE})
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "digit"}]}
    (folder / "train.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def runs(run_several, tmp_path_factory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("own")
    boxes, output = draw_boxes(folder / "boxes"), ["--output_dir", folder / "runs"]
    base = ["--config", "recipes/presets/det_digits.yaml", "--max_steps", 20, "--eval_every", 20, *output]
    own = [
        "--config",
        "recipes/presets/det_own.yaml",
        "--data",
        boxes,
        "--init",
        folder / "runs/base/best",
        *SMALL.split(),
    ]
    return run_several(2, {"base": base, "own": [*own, *output]}, recipe="recipes/det.py", timeout=600)


@pytest.mark.long
def test_twenty_images_of_one_class_are_learnt(runs: dict[str, Outcome]) -> None:
    run = runs["own"]
    assert {each.outcome for each in runs.values()} == {"ok"}
    found = run.column("eval/ema_AP50")
    assert run.rows[-1]["eval/count"] == IMAGES // 5, "a fifth of the images is held out"
    assert found[0] < 0.75 and found.max() > 0.85, found
    assert "frozen " in run.stdout and "counted as 15.0 of 6 steps each" in run.stdout
    steps = [row["step"] for row in run.rows if "eval/AP50" in row]
    assert steps == [6 * (1 + place) for place in range(len(steps))], "evaluated at the end of each of its epochs"
