"""What a run shows of its training batches."""

import numpy as np
import pytest

from common.data.stream import Stream
from common.segmentation import sources
from common.segmentation.augmentation import CropAugmentation
from common.segmentation.batches import TrainDataset
from common.segmentation.masks import IGNORED
from common.segmentation.plots import make_colours

pytestmark = pytest.mark.smoke


def test_an_image_of_the_first_batch_has_the_colours_of_its_mask(regions) -> None:
    """Padding and pixels without a label have none."""
    source, _ = sources.load(sources.Spec(str(regions), seed=0, val_share=0.2))
    augmentation = CropAugmentation(
        0, crop_size=96, short_side=0, min_scale=0.5, max_scale=2, hflip=0.5, photometric=0
    )
    dataset = TrainDataset(source, Stream(len(source), 12, seed=0), augmentation, seed=0)
    batch = dataset.__getitems__(np.arange(12))
    masks = batch.labels.numpy()
    assert (masks == IGNORED).any() and (masks != IGNORED).any()
    colours = make_colours(len(source.classes))
    descriptions = dataset.describe_images(batch)
    for mask, (_, _, boxes, overlay) in zip(masks, descriptions, strict=True):
        is_labelled = mask != IGNORED
        assert not boxes and overlay.dtype == np.uint8
        assert ((overlay[..., 3] == 255) == is_labelled).all()
        assert ((overlay[..., 3] == 0) == ~is_labelled).all()
        assert (overlay[is_labelled, :3] == colours[mask[is_labelled]]).all()
