"""The twelve numbers equal those of pycocotools, also on awkward data."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from common.detection.data.masks import decode, encode, pasted
from common.detection.evaluation import metrics
from common.detection.evaluation.metrics import NAMES, Detections
from tests.harness.detections import CLASSES, awkward, boxes_in_coco, of_pycocotools


@pytest.mark.parametrize("seed", range(8))
def test_the_numbers_are_those_of_pycocotools(seed: int) -> None:
    source, found = awkward(seed)
    detections = Detections()
    detections.update(range(21), found)
    results = detections.results(source)
    boxes = boxes_in_coco(source.image_ids, *detections.columns())
    expected = of_pycocotools(metrics._coco(source), boxes)
    for name, value in zip(NAMES, expected.stats, strict=True):
        assert (-1 if results[name] is None else results[name]) == pytest.approx(value, abs=1e-12), name
    assert results["count"] == 21
    assert results["per_class"][0] is None and results["per_class"][1] is not None
    named = {key: value for key, value in results.items() if key.startswith("AP_class/")}
    assert named == dict(zip([f"AP_class/{name}" for name in CLASSES[1:]], results["per_class"][1:], strict=True))
    present = detections.precision[1:]
    assert (detections.precision[0] == -1).all() and present.shape == (3, 101)
    assert present.mean() == pytest.approx(results["AP50"], abs=1e-12)


def test_classes_are_results_of_their_own_only_while_a_row_stays_short() -> None:
    source, found = awkward(1)
    many = dataclasses.replace(source, classes=tuple(map(str, range(101))), category_ids=np.arange(101))
    detections = Detections()
    detections.update(range(21), found)
    results = detections.results(many)
    assert len(results["per_class"]) == 101 and not any("/" in key for key in results)


def test_an_image_that_two_ranks_looked_at_counts_once(monkeypatch) -> None:
    source, found = awkward(3)
    alone, first, second = Detections(), Detections(), Detections()
    alone.update(range(21), found)
    first.update(range(12), found[:12])
    second.update(range(9, 21), found[9:])
    gathered = [(*rank.columns(), np.array(rank.seen)) for rank in (first, second)]
    monkeypatch.setattr(metrics, "gather_to_main", lambda _: gathered)
    assert first.results(source) == alone.results(source)
    for one, other in zip(first.columns(), alone.columns(), strict=True):
        np.testing.assert_array_equal(one, other)  # to draw from

    monkeypatch.setattr(metrics, "gather_to_main", lambda _: None)  # as on the other ranks
    monkeypatch.setattr(metrics, "broadcast_object", lambda _: {"AP": 0.5})
    assert second.results(source) == {"AP": 0.5}
    assert [len(column) for column in second.columns()] == [0, 0] and second.precision is None


def test_nothing_found_is_a_result() -> None:
    source, _ = awkward(0)
    nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    detections = Detections()
    detections.update(range(21), [nothing] * 21)
    results = detections.results(source)
    assert results["count"] == 21 and results["AP"] == 0


class Blobs:
    """Awkward annotations with a mask in each box."""

    def __init__(self, seed: int):
        self.annotations, self.found = awkward(seed)
        self.random = np.random.default_rng(seed)
        self.shapes = [self.within(self.boxes[slice(*self.offsets[index : index + 2])]) for index in range(len(self))]
        for index, found in enumerate(self.found):
            found["rles"] = self.within(found["boxes"].numpy())
            for number, true in enumerate(self.shapes[index]):  # some are near what is there
                if number % 2:
                    found["rles"][number] = true

    def __getattr__(self, name):
        return getattr(self.annotations, name)

    def __len__(self):
        return 21

    def within(self, boxes):
        masks = np.zeros((len(boxes), 400, 400), np.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes.clip(0, 399).astype(int), strict=True):
            mask[top : bottom + 1, left : right + 1] = 1
            mask[top : top + self.random.integers(1, 40), left : left + 30] = 0
        return encode(masks)

    def rles(self, index):
        return self.shapes[index]


@pytest.mark.parametrize("seed", range(2))
def test_the_numbers_of_masks_are_those_of_pycocotools_on_one_rank_or_several(seed: int, monkeypatch) -> None:
    source = Blobs(seed)
    detections, first, second, idle = (Detections() for _ in range(4))
    detections.update(range(21), source.found)
    results = detections.results(source)
    content, rows = metrics._coco(source), []
    for annotation, rle in zip(content["annotations"], itertools.chain(*source.shapes), strict=True):
        annotation["segmentation"] = rle
    for index, found in enumerate(source.found):
        best = found["scores"].argsort(descending=True, stable=True).tolist()
        rows += [
            {
                "image_id": int(source.image_ids[index]),
                "score": found["scores"][row].item(),
                "category_id": found["labels"][row].item() + 1,
                "segmentation": found["rles"][row],
            }
            for row in best
        ]
    evaluation = of_pycocotools(content, rows, "segm")
    for name, value in zip(NAMES, evaluation.stats, strict=True):
        mine = results[f"mask_{name}"]
        assert (-1 if mine is None else mine) == pytest.approx(value, abs=1e-12), name
    assert 0 < results["mask_AP"] != results["AP"]
    first.update(range(12), source.found[:12])
    second.update(range(9, 21), source.found[9:])
    gathered = []
    monkeypatch.setattr(metrics, "gather_to_main", lambda columns: gathered.append(columns) or gathered)
    for rank in (second, idle, first):
        at_once = rank.results(source)
    assert at_once == results


def test_a_mask_lies_on_the_pixels_of_its_box() -> None:
    boxes = torch.tensor([[10.0, 20.0, 38.0, 48.0], [-5.0, 0.0, 3.0, 60.0]])
    grid = torch.zeros(2, 28, 28)
    grid[0, :14], grid[1] = 1, 1
    upper, edge = decode(pasted(grid, boxes, np.array([60, 50])), np.array([60, 50]))
    assert upper.shape == (50, 60) and upper[21:33, 11:37].all() and int(upper.sum()) == pytest.approx(28 * 14, rel=0.1)
    assert edge[:, :3].all() and not edge[:, 5:].any()
    assert pasted(grid[:0], boxes[:0], np.array([60, 50])) == []
