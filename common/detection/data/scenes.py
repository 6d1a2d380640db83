"""Synthetic scenes of scikit-learn's handwritten digits, to detect them in."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from common.data.cache import Cache
from common.data.decoding import Picture
from common.data.digits import Digits, load_digits
from common.data.source import hash_source
from common.detection.data.annotated import Annotated, Sample, build_empty_columns
from common.detection.data.masks import encode_masks
from common.randomness import key_of

SIDE = 128  # of the square canvas, in pixels
_MIN_HEIGHT = 12  # of a digit, in pixels
_MAX_HEIGHT = 56
_MAX_DIGITS = 8  # in a scene
_NUM_TRIES = 16  # positions that are tried for a digit, until it covers no other
_MIN_INK = 80  # of 255: fainter pixels do not belong to a digit
_MAX_OVERLAP = 0.1  # of the smaller of two boxes
_EPOCH_SIZE = 1_024
_NUM_VAL_SCENES = 256
_VERSION = "1"  # part of the fingerprint: to be raised when scenes change


class Scene(NamedTuple):
    """An image of n digits."""

    image: np.ndarray  # uint8[128, 128, 3]
    boxes: np.ndarray  # float32[n, 4] left, top, right, bottom around the ink
    labels: np.ndarray  # int64[n]
    masks: np.ndarray  # uint8[n, 128, 128]: 1 on the ink


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

    def draw_scene(self, position: int) -> Scene:
        random = np.random.Generator(
            np.random.Philox(key=np.array([self.key, position], np.uint64))
        )
        canvas = _draw_background(random)
        boxes: list[np.ndarray] = []
        labels = []
        masks = []
        for _ in range(random.integers(1, _MAX_DIGITS + 1)):
            digit = int(random.integers(len(self.digits)))
            size = self._draw_size(digit, random)
            colour = random.integers(130, 225, 3).astype(np.float32)
            corners = random.integers(0, SIDE - size + 1, (_NUM_TRIES, 2))
            box = _find_free(np.concatenate([corners, corners + size], axis=1), boxes)
            if box is None:
                continue
            mask = self._draw_digit(canvas, digit, box, colour)
            boxes.append(box)
            labels.append(self.digits[digit])
            masks.append(mask)
        noise = np.frombuffer(random.bytes(canvas.size), np.uint8).reshape(canvas.shape)
        image = canvas.astype(np.uint8) + (noise & 31)
        return Scene(image, np.array(boxes, np.float32), np.array(labels), np.stack(masks))

    def _draw_size(self, digit: int, random: np.random.Generator) -> np.ndarray:
        """int64[2]: a random width and height of the ink of a digit."""
        left, top, right, bottom = self.ink[digit].tolist()
        height = _MIN_HEIGHT * (_MAX_HEIGHT / _MIN_HEIGHT) ** random.random()
        width = height * (right - left) / (bottom - top) * random.uniform(0.85, 1.2)
        return np.array([min(max(round(width), 4), SIDE), round(height)])

    def _draw_digit(
        self, canvas: np.ndarray, digit: int, box: np.ndarray, colour: np.ndarray
    ) -> np.ndarray:
        """Draw a digit into its box, in place; returns its mask uint8[128, 128]."""
        left, top, right, bottom = box.tolist()
        ink = tuple(self.ink[digit].tolist())
        image = Image.fromarray(self.pixels[digit])
        image = image.resize((right - left, bottom - top), Image.Resampling.BILINEAR, ink)
        opacity = np.asarray(image)[..., None] / np.float32(255)
        region = canvas[top:bottom, left:right]
        region += opacity * (colour - region)
        mask = np.zeros(canvas.shape[:2], np.uint8)
        mask[top:bottom, left:right] = opacity[..., 0] > _MIN_INK / 255
        return mask

    def load_sample(self, index: int, position: int, cache: Cache | None = None) -> Sample:
        scene = self.draw_scene(position if self.fresh else index)
        return Sample(
            image=Picture(torch.from_numpy(scene.image).permute(2, 0, 1)),
            boxes=scene.boxes,
            labels=scene.labels,
            crowd=np.zeros(len(scene.labels), bool),
            masks=scene.masks if self.has_masks else None,
            size=np.array([SIDE, SIDE]),
        )

    def load_objects(self, index: int) -> Sample:
        return self.load_sample(index, index)

    def build_rles(self, index: int) -> list[dict]:
        return encode_masks(self.draw_scene(index).masks)

    def get_name(self, index: int) -> str:
        return f"scene[{index}]"

    def get_content(self, index: int) -> Image.Image:
        return Image.fromarray(self.draw_scene(index).image)

    @cached_property
    def fingerprint(self) -> str:
        kind = (_VERSION, "fresh", "") if self.fresh else (_VERSION, "fixed", str(len(self)))
        return hash_source(self.classes + kind, self.digits, self.pixels)


def load(seed: int, masks: bool = False) -> tuple[Scenes, Scenes]:
    """New scenes to train on; fixed ones of the held-out fifth of the digits, the same for every seed."""
    train_digits, val_digits = load_digits()
    train = _build_scenes(
        train_digits,
        num_scenes=_EPOCH_SIZE,
        split_text="fresh scenes",
        key=key_of(seed, "scenes"),
        fresh=True,
        masks=masks,
    )
    val = _build_scenes(
        val_digits,
        num_scenes=_NUM_VAL_SCENES,
        split_text="fixed scenes of held-out digits",
        key=key_of("validation scenes"),
        fresh=False,
        masks=masks,
    )
    scenes = [val.draw_scene(index) for index in range(_NUM_VAL_SCENES)]
    boxes = np.concatenate([scene.boxes for scene in scenes])
    labels = np.concatenate([scene.labels for scene in scenes])
    box_counts = [len(scene.boxes) for scene in scenes]
    val = replace(
        val,
        offsets=np.cumsum([0] + box_counts),
        boxes=boxes,
        labels=labels,
        crowd=np.zeros(len(boxes), bool),
        areas=(boxes[:, 2:] - boxes[:, :2]).prod(1),
    )
    return train, val


def _build_scenes(
    digits: Digits, num_scenes: int, split_text: str, key: int, fresh: bool, masks: bool
) -> Scenes:
    images = [Image.fromarray(np.where(image > _MIN_INK, image, 0)) for image in digits.pixels]
    return Scenes(
        **build_empty_columns(digits.classes, np.full((num_scenes, 2), SIDE)),
        pixels=digits.pixels,
        ink=np.array([image.getbbox() for image in images]),
        digits=digits.labels,
        key=key,
        fresh=fresh,
        split_text=split_text,
        draws_masks=masks,
    )


def _draw_background(random: np.random.Generator) -> np.ndarray:
    """float32[128, 128, 3]: dark clouds, 0..110. With digits below 225, noise up to 31 fits into 8 bits."""
    clouds = Image.fromarray(random.integers(0, 111, (5, 5, 3), np.uint8))
    return np.asarray(clouds.resize((SIDE, SIDE), Image.Resampling.BILINEAR)).astype(np.float32)


def _find_free(candidates: np.ndarray, boxes: list[np.ndarray]) -> np.ndarray | None:
    """The first of int64[n, 4] that overlaps no box by more than `_MAX_OVERLAP` of the smaller of both.

    All candidates are of the same size. None if there is no such one.
    """
    if not boxes:
        return candidates[0]
    drawn = np.stack(boxes)
    low = np.maximum(candidates[:, None, :2], drawn[None, :, :2])
    high = np.minimum(candidates[:, None, 2:], drawn[None, :, 2:])
    shared_area = (high - low).clip(0).prod(2)  # [n, boxes]
    area = (candidates[0, 2:] - candidates[0, :2]).prod()
    drawn_areas = (drawn[:, 2:] - drawn[:, :2]).prod(1)
    is_free = (shared_area <= _MAX_OVERLAP * np.minimum(area, drawn_areas)).all(1)
    if not is_free.any():
        return None
    return candidates[is_free.argmax()]
