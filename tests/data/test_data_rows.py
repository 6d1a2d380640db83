"""The start table names the evaluated part, the classes and their numbers of samples, in few words."""

import re
from pathlib import Path

import pytest

from common.classification import sources
from common.data.data_spec import data_rows
from common.detection.data import sources as detection
from tests.harness.annotations import annotation, coco
from tests.harness.drawings import pets, picture


def rows(root: Path, **options) -> dict[str, str]:
    return data_rows("here", *sources.load(sources.Spec(str(root), seed=0, val_share=0.2, **options)))


@pytest.mark.smoke
def test_the_part_that_is_evaluated_is_named_and_what_is_not_evaluated(tmp_path):
    for part in ("train", "Val", "test"):
        pets(tmp_path / part, cats=4, dogs=5)
    for number in range(4):
        picture(tmp_path / f"train/emu {number}" / "0.png")
    found = rows(tmp_path)
    name, said = found.pop("fingerprint").split(", ", 1)
    assert re.fullmatch("[0-9a-f]{12}-[0-9a-f]{12}", name) and "pixels are not compared" in said
    assert found == {
        "data": "here: 13 + 9 images of 6 classes",
        "classes": "cat, dog, emu 0, emu 1, emu 2 and 1 more",
        "trained on": "train/",
        "evaluated": "Val/; test/: for --split test",
        "images per class": "1 (emu 0) to 5 (dog)",
        "not evaluated": "emu 0, emu 1, emu 2, emu 3: no images to evaluate",
    }


def test_boxes_are_counted_and_a_class_without_any_is_named(tmp_path):
    categories = [{"id": number, "name": name} for number, name in enumerate(("birds", "owl", "tit"))]
    boxes = [annotation(4, [1, 2, 3, 4], 1)] * 3 + [annotation(10, [1, 2, 3, 4], 2)]
    for part, its in (("train", boxes), ("valid", boxes[:1])):
        coco(tmp_path, part, annotations=its, categories=categories)
    for _ in range(2):  # read, and from the index
        found = data_rows("here", *detection.load(detection.Spec(str(tmp_path), seed=0, val_share=0.2)), "boxes")
        assert found["boxes per class"] == "0 (birds) to 3 (owl)"
        assert found["not evaluated"] == "birds, tit: no boxes to evaluate"
        assert found["evaluated"] == "valid.json"
