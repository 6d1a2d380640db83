"""Augmentation and resizing of images with boxes; an image's size is known before it is decoded."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from common.config.fields import split_integers
from common.data.decoding import pil_to_tensor
from common.detection.data.annotated import Sample
from common.detection.samples import (
    FIRST,
    LAST,
    blank,
    crop,
    finished,
    joined,
    mirrored,
    nothing,
    padded,
)
from common.errors import Refused
from common.randomness import key_of, mix, seed_generators, uniforms

SMALLEST = 1.0  # pixels: a box that gets smaller than this on a side is left out
_VISIBLE = 0.1  # share of a box: an object cut to less than this is left out; a crowd region is not
_WIDEST = 4.0  # zoom-out: largest side of the canvas, as a multiple of the image's side


@dataclass(frozen=True)
class BoxAugmentation:
    """Augmentation of training images: a pure function of (seed, position).

    The result is never larger than `sizes`, which needs no decoding.

    Sources: Liu et al. 2016, SSD (zoom-out, IoU crop, photometric); Ge et al. 2021, YOLOX (mosaic,
    then MixUp in equal parts, both without weights in the loss).
    """

    seed: int
    short_sides: tuple[int, ...]  # lengths of the shorter side; one is drawn for each position
    long_side: int  # largest length of the longer side
    hflip: float = 0.0  # from here on probabilities
    photometric: float = 0.0
    iou_crop: float = 0.0
    zoom_out: float = 0.0
    mosaic: float = 0.0
    mixup: float = 0.0
    strong_until: int = 0  # from this position on only short sides and mirroring (0: never)
    square: bool = False  # stretch to a square of the short side; `long_side` is not used
    alike: int = 1  # number of consecutive positions that draw the same short side

    def scales(self, positions: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """float64[n, 2]: factors of the sides of whole images with `sizes` int[n, 2] (width, height)."""
        short = np.array(self.short_sides)
        if len(short) > 1:
            drawn = uniforms(positions // self.alike, key_of(self.seed, "short side"))
            short = short[(drawn * len(short)).astype(int)]
        if self.square:
            return short.reshape(-1, 1) / sizes
        return np.repeat(
            np.minimum(short / sizes.min(1), self.long_side / sizes.max(1))[:, None], 2, axis=1
        )

    def sizes(self, positions: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """int64[n, 2]: largest width and height that `__call__` returns for images of `sizes` at
        `positions`.
        """
        return _rounded(sizes * self.scales(positions, sizes))

    def partners(self, position: int) -> np.ndarray:
        """uint64[n]: a random number for each partner of `position`: 3 for a mosaic, 1 for MixUp."""
        count = 3 * self._happens("mosaic", position) + self._happens("mixup", position)
        return mix(np.arange(count), key_of(self.seed, "partners", position))

    def __call__(self, samples: list[Sample], position: int, fill: tuple[int, int, int]) -> Sample:
        """The samples of a position and its partners -> one of tensors; `fill` is around the images."""
        if self._happens("mosaic", position):
            result = self._mosaic(samples[:4], position, fill)
        else:
            result = self._alone(samples[0], position, 0, fill)
        if self._happens("mixup", position):
            height, width = result.image.shape[1:]
            other = self._alone(samples[-1], position, 4, fill, np.array([width, height]))
            other = padded(other, 0, 0, width, height, fill)
            half = ((result.image.short() + other.image.short()) // 2).to(torch.uint8)
            result = joined(half, [result, other])
        return finished(result)

    def _alone(
        self,
        sample: Sample,
        position: int,
        number: int,
        fill: tuple[int, int, int],
        limit: np.ndarray | None = None,
    ) -> Sample:
        """One image, a part of it, or it on a larger canvas; at most `limit` int[2] in size."""
        size = sample.size
        room = size * self.scales(np.array([position]), size[None])[0]  # size of the whole image
        limit = _rounded(room) if limit is None else np.minimum(limit, _rounded(room))
        self._seed(position, number)
        view, kept = np.concatenate([np.zeros(2, int), size]), np.ones(len(sample.boxes), bool)
        if self._strikes(self.zoom_out, position):
            canvas = (size * (1 + (_WIDEST - 1) * np.random.random())).astype(int)
            corner = -_corner(canvas - size)
            view = np.concatenate([corner, corner + canvas])
        if self._strikes(self.iou_crop, position):
            view, kept = _iou_crop(sample, view)
        scale = room / (view[2:] - view[:2])
        scale = scale if self.square else scale.min().repeat(2)
        return self._shown(sample, _part(view, limit, scale), limit, scale, position, fill, kept)

    def _mosaic(self, samples: list[Sample], position: int, fill: tuple[int, int, int]) -> Sample:
        """Four images around a point, each cut to its corner, at 0.5 to 1 times its own scale."""
        where = np.array([position])
        width, height = self.sizes(where, samples[0].size[None])[0].tolist()
        self._seed(position, "mosaic")
        x, y = (np.array([width, height]) * np.random.uniform(0.25, 0.75, 2)).astype(int).tolist()
        image, parts = blank(width, height, fill), []
        for number, sample in enumerate(samples):
            right, below = number % 2, number // 2
            limit = np.array([width - x if right else x, height - y if below else y])
            if not limit.all():  # an image of one pixel does not have four corners
                continue
            self._seed(position, number)
            scale = self.scales(where, sample.size[None])[0] * np.random.uniform(0.5, 1)
            view = _part(np.concatenate([np.zeros(2, int), sample.size]), limit, scale)
            part = self._shown(sample, view, limit, scale, position, fill)
            h, w = part.image.shape[1:]
            left, top = x if right else x - w, y if below else y - h
            image[:, top : top + h, left : left + w] = part.image
            parts.append(padded(part, left, top, width, height, fill))
        return joined(image, parts)

    def _shown(
        self,
        sample: Sample,
        view: np.ndarray,
        limit: np.ndarray,
        scale: np.ndarray,
        position: int,
        fill,
        kept=True,
    ) -> Sample:
        """The part in `view` (corners; may exceed the image), resized, mirrored, coloured."""
        out = np.minimum(_rounded((view[2:] - view[:2]) * scale), limit)
        width, height = out.tolist()
        inside = view.clip(0, sample.size[FIRST])
        low, high = np.rint((inside.reshape(2, 2) - view[:2]) * out / (view[2:] - view[:2])).astype(
            int
        )
        low, high = np.minimum(low, out - 1), np.maximum(high, low + 1).clip(max=out)
        span = inside[2:] - inside[:2]
        if span.min() < 1:  # the view lies outside the image
            return nothing(width, height, fill, sample.masks is not None)

        cut = sample.boxes.clip(inside[FIRST], inside[LAST])
        sides, whole = (boxes[:, 2:] - boxes[:, :2] for boxes in (cut, sample.boxes))
        share = sides.prod(1) / whole.prod(1).clip(min=1e-9)
        seen = (sides * ((high - low) / span) >= SMALLEST).all(1)
        rows = np.flatnonzero(seen & (sample.crowd | kept & (share >= _VISIBLE)))
        shown = crop(sample, inside, tuple((high - low)[::-1].tolist()), rows)
        if self._is_strong(position) and self.photometric:
            # Pillow stays in 8 bits, in 0.6 of the time.
            image = Image.fromarray(shown.image.permute(1, 2, 0).numpy())
            shown = shown._replace(
                image=pil_to_tensor(v2.RandomPhotometricDistort(p=self.photometric)(image))
            )
        left, top = low.tolist()
        shown = padded(shown, left, top, width, height, fill)
        return mirrored(shown) if np.random.random() < self.hflip else shown

    # ---- draws

    def _happens(self, name: str, position: int) -> bool:
        probability = getattr(self, name) if self._is_strong(position) else 0
        return bool(
            probability and uniforms(np.array([position]), key_of(self.seed, name))[0] < probability
        )

    def _strikes(self, probability: float, position: int) -> bool:
        return np.random.random() < probability and self._is_strong(position)

    def _is_strong(self, position: int) -> bool:
        return position < self.strong_until or not self.strong_until

    def _seed(self, position: int, purpose: int | str) -> None:
        seed_generators(key_of(self.seed, "augmentation", position, purpose))


def read_sides(config: Any, stride: int, square: bool) -> tuple[tuple[int, ...], int]:
    """Short sides in training and evaluation; squares' are multiples of `stride`. Raises `Refused`."""
    short_sides = split_integers(config.short_sides, ",")
    if not short_sides or min(short_sides) < 1 or max(short_sides) > 8192:
        raise Refused(
            f"--short_sides {config.short_sides:.100}: must be lengths in pixels joined by "
            "commas, such as 640,672,704, each from 1 to 8192"
        )
    eval_side = config.eval_short_side or max(short_sides)
    uneven = [side for side in (*short_sides, eval_side) if side % stride]
    if square and uneven:
        raise Refused(
            f"--short_sides, --eval_short_side: a square of {uneven[0]} pixels is no multiple of "
            f"{stride}, as --detector {config.detector} needs; take "
            f"{-(-uneven[0] // stride) * stride}"
        )
    return short_sides, eval_side


