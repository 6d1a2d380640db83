"""Detections that lie exactly on COCO's overlap thresholds count as pycocotools counts them on the user's own file."""

import json

import numpy as np
import pytest
import torch
from pycocotools import mask

from common.detection.data import stamps
from common.detection.data.annotation_cache import PLACE
from common.detection.data.sources import Spec, load
from common.detection.evaluation.matching import NONE, Matches
from common.detection.evaluation.metrics import NAMES, Detections
from tests.harness.annotations import annotation, coco, picture
from tests.harness.detections import boxes_in_coco, hits_of, of_pycocotools

SIDE, IMAGES = 400, 40


def boxes_on_thresholds(random: np.random.Generator) -> tuple[list[list[float]], np.ndarray]:
    """COCO boxes in decimals, and detections float32[n, 4] (corners) that overlap them by 0.5, 0.55, ... 0.95."""
    given, found = [], []
    for row in range(12):
        threshold = 0.5 + 0.05 * random.integers(10)
        left, top = random.integers(0, 300, 2) + random.choice([0, 0.25, 0.5], 2)
        width, height = random.integers(3, 60, 2)
        if row % 2:  # the detection lies within the object
            box = [left, top, float(width / threshold), float(height)]
        else:  # the object within the detection
            box = [float(np.round(left + 0.1, 1)), float(np.round(top + 0.3, 1)), width * threshold, float(height)]
            left, top = box[:2]
        given.append(box)
        found.append([left, top, left + width, top + height])
    return given, np.array(found, np.float32)


def outline_of(left: float, top: float, right: float, bottom: float) -> list[float]:
    return [left, top, right, top, right, bottom, left, bottom]


@pytest.fixture(scope="module")
def on_thresholds(tmp_path_factory):
    """A folder in COCO's format, with the detections of each image: corners, scores, labels."""
    root, random = tmp_path_factory.mktemp("coco"), np.random.default_rng(0)
    annotations, found = [], []
    for number in range(1, IMAGES + 1):
        picture(root / "val" / f"{number}.png", (SIDE, SIDE))
        given, boxes = boxes_on_thresholds(random)
        for box in given:
            left, top, width, height = box
            outline = outline_of(left, top, left + width, top + height)
            more = {"id": len(annotations) + 1, "iscrowd": int(random.random() < 0.1), "area": width * height}
            annotations.append(annotation(number, box, 1, segmentation=[outline], **more))
        scores = torch.from_numpy(random.permutation(len(boxes)) / 16).float()
        masks = [mask.frPyObjects([outline_of(*box)], SIDE, SIDE)[0] for box in boxes.astype(float).tolist()]
        labels = torch.zeros(len(boxes)).long()
        found.append({"boxes": torch.from_numpy(boxes), "scores": scores, "labels": labels, "rles": masks})
    images = [{"id": n, "file_name": f"{n}.png", "width": SIDE, "height": SIDE} for n in range(1, IMAGES + 1)]
    coco(root, "val", (), annotations, [{"id": 1, "name": "cat"}], change=lambda content: content.update(images=images))
    return root, found


def test_the_numbers_are_those_of_pycocotools_on_the_file(on_thresholds, tmp_path, monkeypatch) -> None:
    root, found = on_thresholds
    monkeypatch.setenv(PLACE, str(tmp_path))
    monkeypatch.setattr(stamps, "_COARSEST", 0.0)
    for again in (False, True):  # read from the file, and from the cache of it
        source = load(Spec(str(root), seed=0, val_share=0.25, alone=True, masks=True))[1].select(np.arange(IMAGES))
        detections = Detections()
        detections.update(range(IMAGES), found)
        results = detections.results(source)
        images, columns = detections.columns()
        boxes = boxes_in_coco(np.arange(1, IMAGES + 1), images, columns)
        best_first = (np.argsort(-of_image["scores"].numpy(), kind="stable") for of_image in found)
        rles = (of_image["rles"][row] for of_image, rows in zip(found, best_first, strict=True) for row in rows)
        masks = [{key: box[key] for key in ("image_id", "score", "category_id")} for box in boxes]
        for shown, rle in zip(masks, rles, strict=True):
            shown["segmentation"] = rle
        content = json.loads((root / "val.json").read_text())
        for prefix, rows, kind in (("", boxes, "bbox"), ("mask_", masks, "segm")):
            expected = of_pycocotools(content, rows, kind)
            for name, value in zip(NAMES, expected.stats, strict=True):
                mine = results[prefix + name]
                assert (-1 if mine is None else mine) == pytest.approx(value, abs=1e-12), (again, prefix + name)
            if not prefix:
                hits = hits_of(expected, len(rows))
                assert (hits == NONE).any() and (hits >= 0).any()
                np.testing.assert_array_equal(Matches(source, images, columns).hits, hits)
