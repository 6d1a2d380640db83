"""Training transforms depend on the image and its key alone; evaluation transforms are exactly timm's."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from timm.data import create_transform
from torchvision.transforms import RandomResizedCrop

from common.classification.transforms import EvalTransform, TrainingTransform, draw_crop
from common.data.decoding import Picture
from common.data.images import BrokenImage
from common.errors import Refused
from common.randomness import key_of, seed_generators
from tests.harness.odd_files import bounded

DATA = {
    "input_size": (3, 32, 32),
    "interpolation": "bilinear",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "crop_pct": 0.875,
}


@dataclass
class ViewSettings:
    crop_scale: float = 0.7
    hflip: float = 0.0
    vflip: float = 0.0
    augment: str = ""


PLAIN = ViewSettings(crop_scale=1.0)
POLICIES = "rand-m9-mstd0.5-inc1 rand-m5-n3-tweights augmix-m3-w3 original-mstd0.5 3a".split()


def photograph(width: int = 40, height: int = 36) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(0).integers(0, 60, (height, width, 3))
    pixels = noise + np.stack([4 * x, 5 * y, 2 * (x + y)], 2)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def transform_with_keys(
    config: ViewSettings, keys: range, image: Image.Image | None = None
) -> list[torch.Tensor]:
    transform = TrainingTransform(config, DATA)
    image = image or photograph()
    result = []
    for key in keys:
        seed_generators(key_of(key))
        result.append(transform(Picture(image)))
    return result


@pytest.mark.parametrize("policy", ["", *POLICIES])
def test_an_image_becomes_the_same_whatever_was_drawn_before_it(policy: str) -> None:
    config = ViewSettings(1.0, augment=policy) if policy else ViewSettings(0.3, 0.5, 0.5)
    image = photograph(32, 32)
    before = np.asarray(image).copy()
    variants = transform_with_keys(config, range(20), image)
    for variant in variants:
        assert variant.dtype == torch.uint8
        assert variant.shape == (3, 32, 32)
    torch.rand(7)
    np.random.rand(5)
    # By another transform object, in another order.
    backwards = transform_with_keys(config, range(19, -1, -1), image)
    for actual, expected in zip(reversed(backwards), variants, strict=True):
        assert torch.equal(actual, expected)
    # And it is varied, by a policy alone, too.
    assert len({variant.numpy().tobytes() for variant in variants}) > 5
    assert (np.asarray(image) == before).all()  # the source's own pixels stay as they are


@pytest.mark.parametrize("magnitude", [0, 9, 10])
def test_no_magnitude_of_a_policy_fails(magnitude: int) -> None:
    """Pillow 13 refuses to posterize to 0 bits, which rand-m9-mstd0.5-inc1 asks for in one image of 700."""
    for policy in ("rand-m{}-n20-p1.0-mstd0.5-inc1", "rand-m{}-n20-p1.0-mstd101", "augmix-m{}-w9"):
        config = ViewSettings(augment=policy.format(magnitude))
        transform_with_keys(config, range(20), photograph(9, 9))


def test_flips_come_as_often_as_asked() -> None:
    image = photograph(32, 32)
    original = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    for variant in transform_with_keys(PLAIN, range(20), image):
        assert torch.equal(variant, original)
    for flips, axis in ((dict(hflip=1.0), 2), (dict(vflip=1.0), 1)):
        (variant,) = transform_with_keys(ViewSettings(1.0, **flips), range(1), image)
        assert torch.equal(variant, original.flip(axis))
    variants = transform_with_keys(ViewSettings(1.0, hflip=0.25), range(1_600), image)
    flipped = [not torch.equal(variant, original) for variant in variants]
    assert abs(np.mean(flipped) - 0.25) < 4 * (0.25 * 0.75 / 1_600) ** 0.5


@pytest.mark.parametrize(
    "height, width, least_area", [(375, 500, 0.08), (300, 20, 0.3), (1, 1, 0.08)]
)
def test_crops_are_those_of_torchvision(height: int, width: int, least_area: float) -> None:
    """Not the same draws, but the same distribution of areas, ratios and places."""
    image = torch.empty(3, height, width)
    random.seed(0)
    torch.manual_seed(0)
    actual = []
    expected = []
    for _ in range(1_000):
        actual.append(draw_crop(height, width, least_area))
    scale = (least_area, 1.0)
    for _ in range(1_000):
        expected.append(RandomResizedCrop.get_params(image, scale=scale, ratio=(3 / 4, 4 / 3)))
    top, left, crop_height, crop_width = columns = np.array(actual, float).T
    for column, expected_column in zip(columns, np.array(expected, float).T, strict=True):
        assert ks_2samp(column, expected_column).pvalue > 1e-3
    assert min(top.min(), left.min()) >= 0
    assert min(crop_height.min(), crop_width.min()) >= 1
    assert (top + crop_height).max() <= height
    assert (left + crop_width).max() <= width


# No such policy, no such section; sections without a number, which timm skips; no such set, for
# which timm takes another.
WRONG = [
    "rnd-m9",
    "rand-m9-x3",
    "rand-magic",
    "rand-m9-inc",
    "rand-m9-tfoo",
    "augmix-m3-wide",
    "v7",
    "-",
    "rand m9",
]


@pytest.mark.parametrize("policy", WRONG)
def test_a_policy_with_a_typo_is_refused(policy: str) -> None:
    with pytest.raises(
        Refused, match=r"--augment .*: not a policy of timm .*examples: rand-m9-mstd0\.5"
    ) as raised:
        TrainingTransform(ViewSettings(augment=policy), DATA)
    message = str(raised.value)
    assert f"--augment {policy}:" in message
    assert "\n" not in message


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(40, 36), (17, 90), (1, 1)])
def test_evaluation_shows_what_timm_would(size: tuple[int, int], crop_mode: str) -> None:
    image = photograph(*size)
    config = DATA | {"crop_mode": crop_mode}
    actual = EvalTransform(config)(image)
    assert actual.dtype == torch.uint8
    assert actual.shape == (3, 32, 32)
    mean = 255 * torch.tensor(DATA["mean"])[:, None, None]
    std = 255 * torch.tensor(DATA["std"])[:, None, None]
    expected = create_transform(**config, is_training=False)(image)
    assert torch.allclose((actual - mean) / std, expected, atol=1e-5)


def test_a_stripe_that_would_be_enlarged_too_much_is_broken() -> None:
    """20,000 x 1 pixels would become 4,480,000 x 224: 4 GB. Below the limit a stripe is evaluated
    as any image.
    """
    transform = EvalTransform(DATA | {"input_size": (3, 224, 224), "crop_pct": 1.0})
    with (
        bounded(10, 256),
        pytest.raises(BrokenImage, match=r"would be enlarged to .*, the limit is 89478485"),
    ):
        transform(Image.new("RGB", (1, 20_000)))
    assert transform(Image.new("RGB", (1, 300))).shape == (3, 224, 224)
    squash = EvalTransform(DATA | {"crop_mode": "squash"})
    assert squash(Image.new("RGB", (1, 20_000))).shape == (3, 32, 32)
    border = EvalTransform(DATA | {"crop_mode": "border"})
    with pytest.raises(BrokenImage, match="a side is at least 1"):
        border(Image.new("RGB", (1, 20_000)))
