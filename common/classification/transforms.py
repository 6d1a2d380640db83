"""Transforms of single images in data workers: crop, flips and policies, and timm's for evaluation.

Random numbers come from Python's, NumPy's and torch's generators, which the caller seeds for each sample.
"""

import math
import random
import re
from typing import Any

import torch
from PIL import Image, ImageOps

from common.data.decoding import Picture, pil_to_tensor
from common.data.images import MAX_PIXELS, BrokenImage
from common.errors import Refused
from common.patches.timm import import_timm

timm = import_timm()
auto_augment = timm.data.auto_augment
transforms_imagenet_train = timm.data.transforms_factory.transforms_imagenet_train

_MIN_RATIO = 3 / 4  # width to height of a random crop
_MAX_RATIO = 4 / 3
_NUM_TRIES = 10
_SECTION = re.compile(r"(?!t)[a-z]+[0-9.]+|t(weights|3aw?)")  # of a policy, such as m9 or mstd0.5


class TrainingTransform:
    """An image -> uint8[C, H, W]: a random crop, resized and flipped, then a policy."""

    def __init__(self, config: Any, data_config: dict):
        """As in `config`, to images of `data_config["input_size"]` ([C, H, W]).

        `data_config` is as `timm.data.resolve_model_data_config` returns it. Raises `Refused` for a
        policy that timm lacks.
        """
        self.input_size = tuple(data_config["input_size"])
        self.size = self.input_size[1:]
        self.min_area = config.crop_scale
        self.hflip = config.hflip
        self.vflip = config.vflip
        self.interpolation = data_config["interpolation"]
        try:
            self.policy = self._create_policy(config.augment, data_config)
        except (AssertionError, KeyError, ValueError, NotImplementedError) as error:
            reason = error or type(error).__name__
            examples = "examples: rand-m9-mstd0.5, augmix-m3-w3, original, v0, 3a"
            raise Refused(
                f"--augment {config.augment}: not a policy of timm ({reason}); {examples}"
            ) from None

    def _create_policy(self, policy: str, data_config: dict) -> Any:
        """timm's transform of PIL images; None if `policy` is empty."""
        for section in policy.split("-")[1:]:
            if not _SECTION.fullmatch(section):
                raise ValueError(f"unknown section {section}")  # timm ignores these
        if not policy:
            return None
        # In three parts: geometry, policy, conversion.
        _, transform, _ = transforms_imagenet_train(
            self.size,
            separate=True,
            auto_augment=policy,
            interpolation=self.interpolation,
            mean=data_config["mean"],
            color_jitter=None,
        )
        return transform

    def __call__(self, picture: Picture) -> torch.Tensor:
        box = draw_crop(picture.height, picture.width, self.min_area)
        flipped_axes = []
        if random.random() < self.vflip:
            flipped_axes.append(1)
        if random.random() < self.hflip:
            flipped_axes.append(2)
        pixels = picture.crop_and_resize(*box, self.size, self.interpolation)
        if flipped_axes:
            pixels = pixels.flip(flipped_axes)
        if self.policy:
            pixels = pil_to_tensor(self.policy(Image.fromarray(pixels.permute(1, 2, 0).numpy())))
        return pixels


def draw_crop(height: int, width: int, min_area: float) -> tuple[int, int, int, int]:
    """Draw a box of `min_area` to all of the area, with a ratio of 3:4 to 4:3: top, left, height, width.

    If no such box fits, it is the largest centred one. As torchvision's RandomResizedCrop (Szegedy
    et al., 2015).
    """
    for _ in range(_NUM_TRIES):
        area = height * width * random.uniform(min_area, 1)
        ratio = math.exp(random.uniform(math.log(_MIN_RATIO), math.log(_MAX_RATIO)))
        crop_width = round(math.sqrt(area * ratio))
        crop_height = round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = random.randint(0, height - crop_height)
            left = random.randint(0, width - crop_width)
            return top, left, crop_height, crop_width
    crop_width = min(width, round(height * _MAX_RATIO))
    crop_height = min(height, round(width / _MIN_RATIO))
    top = (height - crop_height) // 2
    left = (width - crop_width) // 2
    return top, left, max(1, crop_height), max(1, crop_width)


class EvalTransform:
    """An RGB image -> uint8[3, H, W] as timm does it, by the model's `crop_mode`.

    `center` resizes to cover a size and crops the centre, `squash` changes the ratio, `border` pads
    with the mean colour.
    """

    def __init__(self, data_config: dict):
        """`data_config` is as for `TrainingTransform`."""
        self.data_config = data_config
        self._resize_and_crop = timm.data.create_transform(**data_config, use_prefetcher=True)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Resize and crop an image.

        Raises `BrokenImage` for a stripe that resizing would make larger than an image may be, or
        thinner than a pixel.
        """
        crop_mode = self.data_config.get("crop_mode")
        crop_share = self.data_config["crop_pct"]
        _, height, width = self.data_config["input_size"]
        scales = (height / crop_share / image.height, width / crop_share / image.width)
        scale = min(scales) if crop_mode == "border" else max(scales)
        is_too_large = image.width * image.height * scale**2 > MAX_PIXELS and crop_mode != "squash"
        if is_too_large or min(image.size) * scale <= 0.5:
            raise BrokenImage(
                f"{image.width} x {image.height} pixels would be enlarged to {scale:.3g} times "
                f"their sides, the limit is {MAX_PIXELS} pixels, and a side is at least 1"
            )
        return self._resize_and_crop(image)


def _posterize(image: Image.Image, bits: int, **_) -> Image.Image:
    """timm's operation, also for 0 bits (black), which Pillow refuses from version 13 on."""
    return ImageOps.posterize(image, min(bits, 8)) if bits else Image.new(image.mode, image.size)


for _name in auto_augment.NAME_TO_OP:
    if _name.startswith("Posterize"):
        auto_augment.NAME_TO_OP[_name] = _posterize
