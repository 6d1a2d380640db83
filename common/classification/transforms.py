"""Transforms of single images in data workers: random crop, flips and timm's policies for training, timm's own for evaluation.

Random numbers come from Python's, NumPy's and torch's generators, which the caller seeds from the sample's position. Pixels
stay uint8 until they are on the device, where the augmentations of whole batches follow (`common.classification.augmentation`).
"""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image, ImageOps

from common.config.fields import AugmentationConfig
from common.data.decoding import Picture, View, pixels_of
from common.data.images import MAX_PIXELS, BrokenImage
from common.errors import Refused
from common.imports import timm

auto_augment, transforms_imagenet_train = timm.data.auto_augment, timm.data.transforms_factory.transforms_imagenet_train

_RATIO = (3 / 4, 4 / 3)  # width to height of a random crop
_TRIES = 10
_SECTION = re.compile(r"(?!t)[a-z]+[0-9.]+|t(weights|3aw?)")  # of a policy, such as m9 or mstd0.5


@dataclass(frozen=True)
class TrainingTransform:
    """An image -> uint8[3, H, W]: a random crop, resized and flipped, then a policy."""

    size: tuple[int, int]  # height and width
    least_area: float  # of a crop, as a share of the image
    hflip: float
    vflip: float
    interpolation: str
    policy: Callable[[Image.Image], Image.Image] | None

    def __call__(self, picture: Picture) -> torch.Tensor:
        return self.show(picture, self.draw(picture.height, picture.width))

    def draw(self, height: int, width: int) -> View:
        """A random view of an image of this size in pixels, from Python's generator."""
        box = crop(height, width, self.least_area)
        return View(box, self.size, *(random.random() < probability for probability in (self.vflip, self.hflip)))

    def show(self, picture: Picture, view: View) -> torch.Tensor:
        """This view as uint8[3, H, W]. A policy draws its own random numbers in each call."""
        pixels = view.mirrored(picture.region(*view.box, view.size, self.interpolation))
        if self.policy:
            image = self.policy(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
            pixels = pixels_of(image)
        return pixels


def training_transform(config: AugmentationConfig, data_config: dict) -> TrainingTransform:
    """Random crop, flips and policy as in `config`, to images of `data_config["input_size"]` ([3, H, W]).

    `data_config` is what `timm.data.resolve_model_data_config` returns. Raises `Refused` for a policy that timm lacks.
    """
    size, interpolation = tuple(data_config["input_size"][1:]), data_config["interpolation"]
    policy = None
    try:
        for section in config.augment.split("-")[1:]:
            if not _SECTION.fullmatch(section):  # timm ignores unknown sections
                raise ValueError(f"unknown section {section}")
        if config.augment:
            _, policy, _ = transforms_imagenet_train(  # in three parts: geometry, policy, conversion
                size,
                separate=True,
                auto_augment=config.augment,
                color_jitter=None,
                interpolation=interpolation,
                mean=data_config["mean"],
            )
    except (AssertionError, KeyError, ValueError, NotImplementedError) as error:
        raise Refused(
            f"--augment {config.augment}: not a policy of timm ({error or type(error).__name__}); "
            "examples: rand-m9-mstd0.5, augmix-m3-w3, original, v0, 3a"
        ) from None
    return TrainingTransform(size, config.crop_scale, config.hflip, config.vflip, interpolation, policy)


def crop(height: int, width: int, least_area: float) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part with `least_area` to all of the image's area and a ratio of 3:4 to 4:3.

    Drawn from Python's generator. If no such part fits, it is the largest centred one that has a ratio within the limits.
    Source: Szegedy et al., "Going deeper with convolutions", 2015, as in torchvision's RandomResizedCrop.
    """
    low, high = (math.log(ratio) for ratio in _RATIO)
    for _ in range(_TRIES):
        area = height * width * random.uniform(least_area, 1)
        ratio = math.exp(random.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    w, h = min(width, round(height * _RATIO[1])), min(height, round(width / _RATIO[0]))
    return (height - h) // 2, (width - w) // 2, max(1, h), max(1, w)


@dataclass(frozen=True)
class EvaluationTransform:
    """An RGB image -> uint8[3, H, W]: resized to cover a size, then cropped at the centre."""

    data_config: dict  # as of `evaluation_transform`
    resize_and_crop: Callable[[Image.Image], torch.Tensor]

    def __call__(self, image: Image.Image) -> torch.Tensor:
        """Raises `BrokenImage` for a stripe that is so narrow that resizing would make it larger than an image may be."""
        sides = zip(self.data_config["input_size"][1:], (image.height, image.width), strict=True)
        scale = max(wanted / self.data_config["crop_pct"] / side for wanted, side in sides)
        pixels = image.width * image.height * scale**2
        if pixels > MAX_PIXELS:
            raise BrokenImage(
                f"{image.width} x {image.height} pixels would be enlarged to {pixels:.3g}, the limit is {MAX_PIXELS}"
            )
        return self.resize_and_crop(image)


def evaluation_transform(data_config: dict) -> EvaluationTransform:
    """Resize and centre crop for the model's `data_config`: exactly timm's own."""
    resize_and_crop = timm.data.create_transform(
        data_config["input_size"],
        is_training=False,
        use_prefetcher=True,
        interpolation=data_config["interpolation"],
        crop_pct=data_config["crop_pct"],
    )
    return EvaluationTransform(data_config, resize_and_crop)


def _posterize(image: Image.Image, bits: int, **_) -> Image.Image:
    """timm's operation, also for the 0 bits of its strongest policies: black, which Pillow refuses from version 13 on."""
    return ImageOps.posterize(image, min(bits, 8)) if bits else Image.new(image.mode, image.size)


auto_augment.NAME_TO_OP.update({name: _posterize for name in auto_augment.NAME_TO_OP if name.startswith("Posterize")})
