"""Augmentation moves image and mask together, and is a pure function of the position."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.data.decoding import Picture
from common.segmentation.augmentation import CropAugmentation
from common.segmentation.masks import IGNORED
from common.segmentation.source import Pair

PLAIN = CropAugmentation(
    seed=3, crop_size=48, short_side=0, min_scale=1, max_scale=1, hflip=0, photometric=0
)
VARIED = replace(PLAIN, min_scale=0.5, max_scale=2, hflip=0.5)

pytestmark = pytest.mark.smoke


def make_pair(height: int, width: int, kept: float = 1.0) -> Pair:
    """Blocks of 20 x 20 pixels, whose grey value says their class. With `kept`, the picture is smaller,
    as in a cache.
    """
    rows, columns = np.mgrid[:height, :width] // 20
    mask = ((rows + 2 * columns) % 5).astype(np.int16)
    picture = mask
    if kept < 1:
        stride = round(1 / kept)
        picture = mask[::stride, ::stride]
    pixels = torch.from_numpy(np.repeat(50 * picture[None].astype(np.uint8), 3, axis=0))
    return Pair(Picture(pixels), mask)


def share_aligned(image: torch.Tensor, mask: torch.Tensor) -> float:
    """The share of pixels whose grey value is that of their class."""
    expected = 50 * mask.float()
    return ((image[0].float() - expected).abs() < 25).float().mean().item()


@pytest.mark.parametrize("size, kept", [((96, 120), 1), ((40, 200), 1), ((96, 120), 0.5)])
def test_image_and_mask_stay_together(size, kept) -> None:
    pair = make_pair(*size, kept)
    for position in range(40):
        image, mask = VARIED(pair, position)
        assert image.shape[1:] == mask.shape and max(mask.shape) <= 48
        assert share_aligned(image, mask) > 0.8


def test_without_scaling_the_crop_has_the_bits_of_the_image() -> None:
    pair = make_pair(96, 120)
    for position in range(10):
        image, mask = PLAIN(pair, position)
        assert mask.shape == (48, 48)
        assert torch.equal(image[0].long(), 50 * mask.long())
    small = make_pair(30, 20)
    image, mask = PLAIN(small, 0)
    assert np.array_equal(mask, small.mask)


def test_a_position_gives_the_same_sample_in_any_order() -> None:
    pair = make_pair(96, 120)
    varied = replace(VARIED, photometric=0.5)
    first = [varied(pair, position) for position in range(8)]
    second = [varied(pair, position) for position in reversed(range(8))][::-1]
    for (image, mask), (image_again, mask_again) in zip(first, second, strict=True):
        assert torch.equal(image, image_again) and torch.equal(mask, mask_again)
    distinct = {mask.numpy().tobytes() for _, mask in first}
    assert len(distinct) == 8


def test_scales_cover_their_range() -> None:
    """The widths of a striped image's stripes say by how much it was scaled."""
    pair = make_pair(64, 64)
    no_limit = replace(VARIED, crop_size=1000, hflip=0)
    sides = [no_limit(pair, position)[1].shape[0] for position in range(200)]
    assert min(sides) >= 32 and max(sides) <= 128
    assert min(sides) < 36 and max(sides) > 124
    assert replace(no_limit, short_side=128)(pair, 0)[1].shape[0] == pytest.approx(
        2 * sides[0], abs=1
    )


def test_crops_of_one_class_are_drawn_again() -> None:
    """A corner of a tenth of the image has another class: crops that hold both are preferred."""
    mask = np.zeros((300, 300), np.int16)
    mask[:95, :95] = 1
    mask[:, 280:] = IGNORED
    pair = Pair(Picture(torch.zeros(3, 300, 300, dtype=torch.uint8)), mask)
    wide = replace(PLAIN, crop_size=100)
    num_mixed = 0
    for position in range(200):
        labels = wide(pair, position)[1]
        shares = (
            torch.bincount(labels[labels != IGNORED].long(), minlength=2)
            / (labels != IGNORED).sum()
        )
        num_mixed += bool(shares.max() <= 0.75)
    # A single draw would do so in 9 % of the crops; ten draws in 60 %.
    assert 80 < num_mixed < 170
