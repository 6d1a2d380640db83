"""Synthetic scenes of scikit-learn's handwritten digits, to detect them in."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from PIL import Image

from common.data.cache import Cache
from common.data.decoding import Picture
from common.data.digits import Digits, load_digits
from common.data.source import hash_source
from common.detection.data.annotated import Annotated, Sample, no_boxes
from common.detection.data.masks import encode
from common.randomness import key_of

SIDE = 128  # of the square canvas, in pixels
_HEIGHTS = (12, 56)  # smallest and largest digit, in pixels
_MOST = 8  # digits in a scene
_TRIES = 16  # places tried for a digit, until it covers no other
_INK = 80  # of 255: fainter pixels are no part of a digit
_OVERLAP = 0.1  # of the smaller of two boxes
_NOMINAL_EPOCH = 1_024
_VALIDATION = 256
_RECIPE = "1"  # part of the fingerprint: to be raised when scenes change


@dataclass(frozen=True, eq=False, kw_only=True)
class Scenes(Annotated):
    """Scenes of one to eight digits on a noisy background: pure functions of (key, position).

    In training, each position is a new scene, and no column has a box. In evaluation there is a list.
    """

    pixels: np.ndarray  # uint8[digits, 32, 32], ink on 0
    ink: np.ndarray  # int64[digits, 4] left, top, right, bottom of the pixels drawn
    digits: np.ndarray  # int64[digits] which digit it is
    key: int
    fresh: bool
    draws_masks: bool
    has_masks = property(lambda self: self.draws_masks)

    def scene(self, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """uint8[128, 128, 3], boxes float32[n, 4] left, top, right, bottom around the ink, labels
        int64[n], and masks of the ink uint8[n, 128, 128].
        """
        random = np.random.Generator(
            np.random.Philox(key=np.array([self.key, position], np.uint64))
        )
        canvas = _background(random)
        boxes: list[np.ndarray] = []
        labels, masks = [], []
        for _ in range(random.integers(1, _MOST + 1)):
            which = int(random.integers(len(self.digits)))
            left, top, right, bottom = ink = self.ink[which].tolist()
            height = _HEIGHTS[0] * (_HEIGHTS[1] / _HEIGHTS[0]) ** random.random()
            width = height * (right - left) / (bottom - top) * random.uniform(0.85, 1.2)
            size = np.array([min(max(round(width), 4), SIDE), round(height)])
            colour = random.integers(130, 225, 3).astype(np.float32)
            places = random.integers(0, SIDE - size + 1, (_TRIES, 2))
            box = _first_free(np.concatenate([places, places + size], axis=1), boxes)
            if box is None:
                continue
            digit = Image.fromarray(self.pixels[which]).resize(
                tuple(size.tolist()), Image.Resampling.BILINEAR, ink
            )
            opacity = np.asarray(digit)[..., None] / np.float32(255)
            inside = slice(box[1], box[3]), slice(box[0], box[2])
            canvas[inside] += opacity * (colour - canvas[inside])
            masks.append(np.zeros(canvas.shape[:2], np.uint8))
            masks[-1][inside] = opacity[..., 0] > _INK / 255
            boxes.append(box)
            labels.append(self.digits[which])
        noise = np.frombuffer(random.bytes(canvas.size), np.uint8).reshape(canvas.shape)
        image = canvas.astype(np.uint8) + (noise & 31)
        return image, np.array(boxes, np.float32), np.array(labels), np.stack(masks)

    def sample(self, index: int, position: int, cache: Cache | None = None) -> Sample:
        image, boxes, labels, masks = self.scene(position if self.fresh else index)
        picture = Picture(torch.from_numpy(image).permute(2, 0, 1))
        none, size = np.zeros(len(labels), bool), np.array([SIDE, SIDE])
        return Sample(picture, boxes, labels, none, masks if self.has_masks else None, size)

    def rles(self, index: int) -> list[dict]:
        return encode(self.scene(index)[3])

    def name(self, index: int) -> str:
        return f"scene[{index}]"

    def content(self, index: int) -> Image.Image:
        return Image.fromarray(self.scene(index)[0])

    @cached_property
    def fingerprint(self) -> str:
        kind = (_RECIPE, "fresh", "") if self.fresh else (_RECIPE, "fixed", str(len(self)))
        return hash_source(self.classes + kind, self.digits, self.pixels)


def load(seed: int, masks: bool = False) -> tuple[Scenes, Scenes]:
    """New scenes to train on; fixed ones of the held-out fifth of the digits, the same for every seed."""
    of_train, of_val = load_digits()
    train = _scenes(of_train, _NOMINAL_EPOCH, "fresh scenes", key_of(seed, "scenes"), True, masks)
    val = _scenes(
        of_val,
        _VALIDATION,
        "fixed scenes of held-out digits",
        key_of("validation scenes"),
        False,
        masks,
    )
    of_scenes = [val.scene(number)[1:3] for number in range(_VALIDATION)]
    boxes, labels = (np.concatenate(column) for column in zip(*of_scenes, strict=True))
    offsets, areas = (
        np.cumsum([0, *(len(each) for each, _ in of_scenes)]),
        (boxes[:, 2:] - boxes[:, :2]).prod(1),
    )
    crowd = np.zeros(len(boxes), bool)
    return train, replace(
        val, offsets=offsets, boxes=boxes, labels=labels, crowd=crowd, areas=areas
    )


def _scenes(digits: Digits, count: int, part: str, key: int, fresh: bool, masks: bool) -> Scenes:
    drawn = [Image.fromarray(np.where(image > _INK, image, 0)) for image in digits.pixels]
    return Scenes(
        **no_boxes(digits.classes, np.full((count, 2), SIDE)),
        pixels=digits.pixels,
        ink=np.array([image.getbbox() for image in drawn]),
        digits=digits.labels,
        key=key,
        fresh=fresh,
        part=part,
        draws_masks=masks,
    )


def _background(random: np.random.Generator) -> np.ndarray:
    """float32[128, 128, 3]: dark clouds, 0..110. With digits below 225, noise up to 31 fits into 8 bits."""
    clouds = Image.fromarray(random.integers(0, 111, (5, 5, 3), np.uint8))
    return np.asarray(clouds.resize((SIDE, SIDE), Image.Resampling.BILINEAR)).astype(np.float32)


def _first_free(candidates: np.ndarray, boxes: list[np.ndarray]) -> np.ndarray | None:
    """The first of int64[n, 4] that overlaps no box by more than `_OVERLAP` of the smaller of both."""
    if not boxes:
        return candidates[0]
    others = np.stack(boxes)
    low = np.maximum(candidates[:, None, :2], others[None, :, :2])
    high = np.minimum(candidates[:, None, 2:], others[None, :, 2:])
    shared = (high - low).clip(0).prod(2)  # [n, boxes]
    smaller = np.minimum(
        (candidates[0, 2:] - candidates[0, :2]).prod(), (others[:, 2:] - others[:, :2]).prod(1)
    )
    free = (shared <= _OVERLAP * smaller).all(1)
    return candidates[free.argmax()] if free.any() else None
