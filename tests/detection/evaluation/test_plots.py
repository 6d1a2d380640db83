"""Pictures of a detector are drawn in every case: no detections, one class, hundreds, odd names, crowds, grey images."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.data.images import BrokenImage
from common.detection.data.annotated import Annotated
from common.detection.evaluation import plots
from common.detection.evaluation.matching import Matches
from common.run.plots import BLUE, GREY, ORANGE
from tests.harness.detections import columns
from tests.harness.pictures import drawn, has


class Plain(Annotated):
    """Dark images of a size each; image 1, where there is one, can't be read."""

    def name(self, index: int) -> str:
        return f"a very/long path/to/some $folder_{index}$/and/the image of it.jpeg"

    def image(self, index: int) -> Image.Image:
        if index == 1:
            raise BrokenImage("is torn")
        mode, ink = ("L", 30) if index == 0 else ("RGB", (30, 30, 30))
        return Image.new(mode, tuple(self.sizes[index].tolist()), ink)


def annotated(images: int, classes: int, objects: int) -> Plain:
    """A fifth of the objects are crowds."""
    random = np.random.default_rng(0)
    sizes = random.integers(60, 900, (images, 2)).astype(np.int32)
    corners = random.uniform(0, 0.6, (images, objects, 2)) * sizes[:, None]
    boxes = np.concatenate([corners, corners + random.uniform(0.05, 0.35, corners.shape) * sizes[:, None]], 2)
    labels, crowd = random.integers(0, classes, boxes.shape[:2]), random.random(boxes.shape[:2]) < 0.2
    names = tuple(f"$class_{{{number}}}$ 猫 of a long and winding name" for number in range(classes))
    return Plain(
        **columns([[*zip(*rows, strict=True)] for rows in zip(boxes, labels, crowd, strict=True)], sizes, names)
    )


CASES = {
    "25 classes": (2, 25, 6),
    "nothing found": (2, 2, 3),
    "images without objects": (2, 2, 0),
    "no images": (0, 2, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_every_picture_is_drawn_of_anything(case: str, tmp_path: Path) -> None:
    source, random = annotated(*CASES[case]), np.random.default_rng(1)
    count = 0 if case == "nothing found" else len(source.labels)  # at the place of every object, half of another class
    labels = np.where(random.random(count) < 0.5, source.labels[:count], 0)
    images = np.repeat(np.arange(len(source)), np.diff(source.offsets))[:count]
    rows = np.column_stack([source.boxes[:count], random.uniform(0.3, 1, count), labels])
    matches = Matches(source, images, rows.astype(np.float32))
    path = tmp_path / "pictures" / "a.png"
    plots.predictions(matches, path)
    pixels = drawn(path)
    assert not len(source.boxes) or any(has(pixels, colour) for colour in (BLUE, ORANGE, GREY))
    assert max(pixels.shape[:2]) < 3000
    plots.confusion(matches, source.classes, path)
    drawn(path)
    plots.misses(matches, path)
    assert has(drawn(path), ORANGE) == (matches.missed.any() or matches.false_alarm_count > 0)


@pytest.mark.parametrize("classes", [1, 21])
def test_precision_over_recall_is_drawn_for_any_number_of_classes(tmp_path: Path, classes: int) -> None:
    falling = np.linspace(1, 0, 101)[None] ** np.linspace(0.2, 3, classes)[:, None]
    falling[-1] = -1 if classes > 1 else falling[-1]  # no objects of the last class
    path = tmp_path / "pictures" / "a.png"
    plots.precision_recall(falling, [f"class $_{number} 猫" * 4 for number in range(classes)], path)
    assert has(drawn(path), BLUE)
    plots.precision_recall(falling * 0 - 1, ["a"] * classes, path)  # nothing to find
    assert not has(drawn(path), BLUE)
