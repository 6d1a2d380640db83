"""Under any augmentation, boxes stay on their objects, and sizes within what metadata say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.decoding import Picture, pil_to_tensor
from common.detection.data.annotated import Sample
from common.detection.samples import hflip
from common.detection.transforms import BoxAugmentation
from tests.harness.detections import find_extents

FILL = (9, 9, 9)
WAYS = {
    "plain": {},
    "short sides": {"short_sides": (40, 64, 90)},
    "mirror": {"hflip": 1.0},
    "iou crop": {"iou_crop": 1.0},
    "zoom out": {"zoom_out": 1.0},
    "mosaic": {"mosaic": 1.0},
    "mixup": {"mixup": 1.0},
    "everything": {
        "short_sides": (40, 64, 90),
        **dict.fromkeys(("hflip", "iou_crop", "zoom_out", "mosaic", "mixup"), 0.5),
    },
}


def build(seed=0, **ways) -> BoxAugmentation:
    return BoxAugmentation(seed, **{"short_sides": (64,), "long_side": 120} | ways)


def paint(size, count, seed=0, crowd=()) -> Sample:
    """A black image whose object number k has the colour 60 + 40 k on all of its box."""
    draws = np.random.default_rng(seed)
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    boxes = np.zeros((count, 4), np.float32)
    masks = np.zeros((count, height, width), np.uint8)
    for number in range(count):  # side by side, so that none hides another
        left = number * width // count
        span = draws.integers(3, [max(4, width // count), height])
        top = draws.integers(0, height - span[1] + 1)
        right = min(left + span[0], (number + 1) * width // count)
        boxes[number] = left, top, right, top + span[1]
        masks[number, top : top + span[1], left:right] = 1
        pixels[top : top + span[1], left:right] = 60 + 40 * number
    crowds = np.isin(np.arange(count), crowd)
    return Sample(
        Picture(pil_to_tensor(pixels)), boxes, np.arange(count), crowds, masks, np.array(size)
    )


def vary(augmentation, position, own, others=None) -> Sample:
    others = others or [paint((70, 90), 3, seed) for seed in range(5)]
    return augmentation([own, *others[: len(augmentation.draw_partners(position))]], position, FILL)


def assert_same(left: Sample, right: Sample) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left[:5], right[:5], strict=True))


@pytest.mark.smoke
@pytest.mark.parametrize("way", WAYS)
def test_boxes_and_masks_stay_on_the_pixels_of_their_objects(way):
    """Each object's colour fills its box, but for edges of two pixels that resizing may blur."""
    augmentation = build(**WAYS[way] | ({"mixup": 0.0} if way == "everything" else {}))
    num_checked = 0
    for position in range(40):
        result = vary(augmentation, position, paint((100, 80), 3, seed=position))
        height, width = result.image.shape[1:]
        assert len(result.boxes) == len(result.labels) == len(result.crowd) == len(result.masks)
        assert (result.boxes[:, :2] >= 0).all() and (
            result.boxes[:, 2:] <= torch.tensor([width, height])
        ).all()
        assert result.masks.shape[1:] == (height, width)
        assert (
            not len(result.boxes) or (find_extents(result.masks) - result.boxes).abs().max() <= 1.01
        )
        for box, label in zip(result.boxes, result.labels.tolist(), strict=True):
            left, top, right, bottom = box.tolist()
            left = round(left) + 2
            top = round(top) + 2
            right = round(right) - 2
            bottom = round(bottom) - 2
            if right > left and bottom > top:
                part = result.image[0, top:bottom, left:right].float()
                if way == "mixup":  # half of it is another image
                    part = part[part >= (60 + 40 * label) // 2 - 1][:1]
                    assert len(part)
                else:
                    assert (part - (60 + 40 * label)).abs().max() <= 2
                num_checked += 1
    assert num_checked > 30


@settings(max_examples=120)
@given(
    st.integers(0, 2**40),
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.sampled_from(sorted(WAYS)),
    st.integers(0, 4),
)
def test_no_image_is_larger_than_its_metadata_say(position, size, way, count):
    augmentation = build(**WAYS[way])
    sample = paint(size, count if min(size) > 40 else 0)
    bound = augmentation.compute_sizes(np.array([position]), np.array([size]))[0]
    result = vary(
        augmentation, position, sample, [paint((41 + n, 200 - 35 * n), 1) for n in range(5)]
    )
    assert (np.array(result.image.shape[:0:-1]) <= bound).all()
    # As a step asks.
    several = augmentation.compute_sizes(
        np.array([position + 1, position]), np.array([(9, 8), size])
    )
    assert np.array_equal(several[1], bound)
    whole = build(short_sides=WAYS[way].get("short_sides", (64,))).compute_sizes(
        np.array([position]), np.array([size])
    )[0]
    assert (bound <= whole).all() and bound.max() <= 120
    if way in ("plain", "short sides", "mirror", "mosaic"):
        assert (np.array(result.image.shape[:0:-1]) == bound).all()


def test_an_object_of_which_little_is_left_is_dropped():
    """MixUp with a narrow image cuts others: a box keeps less than a tenth of itself in some places."""
    augmentation = build(mixup=1.0)
    narrow = paint((20, 80), 0)
    shares_by_crowd = {False: [], True: []}
    for position in range(200):
        for crowd in shares_by_crowd:
            other_sample = paint((100, 80), 1, seed=6, crowd=[0] if crowd else [])
            result = vary(augmentation, position, narrow, [other_sample])
            whole = np.prod(other_sample.boxes[0, 2:] - other_sample.boxes[0, :2]) * (64 / 80) ** 2
            share = (result.boxes[:, 2:] - result.boxes[:, :2]).prod(1) / whole
            shares_by_crowd[crowd] += share.tolist()
            assert result.crowd.tolist() == [crowd] * len(share)
    assert (
        min(shares_by_crowd[False]) > 0.09
        and min(shares_by_crowd[True]) < 0.05
        and len(shares_by_crowd[True]) > len(shares_by_crowd[False]) > 0
    )


def test_a_mosaic_shows_four_images_and_mixup_two():
    first_sample = paint((100, 80), 1)
    other_samples = [paint((70, 90), 1) for _ in range(4)]
    colours = [first_sample, *other_samples]
    for number, sample in enumerate(colours):
        sample.labels[:], sample.image.decode()[:] = number, 50 + 30 * number
    result = [
        vary(build(mosaic=1.0), position, first_sample, other_samples) for position in range(20)
    ]
    assert set().union(*(mosaic.labels.tolist() for mosaic in result)) == {0, 1, 2, 3}
    for mosaic in result:
        corners = mosaic.image[0, [1, 1, -2, -2], [1, -2, 1, -2]].tolist()
        assert all(corner in (9, 50 + 30 * i) for i, corner in enumerate(corners))
        rows = [row.nonzero() for row in mosaic.image[0] != FILL[0] if row.any()]
        # They meet, without a gap.
        assert all(len(row) == row.max() - row.min() + 1 for row in rows)
    mixed = vary(build(mixup=1.0), 3, first_sample, other_samples)
    assert mixed.labels.tolist() == [0, 1] and mixed.image[0, 30, 20] == (50 + 80) // 2
    assert len(build(mosaic=1.0, mixup=1.0).draw_partners(3)) == 4


def test_strong_ways_end_at_a_position_and_the_gentle_ones_go_on():
    ways = dict.fromkeys(("mosaic", "mixup", "iou_crop", "zoom_out", "photometric"), 1.0)
    sample = paint((100, 80), 3)
    gentle = build(hflip=0.5)
    augmentation = build(hflip=0.5, **ways, strong_until=10)
    assert [len(augmentation.draw_partners(position)) for position in (9, 10)] == [4, 0]
    assert not assert_same(vary(augmentation, 9, sample), vary(gentle, 9, sample))
    for position in (10, 11, 12, 10**12):
        assert augmentation.compute_sizes(np.array([position]), np.array([[100, 80]])).tolist() == [
            list(vary(augmentation, position, sample).image.shape[:0:-1])
        ]
        assert len(vary(augmentation, position, sample).boxes) <= 3


def test_a_mirrored_box_has_the_pixels_that_it_had() -> None:
    """Exactly: the other tests forgive a pixel, which resizing may blur."""
    pixels = torch.zeros(3, 8, 20, dtype=torch.uint8)
    pixels[:, 2:5, 3:9] = 200
    objects = [torch.tensor([[3.0, 2.0, 9.0, 5.0]]), torch.tensor([1]), torch.tensor([False])]
    mirrored = hflip(Sample(pixels, *objects, masks=(pixels[:1] > 0).byte()))
    assert mirrored.boxes.tolist() == find_extents(mirrored.masks).tolist() == [[11, 2, 17, 5]]
    assert (mirrored.image[:, 2:5, 11:17] == 200).all()
