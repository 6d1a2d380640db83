"""The start table names the evaluated part, the classes and their numbers of samples, in few words."""

import re
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from common.classification import sources
from common.data.data_spec import describe_data
from tests.harness.drawings import draw_picture, draw_tree


def print_rows(root: Path, **options) -> dict[str, str]:
    return describe_data(
        "here", *sources.load(sources.Spec(str(root), seed=0, val_share=0.2, **options))
    )


@pytest.mark.smoke
def test_what_is_and_what_is_not_evaluated_is_named(tmp_path):
    counts = {"cat": 4, "dog": 5}
    draw_tree(
        tmp_path,
        {f"{part}/{name}": counts[name] for part in ("train", "Val", "test") for name in counts},
    )
    for number in range(4):
        draw_picture(tmp_path / f"train/emu {number}" / "0.png")
    actual = print_rows(tmp_path)
    name, text = actual.pop("fingerprint").split(", ", 1)
    assert re.fullmatch("[0-9a-f]{12}-[0-9a-f]{12}", name) and "pixels are not compared" in text
    assert actual == {
        "data": "here: 13 + 9 images of 6 classes",
        "classes": "cat, dog, emu 0, emu 1, emu 2 and 1 more",
        "trained on": "train/",
        "evaluated": "Val/; test/: for --split test",
        "images per class": "1 (emu 0) to 5 (dog)",
        "not evaluated": "emu 0, emu 1, emu 2, emu 3: no images to evaluate",
    }


def fill(mode: str, *values: int) -> Image.Image:
    return Image.new(mode, (8, 8), values if len(values) > 1 else values[0])


@pytest.mark.parametrize(
    "image, is_told",
    [
        (fill("RGBA", 10, 20, 30, 0), True),
        (fill("LA", 10, 254), True),
        (fill("RGBA", 10, 20, 30, 255), False),  # nothing is lost
        (fill("RGB", 10, 20, 30), False),
        (fill("I;16", 1000), False),
    ],
)
def test_a_transparent_image_among_others_has_a_row(tmp_path, image, is_told):
    for number in range(8):
        draw_picture(tmp_path / "ab"[number % 2] / f"{number}.png")
    image.save(tmp_path / "b/5.png")
    assert ("5.png" in print_rows(tmp_path, is_eval_only=True).get("transparency", "")) == is_told


@pytest.mark.parametrize("extra, is_told", [(2, True), (0, False)])
def test_a_band_that_is_read_as_transparency_has_a_row(tmp_path, extra, is_told):
    """Tools write near infrared as transparency, too."""
    for number in range(8):
        file = tmp_path / "ab"[number % 2] / f"{number}.tif"
        file.parent.mkdir(exist_ok=True)
        values = np.full((8, 8, 4), 10 * number, np.uint8)
        tifffile.imwrite(file, values, photometric="rgb", extrasamples=[extra])
    row = print_rows(tmp_path).get("transparency", "")
    assert (
        bool(re.fullmatch(r"becomes white, as in .*\.tif; a fourth band: docs/data\.md", row))
        == is_told
    )
