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
    ceil_div,
    clip_boxes_to_image,
    concat_annotations,
    create_canvas,
    crop,
    empty_sample,
    hflip,
    pad,
    remove_empty_masks,
)
from common.errors import Refused
from common.randomness import key_of, mix, sample_uniform, seed_generators

MIN_SIDE = 1.0  # pixels: a box that gets smaller than this on a side is left out
# Share of a box: an object that is cut to less than this is left out; a crowd region is not.
_MIN_VISIBLE = 0.1
_MAX_ZOOM_OUT = 4.0  # largest side of the canvas, as a multiple of the image's side


@dataclass(frozen=True)
class BoxAugmentation:
    """Augmentation of training images: a pure function of (seed, position).

    The result is never larger than `compute_sizes` says, which needs no decoding.

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

    def compute_scales(self, positions: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """float64[n, 2]: factors of the sides of whole images with `sizes` int[n, 2] (width, height)."""
        short_sides = np.array(self.short_sides)
        if len(short_sides) > 1:
            draws = sample_uniform(positions // self.alike, key_of(self.seed, "short side"))
            short_sides = short_sides[(draws * len(short_sides)).astype(int)]
        if self.square:
            return short_sides.reshape(-1, 1) / sizes
        scales = np.minimum(short_sides / sizes.min(1), self.long_side / sizes.max(1))
        return np.repeat(scales[:, None], 2, axis=1)

    def compute_sizes(self, positions: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """int64[n, 2]: largest width and height that a call returns for images of `sizes` at `positions`."""
        return _round_sizes(sizes * self.compute_scales(positions, sizes))

    def draw_partners(self, position: int) -> np.ndarray:
        """uint64[n]: a random number for each partner of `position`: 3 for a mosaic, 1 for MixUp."""
        num_partners = 0
        if self._should_mix("mosaic", position):
            num_partners += 3
        if self._should_mix("mixup", position):
            num_partners += 1
        return mix(np.arange(num_partners), key_of(self.seed, "partners", position))

    def __call__(self, samples: list[Sample], position: int, fill: tuple[int, int, int]) -> Sample:
        """Make one sample of tensors from those of a position and its partners.

        `fill` is the colour around the images.
        """
        if self._should_mix("mosaic", position):
            result = self._make_mosaic(samples[:4], position, fill)
        else:
            result = self._augment_image(samples[0], position, number=0, fill=fill)
        if self._should_mix("mixup", position):
            height, width = result.image.shape[1:]
            max_size = np.array([width, height])
            partner = self._augment_image(
                samples[-1], position, number=4, fill=fill, max_size=max_size
            )
            partner = pad(partner, 0, 0, width, height, fill)
            image = ((result.image.short() + partner.image.short()) // 2).to(torch.uint8)
            result = concat_annotations(image, [result, partner])
        return remove_empty_masks(clip_boxes_to_image(result))

    def _augment_image(
        self,
        sample: Sample,
        position: int,
        number: int,
        fill: tuple[int, int, int],
        max_size: np.ndarray | None = None,
    ) -> Sample:
        """One image, a region of it, or it on a larger canvas; at most `max_size` int[2]."""
        size = sample.size
        full_size = size * self.compute_scales(np.array([position]), size[None])[0]
        if max_size is None:
            max_size = _round_sizes(full_size)
        else:
            max_size = np.minimum(max_size, _round_sizes(full_size))
        self._seed(position, number)
        view = np.concatenate([np.zeros(2, int), size])
        is_visible = np.ones(len(sample.boxes), bool)
        if self._should_apply(self.zoom_out, position):
            zoom_out = 1 + (_MAX_ZOOM_OUT - 1) * np.random.random()
            canvas_size = (size * zoom_out).astype(int)
            corner = -_draw_corner(canvas_size - size)
            view = np.concatenate([corner, corner + canvas_size])
        if self._should_apply(self.iou_crop, position):
            view, is_visible = _draw_iou_crop(sample, view)
        scale = full_size / (view[2:] - view[:2])
        if not self.square:
            scale = scale.min().repeat(2)
        view = _draw_view(view, max_size, scale)
        return self._render(sample, view, max_size, scale, position, fill, is_visible)

    def _make_mosaic(
        self, samples: list[Sample], position: int, fill: tuple[int, int, int]
    ) -> Sample:
        """Four images around a point, each cut to its corner, at 0.5 to 1 times its own scale."""
        positions = np.array([position])
        width, height = self.compute_sizes(positions, samples[0].size[None])[0].tolist()
        self._seed(position, "mosaic")
        centre = np.array([width, height]) * np.random.uniform(0.25, 0.75, 2)
        x, y = centre.astype(int).tolist()
        mosaic = create_canvas(width, height, fill)
        tiles = []
        for number, sample in enumerate(samples):
            is_right = number % 2 == 1
            is_below = number // 2 == 1
            max_size = np.array([width - x if is_right else x, height - y if is_below else y])
            if not max_size.all():  # an image of one pixel does not have four corners
                continue
            self._seed(position, number)
            scale = self.compute_scales(positions, sample.size[None])[0]
            scale = scale * np.random.uniform(0.5, 1)
            view = np.concatenate([np.zeros(2, int), sample.size])
            view = _draw_view(view, max_size, scale)
            tile = self._render(sample, view, max_size, scale, position, fill)
            tile_height, tile_width = tile.image.shape[1:]
            left = x if is_right else x - tile_width
            top = y if is_below else y - tile_height
            mosaic[:, top : top + tile_height, left : left + tile_width] = tile.image
            tiles.append(pad(tile, left, top, width, height, fill))
        return concat_annotations(mosaic, tiles)

    def _render(
        self,
        sample: Sample,
        view: np.ndarray,
        max_size: np.ndarray,
        scale: np.ndarray,
        position: int,
        fill: tuple[int, int, int],
        is_visible: np.ndarray | bool = True,
    ) -> Sample:
        """What `view` int[4] shows, resized, distorted in its colours, padded and mirrored.

        The view may exceed the image. `is_visible` bool[n] says which objects may stay.
        """
        view_size = view[2:] - view[:2]
        out_size = np.minimum(_round_sizes(view_size * scale), max_size)
        width, height = out_size.tolist()
        region = view.clip(0, sample.size[FIRST])  # of the image
        region_size = region[2:] - region[:2]
        if region_size.min() < 1:  # the view lies outside the image
            return empty_sample(width, height, fill, has_masks=sample.masks is not None)
        edges = np.rint((region.reshape(2, 2) - view[:2]) * out_size / view_size).astype(int)
        start = np.minimum(edges[0], out_size - 1)
        end = np.maximum(edges[1], start + 1).clip(max=out_size)
        shown_size = end - start

        indices = _choose_objects(sample, region, shown_size / region_size, is_visible)
        result = crop(sample, region, tuple(shown_size[::-1].tolist()), indices)
        if self._is_strong(position) and self.photometric:
            result = result._replace(image=self._distort_colours(result.image))
        left, top = start.tolist()
        result = pad(result, left, top, width, height, fill)
        if np.random.random() < self.hflip:
            result = hflip(result)
        return result

    def _distort_colours(self, image: torch.Tensor) -> torch.Tensor:
        # Pillow stays in 8 bits, in 0.6 of the time.
        pil_image = Image.fromarray(image.permute(1, 2, 0).numpy())
        return pil_to_tensor(v2.RandomPhotometricDistort(p=self.photometric)(pil_image))

    # ---- draws

    def _should_mix(self, name: str, position: int) -> bool:
        """True if `position` is a mosaic or a MixUp: a pure function, unlike `_should_apply`."""
        probability = getattr(self, name)
        if not probability or not self._is_strong(position):
            return False
        draw = sample_uniform(np.array([position]), key_of(self.seed, name))[0]
        return bool(draw < probability)

    def _should_apply(self, probability: float, position: int) -> bool:
        """Draw from NumPy's generator, also where strong augmentation has ended."""
        is_drawn = np.random.random() < probability
        return is_drawn and self._is_strong(position)

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
        next_side = ceil_div(uneven[0], stride) * stride
        raise Refused(
            f"--short_sides, --eval_short_side: a square of {uneven[0]} pixels is no multiple of "
            f"{stride}, as --detector {config.detector} needs; take {next_side}"
        )
    return short_sides, eval_side


