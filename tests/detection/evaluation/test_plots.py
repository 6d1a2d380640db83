"""Pictures of a detector are drawn in every case: one class, hundreds, odd names, grey images."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.data.images import BrokenImage
from common.detection.data.annotated import Annotated
from common.detection.evaluation import plots
from common.detection.evaluation.matching import Matches
from common.detection.evaluation.metrics import Detections
from common.run.plots import BLUE, GREY, ORANGE
from tests.harness.detections import make_awkward_objects
from tests.harness.pictures import has_colour, read_picture


class Plain(Annotated):
    """Dark images of a size each; image 1, where there is one, can't be read."""

    def get_name(self, index: int) -> str:
        return f"a very/long path/to/some $folder_{index}$/and/the image of it.jpeg"

    def load_image(self, index: int) -> Image.Image:
        if index == 1:
            raise BrokenImage("is torn")
        mode, ink = ("L", 30) if index == 0 else ("RGB", (30, 30, 30))
        return Image.new(mode, tuple(self.sizes[index].tolist()), ink)


CASES = {"objects and crowds": 21, "images without objects": 4, "no images": 0}
NAMES = tuple(f"$class_{{{number}}}$ 猫 of a long and winding name" for number in range(4))


@pytest.mark.parametrize("case", CASES)
def test_every_picture_is_drawn_of_anything(case: str, tmp_path: Path) -> None:
    detections = Detections()
    source = Plain(**vars(make_awkward_objects(0)[0]) | {"classes": NAMES})
    detections.update(range(21), make_awkward_objects(0)[1])
    images, rows = detections.to_arrays()
    fewest = np.sort(np.argsort(np.diff(source.offsets), kind="stable")[: CASES[case]])
    is_selected = np.isin(images, fewest)
    matches = Matches(
        source.select(fewest), np.searchsorted(fewest, images[is_selected]), rows[is_selected]
    )
    path = tmp_path / "pictures" / "a.png"
    plots.draw_predictions(matches, path)
    pixels = read_picture(path)
    assert not len(matches.source.boxes) or any(
        has_colour(pixels, colour) for colour in (BLUE, ORANGE, GREY)
    )
    assert max(pixels.shape[:2]) < 3000
    plots.draw_confusion(matches, source.classes, path)
    read_picture(path)
    plots.draw_mistakes(matches, path)
    assert has_colour(read_picture(path), ORANGE) == (
        matches.is_missed.any() or matches.num_false_alarms > 0
    )


@pytest.mark.parametrize("classes", [1, 21])
def test_precision_over_recall_is_drawn_for_any_classes(tmp_path: Path, classes: int) -> None:
    falling = np.linspace(1, 0, 101)[None] ** np.linspace(0.2, 3, classes)[:, None]
    falling[-1] = -1 if classes > 1 else falling[-1]  # no objects of the last class
    path = tmp_path / "pictures" / "a.png"
    plots.draw_precision_recall(
        falling, [f"class $_{number} 猫" * 4 for number in range(classes)], path
    )
    assert has_colour(read_picture(path), BLUE)
    plots.draw_precision_recall(falling * 0 - 1, ["a"] * classes, path)  # nothing to find
    assert not has_colour(read_picture(path), BLUE)