def _rounded(sizes: np.ndarray) -> np.ndarray:
    return np.maximum(1, np.rint(sizes)).astype(np.int64)


def _corner(free: np.ndarray) -> np.ndarray:
    return np.floor(np.random.random(2) * (free + 1)).astype(int)


def _part(view: np.ndarray, limit: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The largest part of a view that fits into `limit` at these scales, at a random place in it."""
    size = view[2:] - view[:2]
    shown = np.minimum(size, np.ceil(limit / scale - 1e-6)).clip(min=1).astype(int)
    shown = np.where(_rounded(size * scale) <= limit, size, shown)  # rounding down cuts nothing off
    corner = view[:2] + _corner(size - shown)
    return np.concatenate([corner, corner + shown])


def _iou_crop(sample: Sample, view: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A part of the view, as in SSD, and bool[n]: whether the centre of each box lies in it."""
    boxes, everything = sample.boxes[~sample.crowd], np.ones(len(sample.boxes), bool)
    width, height = (view[2:] - view[:2]).tolist()
    if not len(boxes) or min(width, height) < 4:  # it would search for long, or divide by 0
        return view, everything
    canvas = {"format": "XYXY", "canvas_size": (height, width)}
    found = v2.RandomIoUCrop().make_params(
        [tv_tensors.BoundingBoxes(boxes - view[FIRST], **canvas)]
    )
    if not found:  # one of its choices is the whole view
        return view, everything
    corner = view[:2] + [found["left"], found["top"]]
    everything[~sample.crowd] = found["is_within_crop_area"].numpy()
    return np.concatenate([corner, corner + [found["width"], found["height"]]]), everything
