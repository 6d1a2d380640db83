"""Are the twelve numbers those of pycocotools, on data that is made to be awkward?"""

import contextlib
import io

import numpy as np
import pytest
import torch

from common.detection import coco_metrics
from common.detection.annotated import Annotations
from common.detection.coco_metrics import NAMES, Detections

CLASSES = ("never there", "cat", "dog", "bird")


def awkward(seed: int) -> tuple[Annotations, list[dict]]:
    """Ids with gaps, images without boxes, crowds, a class that is absent, tied scores, and more detections than count."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, 6, 21) * (random.random(21) < 0.8)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    corner = random.uniform(0, 200, (offsets[-1], 2))
    boxes = np.concatenate([corner, corner + random.uniform(4, 150, corner.shape)], 1).astype(np.float32)
    labels = random.integers(1, len(CLASSES), len(boxes))
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1) * random.uniform(0.3, 1, len(boxes)).astype(np.float32)
    source = Annotations(
        classes=CLASSES,
        category_ids=np.array([2, 7, 90, 91]),
        image_ids=np.sort(random.choice(1_000, 21, replace=False)),
        sizes=np.full((21, 2), 400, np.int32),
        offsets=offsets,
        boxes=boxes,
        labels=labels,
        crowd=random.random(len(boxes)) < 0.15,
        areas=areas,
    )
    found = []
    for index in range(21):
        true = boxes[offsets[index] : offsets[index + 1]]
        near = true + random.normal(0, 4, true.shape)
        corner = random.uniform(0, 200, (random.integers(0, 130), 2))
        wrong = np.concatenate([corner, corner + random.uniform(4, 150, corner.shape)], 1)
        guesses = np.concatenate([near, wrong]).astype(np.float32)
        right = labels[offsets[index] : offsets[index + 1]]
        found.append(
            {
                "boxes": torch.from_numpy(guesses),
                "scores": torch.from_numpy(np.round(random.random(len(guesses)), 1).astype(np.float32)),
                "labels": torch.from_numpy(np.concatenate([right, random.integers(0, len(CLASSES), len(wrong))])),
            }
        )
    return source, found


def of_pycocotools(source: Annotations, detections: Detections) -> dict[str, float]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = coco_metrics._coco(source)
        truth.createIndex()
        rows = [
            {
                "image_id": int(source.image_ids[image]),
                "bbox": [row[0], row[1], row[2] - row[0], row[3] - row[1]],
                "score": row[4],
                "category_id": int(row[5]) + 1,
            }
            for images, of_image in zip(detections.images, detections.rows, strict=True)
            for image, row in zip(images, of_image.astype(float), strict=True)
        ]
        evaluation = COCOeval(truth, truth.loadRes(rows), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(NAMES, evaluation.stats, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_the_numbers_are_those_of_pycocotools(seed: int) -> None:
    source, found = awkward(seed)
    detections = Detections()
    detections.update(range(21), found)
    results = detections.results(source)
    expected = of_pycocotools(source, detections)
    for name in NAMES:
        assert (-1 if results[name] is None else results[name]) == pytest.approx(expected[name], abs=1e-12), name
    assert results["count"] == 21
    assert results["per_class"][0] is None and results["per_class"][1] is not None


def test_an_image_that_two_ranks_looked_at_counts_once(monkeypatch) -> None:
    source, found = awkward(3)
    alone, first, second = Detections(), Detections(), Detections()
    alone.update(range(21), found)
    first.update(range(12), found[:12])
    second.update(range(9, 21), found[9:])
    gathered = [
        (np.concatenate(rank.images), np.concatenate(rank.rows), np.array(rank.seen)) for rank in (first, second)
    ]
    monkeypatch.setattr(coco_metrics, "gather_to_main", lambda _: gathered)
    assert first.results(source) == alone.results(source)


def test_nothing_found_is_a_result() -> None:
    source, _ = awkward(0)
    nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    detections = Detections()
    detections.update(range(21), [nothing] * 21)
    results = detections.results(source)
    assert results["count"] == 21 and results["AP"] == 0