def _round_sizes(sizes: np.ndarray) -> np.ndarray:
    return np.maximum(1, np.rint(sizes)).astype(np.int64)


def _draw_corner(space: np.ndarray) -> np.ndarray:
    """int[2]: a random corner in 0 to `space` int[2], both included."""
    return np.floor(np.random.random(2) * (space + 1)).astype(int)


def _draw_view(view: np.ndarray, max_size: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The largest part of a view that fits into `max_size` at this scale, at a random position in it."""
    size = view[2:] - view[:2]
    part_size = np.minimum(size, np.ceil(max_size / scale - 1e-6)).clip(min=1).astype(int)
    # Rounding down cuts nothing off.
    part_size = np.where(_round_sizes(size * scale) <= max_size, size, part_size)
    corner = view[:2] + _draw_corner(size - part_size)
    return np.concatenate([corner, corner + part_size])


def _choose_objects(
    sample: Sample, region: np.ndarray, scale: np.ndarray, is_visible: np.ndarray | bool
) -> np.ndarray:
    """int64[m]: the objects that are large enough in `region` int[4] once it is resized by `scale`."""
    clipped = sample.boxes.clip(region[FIRST], region[LAST])
    clipped_sides = clipped[:, 2:] - clipped[:, :2]
    full_sides = sample.boxes[:, 2:] - sample.boxes[:, :2]
    visible_share = clipped_sides.prod(1) / full_sides.prod(1).clip(min=1e-9)
    is_large = (clipped_sides * scale >= MIN_SIDE).all(1)
    is_object = sample.crowd | is_visible & (visible_share >= _MIN_VISIBLE)
    return np.flatnonzero(is_large & is_object)


def _draw_iou_crop(sample: Sample, view: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A part of the view, as in SSD, and bool[n]: whether the centre of each box lies in it."""
    boxes = sample.boxes[~sample.crowd]
    is_inside = np.ones(len(sample.boxes), bool)
    width, height = (view[2:] - view[:2]).tolist()
    if not len(boxes) or min(width, height) < 4:  # it would search for long, or divide by 0
        return view, is_inside
    tv_boxes = tv_tensors.BoundingBoxes(
        boxes - view[FIRST], format="XYXY", canvas_size=(height, width)
    )
    params = v2.RandomIoUCrop().make_params([tv_boxes])
    if not params:  # one of its choices is the whole view
        return view, is_inside
    is_inside[~sample.crowd] = params["is_within_crop_area"].numpy()
    corner = view[:2] + [params["left"], params["top"]]
    size = [params["width"], params["height"]]
    return np.concatenate([corner, corner + size]), is_inside
