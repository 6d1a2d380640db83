"""The twelve numbers are pycocotools', on awkward data and with overlaps on a threshold."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pycocotools import mask

from common.detection.data.annotated import Annotated
from common.detection.data.masks import decode_masks, paste_masks
from common.detection.data.sources import Spec, load
from common.detection.evaluation import metrics
from common.detection.evaluation.evaluation import Evaluation
from common.detection.evaluation.matching import IN_CROWD, NO_OBJECT, Matches
from common.detection.evaluation.metrics import NAMES, Detections
from common.distributed.collectives import rank
from tests.harness.annotations import build_annotation, draw_picture, write_coco
from tests.harness.detections import (
    CLASSES,
    A,
    build_columns,
    convert_boxes_to_coco,
    evaluate_with_pycocotools,
    get_hits,
    make_awkward_objects,
)
from tools.compare.average_precision import AveragePrecision


@pytest.mark.parametrize("seed", range(2))
def test_numbers_hits_and_crowds_are_those_of_pycocotools(seed: int) -> None:
    source, detected = make_awkward_objects(seed)
    detections = Detections()
    detections.update(range(21), detected)
    results = detections.results(source)
    images, rows = detections.to_arrays()
    expected = evaluate_with_pycocotools(
        metrics.build_coco_annotations(source),
        convert_boxes_to_coco(source.image_ids, images, rows),
    )
    hits = Matches(source, images, rows).hit_objects
    assert (hits == IN_CROWD).any() and (hits >= 0).any()
    np.testing.assert_array_equal(hits, get_hits(expected, len(rows)))
    for name, value in zip(NAMES, expected.stats, strict=True):
        assert (-1 if results[name] is None else results[name]) == pytest.approx(
            value, abs=1e-12
        ), name
    assert results["count"] == 21
    assert results["per_class"][0] is None and results["per_class"][1] is not None
    named = {key: value for key, value in results.items() if key.startswith("AP_class/")}
    assert named == dict(
        zip([f"AP_class/{name}" for name in CLASSES[1:]], results["per_class"][1:], strict=True)
    )
    present = detections.precision[1:]
    assert (detections.precision[0] == -1).all() and present.shape == (3, 101)
    assert present.mean() == pytest.approx(results["AP50"], abs=1e-12)
    rows[:, 5] = 1  # more than count of a class in an image
    expected = get_hits(
        evaluate_with_pycocotools(
            metrics.build_coco_annotations(source),
            convert_boxes_to_coco(source.image_ids, images, rows),
        ),
        len(rows),
    )
    counted = Matches.from_best(source, images, rows)
    assert np.bincount(counted.images).max() == 100
    assert len(counted.detections) < len(rows) and sorted(
        counted.hit_objects[counted.hit_objects >= 0]
    ) == sorted(expected[expected >= 0])


def test_ids_of_64_bits_change_no_number() -> None:
    source, detected = make_awkward_objects(0)
    results = []
    for shift in (0, 2**62, -(2**62)):
        detections = Detections()
        detections.update(range(21), detected)
        results.append(detections.results(replace(source, image_ids=source.image_ids + shift)))
    assert results[0] == results[1] == results[2]


def test_more_than_100_objects_are_counted_as_pycocotools_does() -> None:
    """With its limit set to the largest number of objects in an image."""
    corners = np.array(
        [[10 * x, 10 * y, 10 * x + 7, 10 * y + 7] for x in range(11) for y in range(11)], float
    )
    source = Annotated(
        **build_columns(
            [[(box, 0) for box in corners], [(box, 0) for box in corners[:5]]],
            ((120, 120),),
            ("a",),
        )
    )
    assert source.max_detections == 121 and source.select(np.array([1])).max_detections == 100
    scores = torch.linspace(1, 0.5, 121)
    wrong = torch.tensor(corners[:60]).float() + 4
    detected = []
    for of_image in (
        torch.tensor(corners).float(),
        torch.cat([torch.tensor(corners[:5]).float(), wrong]),
    ):
        count = len(of_image)
        detected.append(
            {"boxes": of_image, "scores": scores[:count], "labels": torch.zeros(count).long()}
        )
    perfect = Detections()
    perfect.update(
        range(2), [detected[0], {name: column[:5] for name, column in detected[1].items()}]
    )
    assert perfect.results(source)["AP"] == pytest.approx(1) and perfect.matches.is_detected.all()
    detections = Detections()
    detections.update(range(2), detected)
    results = detections.results(source)
    boxes = convert_boxes_to_coco(source.image_ids, *detections.to_arrays())
    expected = evaluate_with_pycocotools(
        metrics.build_coco_annotations(source), boxes, max_detections=121
    )
    precision = expected.eval["precision"][:, :, 0, 0, -1]
    assert precision.mean() < 0.99 and results["AP"] == precision.mean()
    assert results["AR100"] == expected.eval["recall"][:, 0, 0, -1].mean()
    of_compare = AveragePrecision(source, *detections.to_arrays())(np.ones((1, 2)))
    assert of_compare[0] == pytest.approx(results["AP"], abs=1e-12)


def test_a_mask_lies_on_the_pixels_of_its_box() -> None:
    boxes = torch.tensor([[10.0, 20.0, 38.0, 48.0], [-5.0, 0.0, 3.0, 60.0]])
    grid = torch.zeros(2, 28, 28)
    grid[0, :14], grid[1] = 1, 1
    upper, edge = decode_masks(paste_masks(grid, boxes, np.array([60, 50])), np.array([60, 50]))
    assert (
        upper.shape == (50, 60)
        and upper[21:33, 11:37].all()
        and int(upper.sum()) == pytest.approx(28 * 14, rel=0.1)
    )
    assert edge[:, :3].all() and not edge[:, 5:].any()
    assert paste_masks(grid[:0], boxes[:0], np.array([60, 50])) == []


SIDE = 400
IMAGES = 40


def draw_boxes_on_thresholds(random: np.random.Generator) -> tuple[list[list[float]], np.ndarray]:
    """COCO boxes in decimals, and float32[n, 4] corners that overlap them by 0.5, 0.55, ... 0.95."""
    true_boxes = []
    detected_boxes = []
    for row in range(12):
        threshold = 0.5 + 0.05 * random.integers(10)
        left, top = random.integers(0, 300, 2) + random.choice([0, 0.25, 0.5], 2)
        width, height = random.integers(3, 60, 2)
        if row % 2:  # the detection lies within the object
            box = [left, top, float(width / threshold), float(height)]
        else:  # the object within the detection
            box = [
                float(np.round(left + 0.1, 1)),
                float(np.round(top + 0.3, 1)),
                width * threshold,
                float(height),
            ]
            left, top = box[:2]
        true_boxes.append(box)
        detected_boxes.append([left, top, left + width, top + height])
    return true_boxes, np.array(detected_boxes, np.float32)


def build_outline(left: float, top: float, right: float, bottom: float) -> list[float]:
    return [left, top, right, top, right, bottom, left, bottom]


def rank_evaluates(source: Annotated, detected: list[dict]) -> dict:
    """The results of three ranks, the second of which has no image."""
    share = (slice(25, IMAGES), slice(0), slice(25))[rank()]
    detections = Detections()
    detections.update(range(IMAGES)[share], detected[share])
    return detections.results(source)


def test_detections_on_thresholds_count_as_in_pycocotools(processes, tmp_path) -> None:
    """Boxes and masks, on one rank or several."""
    random = np.random.default_rng(0)
    annotations = []
    detected = []
    for number in range(1, IMAGES + 1):
        draw_picture(tmp_path / "val" / f"{number}.png", (SIDE, SIDE))
        true_boxes, boxes = draw_boxes_on_thresholds(random)
        for box in true_boxes:
            left, top, width, height = box
            outline = build_outline(left, top, left + width, top + height)
            more = {
                "id": len(annotations) + 1,
                "iscrowd": int(random.random() < 0.1),
                "area": width * height,
            }
            annotations.append(build_annotation(number, box, 1, segmentation=[outline], **more))
        scores = torch.from_numpy(np.sort(random.permutation(len(boxes)) / 16)[::-1].copy()).float()
        masks = [
            mask.frPyObjects([build_outline(*box)], SIDE, SIDE)[0]
            for box in boxes.astype(float).tolist()
        ]
        labels = torch.zeros(len(boxes)).long()
        detected.append(
            {"boxes": torch.from_numpy(boxes), "scores": scores, "labels": labels, "rles": masks}
        )
    sizes = [
        {"id": n, "file_name": f"{n}.png", "width": SIDE, "height": SIDE}
        for n in range(1, IMAGES + 1)
    ]
    named = [{"id": 1, "name": "cat"}]
    write_coco(
        tmp_path, "val", (), annotations, named, change=lambda content: content.update(images=sizes)
    )
    source = load(Spec(str(tmp_path), seed=0, val_share=0.25, is_eval_only=True, masks=True))[
        1
    ].select(np.arange(IMAGES))
    detections = Detections()
    detections.update(range(IMAGES), detected)
    results = detections.results(source)
    images, columns = detections.to_arrays()
    boxes = convert_boxes_to_coco(np.arange(1, IMAGES + 1), images, columns)
    rles = (rle for of_image in detected for rle in of_image["rles"])
    keys = "image_id", "score", "category_id"
    masks = [
        {key: box[key] for key in keys} | {"segmentation": rle}
        for box, rle in zip(boxes, rles, strict=True)
    ]
    content = json.loads((tmp_path / "val.json").read_text())
    for prefix, rows, kind in (("", boxes, "bbox"), ("mask_", masks, "segm")):
        expected = evaluate_with_pycocotools(content, rows, kind)
        for name, value in zip(NAMES, expected.stats, strict=True):
            actual = results[prefix + name]
            assert (-1 if actual is None else actual) == pytest.approx(value, abs=1e-12), (
                prefix + name
            )
        if not prefix:
            hits = get_hits(expected, len(rows))
            assert (hits == NO_OBJECT).any() and (hits >= 0).any()
            np.testing.assert_array_equal(Matches(source, images, columns).hit_objects, hits)
    assert processes.run(rank_evaluates, source, detected, ranks=3) == [results] * 3

    evaluation = Evaluation(source)
    evaluation.detections = detections
    evaluation.write_predictions(tmp_path)
    written = json.loads((tmp_path / "predictions.json").read_text())
    assert len(written) == len(boxes)
    assert evaluate_with_pycocotools(content, written).stats[0] == pytest.approx(
        results["AP"], abs=1e-12
    )
    for result in written:
        del result["bbox"]  # else pycocotools judges masks by its area
    expected = evaluate_with_pycocotools(content, written, "segm").stats[0]
    assert expected == pytest.approx(results["mask_AP"], abs=1e-12)


def test_no_detection_is_an_empty_list(tmp_path) -> None:
    evaluation = Evaluation(Annotated(**build_columns([[(A, 0)]])))
    evaluation.detections.update(
        [0], [{"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0)}]
    )
    evaluation.results()
    evaluation.write_predictions(tmp_path)
    assert json.loads((tmp_path / "predictions.json").read_text()) == []
