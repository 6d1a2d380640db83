"""Detections in mirror images and at other sizes lie where they are in the original, and each object stays once."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from common.detection.batches import EvaluationScenes, blank_padding
from common.detection.data.annotated import Annotated
from common.detection.transforms import BoxAugmentation
from common.detection.views import Views
from common.errors import Refused
from tests.harness.detections import columns

PLAIN = BoxAugmentation(0, (48,), 96)
SIZES = ((64, 48), (48, 48), (90, 60), (48, 70))  # width, height


class Painted(Annotated):
    """One image of each of `SIZES`, of noise, in which a bright box has a brighter left half."""

    def __init__(self):
        random = np.random.default_rng(0)
        self.pixels, boxes = [], []
        for width, height in SIZES:
            image = random.integers(0, 100, (height, width, 3), dtype=np.uint8)
            left, top = random.integers(2, 12, 2)
            image[top : top + 20, left : left + 24] = 180
            image[top : top + 20, left : left + 12] = 250
            boxes.append((left, top, left + 24, top + 20))
            self.pixels.append(image)
        super().__init__(**columns([[(box, 0)] for box in boxes], SIZES, ("box",)))

    def content(self, index):
        return Image.fromarray(self.pixels[index])

    def name(self, index):
        return str(index)


class Bright(torch.nn.Module):
    """Finds the bright pixels: one box, with a mask of the brighter ones; best in mirror images."""

    def detect(self, images, sizes):
        found = []
        for image in images[:, 0]:
            rows, columns = (image > 0.6).nonzero(as_tuple=True)
            left, top, right, bottom = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            part = image[None, None, top:bottom, left:right]
            mask = (torch.nn.functional.interpolate(part, (28, 28), mode="bilinear") > 0.85).double()[0]
            box = torch.stack([left, top, right, bottom]).double()[None]
            scores = 0.5 + mask[0, 8:20, -6].mean()[None] / 4
            labels = torch.zeros(1).long()
            found.append({"boxes": box, "scores": scores, "labels": labels, "masks": mask})
        return found


def found_by(detector, source, views: Views) -> dict[int, dict]:
    """What `recipes.det.predict` yields, by image; batches travel as from a data worker."""
    scenes, found = EvaluationScenes(source, PLAIN, 16, (0, 0, 0), views), {}
    for indices in scenes.batches(3):
        batch = pickle.loads(pickle.dumps(scenes.__getitems__(indices))).to("cpu")
        normalised = [blank_padding(view.images.double() / 255, view.sizes) for view in batch.views]
        seen = [detector.detect(images, view.sizes) for images, view in zip(normalised, batch.views, strict=True)]
        found |= dict(zip(indices.tolist(), scenes.merged(seen, batch), strict=True))
    assert sorted(found) == list(range(len(source)))
    return found


def sized(*sides: int) -> tuple[BoxAugmentation, ...]:
    return tuple(BoxAugmentation(0, (side,), 2 * side) for side in sides)


def test_what_is_symmetric_is_found_where_it_is_and_once() -> None:
    source = Painted()
    alone = found_by(Bright(), source, Views((PLAIN,)))
    mirrored = found_by(Bright(), source, Views((PLAIN,), flip=True))
    several = found_by(Bright(), source, Views(sized(48, 64, 96, 40), flip=True))
    for index in range(len(source)):
        for found in (alone, mirrored, several):
            assert len(found[index]["boxes"]) == len(found[index]["rles"]) == 1
        assert torch.equal(mirrored[index]["boxes"], alone[index]["boxes"])
        assert mirrored[index]["rles"] == alone[index]["rles"]
        true = torch.from_numpy(source.boxes[index])[None]
        assert several[index]["boxes"].sub(true).abs().max() < 2.5  # of a pixel of the smallest view


def test_of_boxes_that_overlap_the_best_of_each_class_stays() -> None:
    box, near, far = [0.0, 0, 10, 10], [1.0, 0, 11, 10], [30.0, 0, 40, 10]

    def part(rows):
        boxes, scores, labels = zip(*rows, strict=True)
        return {"boxes": torch.tensor(boxes), "scores": torch.tensor(scores), "labels": torch.tensor(labels)}

    parts = [part([(box, 0.5, 0), (far, 0.2, 0)]), part([(near, 0.9, 0), (near, 0.4, 1)])]
    merged = Views((PLAIN,), True, 0.7, limit=3).merged(parts)
    assert merged["boxes"].tolist() == [near, near, far]
    assert (merged["labels"].tolist(), merged["scores"].tolist()) == ([0, 1, 0], pytest.approx([0.9, 0.4, 0.2]))
    assert len(Views((PLAIN,), True, 0.9).merged(parts)["boxes"]) == 4
    assert len(Views((PLAIN,), True, 0.9, limit=2).merged(parts)["boxes"]) == 2


def test_sizes_and_thresholds_are_those_that_were_asked_for() -> None:
    config = SimpleNamespace(eval_sizes="", eval_flip=False, detector="rtdetr_v2")
    own, plain = SimpleNamespace(nms_threshold=0.6, limit=300, stride=32), BoxAugmentation(0, (480,), 800)
    assert Views.of(config, plain, own) == Views((plain,), False, 0.6, 300)
    config.eval_sizes = "480,640"
    views = Views.of(config, plain, own)
    assert [(one.short_sides, one.long_side) for one in views.augmentations] == [((480,), 800), ((640,), 1067)]
    config.eval_sizes, square = "640,650", BoxAugmentation(0, (640,), 800, square=True)
    with pytest.raises(
        Refused, match=r"--eval_sizes 640,650: a square of 650 pixels is no multiple of 32, .* take 672"
    ):
        Views.of(config, square, SimpleNamespace(stride=32))
