"""Annotations and detections as columns, and pycocotools' judgement of detections."""

import contextlib
import io
from collections.abc import Sequence

import numpy as np
import torch

from common.detection.data.annotated import Annotated
from common.detection.evaluation.matching import IN_CROWD, NO_OBJECT, Matches

CLASSES = ("never there", "cat", "dog", "bird")
# boxes in an image of 100 x 100
A = (10, 10, 50, 50)
B = (60, 60, 80, 80)


def build_columns(
    images: Sequence[Sequence[tuple]], sizes=((100, 100),), classes=("cat", "dog", "cow")
) -> dict:
    """The arguments of `Annotated`; `images` has the objects of each image: box, class, crowd or not."""
    objects = []
    for image_objects in images:
        objects += image_objects
    boxes = np.array([entry[0] for entry in objects], np.float32).reshape(-1, 4)
    return {
        "classes": classes,
        "category_ids": np.arange(len(classes)),
        "image_ids": np.arange(len(images)),
        "sizes": np.resize(np.array(sizes, np.int32), (len(images), 2)),
        "offsets": np.cumsum([0] + list(map(len, images))),
        "boxes": boxes,
        "labels": np.array([entry[1] for entry in objects], np.int64),
        "crowd": np.array([any(entry[2:]) for entry in objects], bool),
        "areas": (boxes[:, 2:] - boxes[:, :2]).prod(1).astype(np.float64),
    }


def find_extents(masks: torch.Tensor) -> torch.Tensor:
    """The tight boxes of masks [n, h, w] that have pixels: int64[n, 4] left, top, right, bottom."""
    sides = []
    for mask in masks:
        rows, columns = mask.nonzero(as_tuple=True)
        sides.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    return torch.tensor(sides).reshape(-1, 4)


def shift_box(box, x: float) -> tuple:
    return box[0] + x, box[1], box[2] + x, box[3]


def match_one_image(
    objects: list, detections: list, source_type: type[Annotated] = Annotated
) -> Matches:
    """Objects (box, class, crowd) and detections (box, score, class) of a picture of 100 x 100 pixels."""
    rows = [box + (score, label) for box, score, label in detections]
    array = np.array(rows, np.float32).reshape(-1, 6)
    return Matches(source_type(**build_columns([objects])), np.zeros(len(rows), np.int64), array)


def make_awkward_objects(seed: int) -> tuple[Annotated, list[dict]]:
    """Ids with gaps, images without boxes, crowds, an absent class, tied scores, many detections."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, 6, 21) * (random.random(21) < 0.8)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    corner = random.uniform(0, 200, (offsets[-1], 2))
    boxes = np.concatenate([corner, corner + random.uniform(4, 150, corner.shape)], 1).astype(
        np.float32
    )
    labels = random.integers(1, len(CLASSES), len(boxes))
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1) * random.uniform(0.3, 1, len(boxes)).astype(
        np.float32
    )
    source = Annotated(
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
    detections = []
    for index in range(21):
        true = boxes[offsets[index] : offsets[index + 1]]
        near = true + random.normal(0, 4, true.shape)
        corner = random.uniform(0, 200, (random.integers(0, 130), 2))
        wrong = np.concatenate([corner, corner + random.uniform(4, 150, corner.shape)], 1)
        guesses = np.concatenate([near, wrong]).astype(np.float32)
        right = labels[offsets[index] : offsets[index + 1]]
        detections.append(
            {
                "boxes": torch.from_numpy(guesses),
                "scores": torch.from_numpy(
                    np.round(random.random(len(guesses)), 1).astype(np.float32)
                ),
                "labels": torch.from_numpy(
                    np.concatenate([right, random.integers(0, len(CLASSES), len(wrong))])
                ),
            }
        )
    return source, detections


def evaluate_with_pycocotools(
    content: dict, detections: list[dict], kind: str = "bbox", max_detections: int = 100
):
    """pycocotools' evaluation of `content`, a file of annotations: `stats`, and matches in `evalImgs`."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = content
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(detections), kind)
        evaluation.params.maxDets = [1, 10, max_detections]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def convert_boxes_to_coco(ids: np.ndarray, images: np.ndarray, rows: np.ndarray) -> list[dict]:
    """Detections (left, top, right, bottom, score, class) of `images` with these `ids` in COCO's form."""
    return [
        {
            "image_id": image,
            "bbox": [row[0], row[1], row[2] - row[0], row[3] - row[1]],
            "score": row[4],
            "category_id": int(row[5]) + 1,
        }
        for image, row in zip(ids[images].tolist(), rows.astype(float).tolist(), strict=True)
    ]


def get_hits(evaluation, count: int) -> np.ndarray:
    """int64[count]: the object that each detection shows at IoU 0.5, as `Matches.hit_objects`."""
    hits = np.full(count, NO_OBJECT)
    for part in filter(None, evaluation.evalImgs):
        if part["aRng"] == evaluation.params.areaRng[0]:
            for number, annotated, ignored in zip(
                part["dtIds"], part["dtMatches"][0], part["dtIgnore"][0], strict=True
            ):
                if annotated:
                    hits[number - 1] = IN_CROWD if ignored else annotated - 1
    return hits
