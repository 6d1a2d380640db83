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
auto_augment, transforms_imagenet_train = (
    timm.data.auto_augment,
    timm.data.transforms_factory.transforms_imagenet_train,
)

_RATIO = (3 / 4, 4 / 3)  # width to height of a random crop
_TRIES = 10
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
        self.smallest_area, self.hflip, self.vflip = config.crop_scale, config.hflip, config.vflip
        self.interpolation = data_config["interpolation"]
        self.policy = None
        try:
            if unknown := [
                section
                for section in config.augment.split("-")[1:]
                if not _SECTION.fullmatch(section)
            ]:
                raise ValueError(f"unknown section {unknown[0]}")  # timm ignores these
            if config.augment:
                options = {
                    "interpolation": self.interpolation,
                    "mean": data_config["mean"],
                    "color_jitter": None,
                }
                # In three parts: geometry, policy, conversion.
                _, self.policy, _ = transforms_imagenet_train(
                    self.size, separate=True, auto_augment=config.augment, **options
                )
        except (AssertionError, KeyError, ValueError, NotImplementedError) as error:
            reason = error or type(error).__name__
            examples = "examples: rand-m9-mstd0.5, augmix-m3-w3, original, v0, 3a"
            raise Refused(
                f"--augment {config.augment}: not a policy of timm ({reason}); {examples}"
            ) from None

    def __call__(self, picture: Picture) -> torch.Tensor:
        box = crop(picture.height, picture.width, self.smallest_area)
        flipped = [
            axis for axis, share in ((1, self.vflip), (2, self.hflip)) if random.random() < share
        ]
        pixels = picture.crop_and_resize(*box, self.size, self.interpolation)
        pixels = pixels.flip(flipped) if flipped else pixels
        if self.policy:
            pixels = pil_to_tensor(self.policy(Image.fromarray(pixels.permute(1, 2, 0).numpy())))
        return pixels


def crop(height: int, width: int, smallest_area: float) -> tuple[int, int, int, int]:
    """Top, left, height and width of a part with `smallest_area` to all of the area and a ratio of
    3:4 to 4:3.

    If no such part fits, it is the largest centred one. As torchvision's RandomResizedCrop (Szegedy
    et al., 2015).
    """
    low, high = (math.log(ratio) for ratio in _RATIO)
    for _ in range(_TRIES):
        area = height * width * random.uniform(smallest_area, 1)
        ratio = math.exp(random.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    w, h = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
    return (height - h) // 2, (width - w) // 2, max(1, h), max(1, w)


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
        """Raises `BrokenImage` for a stripe that resizing would make larger than an image may be,
        or thinner than a pixel.
        """
        crop_mode = self.data_config.get("crop_mode")
        sides = zip(self.data_config["input_size"][1:], (image.height, image.width), strict=True)
        scales = [wanted / self.data_config["crop_pct"] / side for wanted, side in sides]
        scale = min(scales) if crop_mode == "border" else max(scales)
        is_too_large = image.width * image.height * scale**2 > MAX_PIXELS and crop_mode != "squash"
        if is_too_large or min(image.size) * scale <= 0.5:
            enlarged = (
                f"{image.width} x {image.height} pixels would be enlarged to {scale:.3g} times "
                "their sides"
            )
            raise BrokenImage(
                f"{enlarged}, the limit is {MAX_PIXELS} pixels, and a side is at least 1"
            )
        return self._resize_and_crop(image)


def _posterize(image: Image.Image, bits: int, **_) -> Image.Image:
    """timm's operation, also for 0 bits (black), which Pillow refuses from version 13 on."""
    return ImageOps.posterize(image, min(bits, 8)) if bits else Image.new(image.mode, image.size)


auto_augment.NAME_TO_OP.update(
    {name: _posterize for name in auto_augment.NAME_TO_OP if name.startswith("Posterize")}
)
