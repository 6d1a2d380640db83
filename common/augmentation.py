"""How does an image become a tensor: varied for training, plain for evaluation?

The transforms are timm's. They draw from Python's, NumPy's and torch's generators, which the caller seeds from the
sample's position. Pixels stay uint8 up to the device, where they are normalised.
"""

import re
from collections.abc import Callable

import torch
from PIL import Image, ImageOps
from timm.data import auto_augment, create_transform
from timm.data.transforms_factory import transforms_imagenet_train
from torchvision.transforms import Compose, RandomErasing

from common.config import AugmentationConfig
from common.errors import Refused

Transform = Callable[[Image.Image], torch.Tensor]  # RGB image -> uint8[3, H, W]
_SECTION = re.compile(r"(?!t)[a-z]+[0-9.]+|t(weights|3aw?)")  # of a policy, such as m9 or mstd0.5


def training_transform(config: AugmentationConfig, data_config: dict) -> Transform:
    """Random crop, mirror, colour, policy and erasing as `config` says, to `data_config["input_size"]` ([3, H, W]).

    `data_config` is what `timm.data.resolve_model_data_config` returns. Raises `Refused` for a policy that timm lacks.
    """
    try:
        for section in config.augment.split("-")[1:]:
            if not _SECTION.fullmatch(section):  # timm skips what it does not understand
                raise ValueError(f"unknown section {section}")
        transform = transforms_imagenet_train(  # what create_transform calls, without a way to force_color_jitter
            data_config["input_size"][1:],
            use_prefetcher=True,  # ends in uint8: no normalisation here
            scale=(config.crop_scale, 1.0),
            hflip=config.hflip,
            vflip=config.vflip,
            color_jitter=config.color_jitter or None,
            force_color_jitter=True,  # timm alone would drop it beside a policy
            auto_augment=config.augment or None,
            interpolation=data_config["interpolation"],
            mean=data_config["mean"],
            std=data_config["std"],
            re_prob=0.0,  # timm's erasing comes after its prefetcher; ours is below
        )
    except (AssertionError, KeyError, ValueError, NotImplementedError) as error:
        raise Refused(
            f"--augment {config.augment}: not a policy of timm ({error}); "
            "examples: rand-m9-mstd0.5, augmix-m3-w3, original, v0, 3a"
        ) from None
    if config.random_erasing:
        transform = Compose([transform, _Erase(config.random_erasing, data_config["mean"], data_config["std"])])
    return transform


def evaluation_transform(data_config: dict) -> Transform:
    """Resize and centre crop, as the model's `data_config` says."""
    return create_transform(
        data_config["input_size"],
        is_training=False,
        use_prefetcher=True,
        interpolation=data_config["interpolation"],
        crop_pct=data_config["crop_pct"],
    )


class _Erase:
    """Replace a random rectangle by noise with the data's mean and deviation. Source: Zhong et al., "Random Erasing", 2017."""

    def __init__(self, probability: float, mean: tuple[float, ...], std: tuple[float, ...]):
        self.probability = probability
        self.mean = 255 * torch.tensor(mean, dtype=torch.float32)[:, None, None]
        self.std = 255 * torch.tensor(std, dtype=torch.float32)[:, None, None]

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if torch.rand((), dtype=torch.float32) < self.probability:
            top, left, height, width, _ = RandomErasing.get_params(
                image, scale=(0.02, 0.33), ratio=(0.3, 3.3), value=[0]
            )
            noise = self.mean + self.std * torch.randn(len(image), height, width, dtype=torch.float32)
            image[:, top : top + height, left : left + width] = noise.clamp(0, 255).to(torch.uint8)
        return image


def _posterize(image: Image.Image, bits: int, **_) -> Image.Image:
    """timm's operation, down to the 0 bits of its strongest policies: black, which Pillow from 13 on refuses to make."""
    return ImageOps.posterize(image, min(bits, 8)) if bits else Image.new(image.mode, image.size)


auto_augment.NAME_TO_OP.update({name: _posterize for name in auto_augment.NAME_TO_OP if name.startswith("Posterize")})
