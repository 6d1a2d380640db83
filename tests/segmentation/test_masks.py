"""Files of class ids are read as they are meant, or refused in one line."""

import numpy as np
import pytest
from PIL import Image

from common.data.images import BrokenImage
from common.segmentation.masks import IGNORED, count_pixels, paint_masks, read_mask

IDS = np.array([[0, 1, 2], [2, 255, 0]], np.uint8)  # as in a file
MASK = [[0, 1, 2], [2, IGNORED, 0]]


def save(folder, image: Image.Image) -> str:
    file = folder / "mask.png"
    image.save(file)
    return str(file)


def with_palette(ids: np.ndarray) -> Image.Image:
    image = Image.fromarray(ids, "P")
    image.putpalette([channel for i in range(256) for channel in (i, 255 - i, 7)])
    return image


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(IDS),
        with_palette(IDS),
        Image.fromarray(IDS.astype(np.uint16)),
        Image.fromarray(IDS.astype(np.int32)),
        Image.fromarray(np.repeat(IDS[..., None], 3, axis=2)),
    ],
    ids=["grey", "palette", "16 bits", "32 bits", "grey as RGB"],
)
def test_ids_are_read_from_every_usual_kind_of_image(image, tmp_path) -> None:
    suffix = "tiff" if image.mode == "I" else "png"
    file = tmp_path / f"mask.{suffix}"
    image.save(file)
    mask = read_mask(str(file), num_classes=3, ignore_zero=False)
    assert mask.dtype == np.int16
    assert mask.tolist() == MASK


@pytest.mark.parametrize(
    "num_classes, ignore_zero, class_ids",
    [
        (255, False, [0, 254, IGNORED, None]),
        (256, False, [0, 254, 255, IGNORED]),
        (254, True, [IGNORED, 253, IGNORED, None]),
        (255, True, [IGNORED, 253, 254, IGNORED]),
        (1000, False, [0, 254, 255, IGNORED]),
    ],
)
def test_255_means_no_label_unless_it_is_a_class(
    num_classes, ignore_zero, class_ids, tmp_path
) -> None:
    """With so many classes 65535 means that, which 8 bits do not have."""
    for number, class_id in zip((0, 254, 255, 65535), class_ids, strict=True):
        file = save(tmp_path, Image.fromarray(np.array([[number, 1]], np.uint16)))
        if class_id is None:
            with pytest.raises(BrokenImage, match="; 255 means no label"):
                read_mask(file, num_classes, ignore_zero)
        else:
            mask = read_mask(file, num_classes, ignore_zero)
            assert mask.tolist() == [[class_id, 0 if ignore_zero else 1]]


def test_more_than_256_classes_have_16_bits(tmp_path) -> None:
    ids = np.array([[0, 300], [255, 999]], np.uint16)
    file = save(tmp_path, Image.fromarray(ids))
    assert read_mask(file, num_classes=1000, ignore_zero=False).tolist() == ids.tolist()
    with pytest.raises(BrokenImage, match=r"has the id 999, .*; 65535 means no label"):
        read_mask(file, num_classes=999, ignore_zero=False)


def test_zero_may_mean_no_label(tmp_path) -> None:
    mask = read_mask(save(tmp_path, Image.fromarray(IDS)), num_classes=2, ignore_zero=True)
    assert mask.tolist() == [[IGNORED, 0, 1], [1, IGNORED, IGNORED]]


@pytest.mark.parametrize(
    "image, ignore_zero, message",
    [
        (
            Image.fromarray(IDS),
            False,
            "the mask has the id 2, and there are 2 classes, 0 to 1; 255",
        ),
        (Image.fromarray(IDS + 1), True, "the mask has the id 2 (after --ignore_zero), and there"),
        (
            Image.fromarray(np.stack([IDS, IDS, IDS * 0], axis=2)),
            False,
            "the mask has colours (mode RGB), and a class id per pixel is needed: map each colour",
        ),
    ],
    ids=["unknown id", "unknown id after 0", "colours"],
)
def test_other_masks_are_broken(image, ignore_zero, message, tmp_path) -> None:
    with pytest.raises(BrokenImage) as error:
        read_mask(save(tmp_path, image), num_classes=2, ignore_zero=ignore_zero)
    assert str(error.value).startswith(message)


def test_smaller_objects_are_painted_above_and_crowds_below() -> None:
    masks = np.zeros((3, 4, 4), np.uint8)
    masks[0, :2] = 1  # 8 pixels
    masks[1, 0, :2] = 1  # 2 pixels, on it
    masks[2] = 1  # a crowd region
    crowd = np.array([False, False, True])
    ids = paint_masks(masks, np.array([1, 2, 3]), crowd, background=0)
    assert ids.tolist() == [[2, 2, 1, 1], [1] * 4, [3] * 4, [3] * 4]
    none = np.zeros((0, 2, 2), np.uint8)
    assert not paint_masks(none, np.zeros(0, int), np.zeros(0, bool), background=0).any()


def test_pixels_are_counted_without_those_that_have_no_label() -> None:
    assert count_pixels([np.array(MASK)] * 2, num_classes=4).tolist() == [4, 2, 4, 0]
