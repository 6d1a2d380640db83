"""Faster and Mask R-CNN agree with torchvision's where their definitions coincide."""

import pytest
import torch
from torchvision.models.detection import FasterRCNN as TorchvisionFasterRCNN
from torchvision.models.detection import MaskRCNN as TorchvisionMaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign

from common.detection.models.detectors import build_detector
from common.detection.models.spec import DetectorSpec
from tests.detection.models.pieces import CANVAS, LEVELS, OrderedMaps, scene

EVERYTHING = 20_000  # more than there are anchors and proposals: nothing is left to chance


def both(masks=False):
    family, options = ("mask_rcnn", {"mask_width": 8}) if masks else ("faster_rcnn", {})
    ours = build_detector(DetectorSpec(family, "test_resnet", 4, levels=LEVELS, width=32, hidden=48, seed=2, **options))
    ours.double().eval()
    for part in (ours, ours.rpn):
        part.drawn, part.foreground_share = EVERYTHING, 1.0
    kind = TorchvisionMaskRCNN if masks else TorchvisionFasterRCNN
    heads = {"mask_roi_pool": MultiScaleRoIAlign([0, 1, 2], 14, 2), "mask_head": MaskRCNNHeads(32, (8,) * 4, 1)}
    heads["mask_predictor"] = MaskRCNNPredictor(8, 8, 5)
    theirs = kind(
        OrderedMaps(ours.backbone),
        min_size=CANVAS[0],
        max_size=CANVAS[1],
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        rpn_anchor_generator=AnchorGenerator(tuple((8 * 2**n,) for n in range(3, 7)), ((0.5, 1.0, 2.0),) * 4),
        box_roi_pool=MultiScaleRoIAlign([0, 1, 2], 7, 2),
        box_head=TwoMLPHead(32 * 49, 48),
        box_predictor=FastRCNNPredictor(48, 5),
        rpn_batch_size_per_image=EVERYTHING,
        rpn_positive_fraction=1.0,
        box_batch_size_per_image=EVERYTHING,
        box_positive_fraction=1.0,
        **(heads if masks else {}),
    )
    theirs.load_state_dict(ours.state_dict())  # strict: the names are the same
    return ours, theirs.double().eval()


def images_of(count):
    return torch.randn(count, 3, *CANVAS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Counting:
    """torchvision's sampler, which remembers how many it drew: what torchvision divides by."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __call__(self, matched):
        drawn = self.sampler(matched)
        self.count = sum(int(one.sum()) for kind in drawn for one in kind)
        return drawn


@pytest.mark.parametrize("masks", [False, True])
def test_losses_are_torchvisions_on_one_whole_batch(masks):
    """Up to the divisor, where torchvision takes what it happened to draw. Masks: of one image, as ours are per image."""
    ours, theirs = both(masks)
    images, targets = images_of(1 if masks else 3), [scene(count) for count in ((5,) if masks else (3, 0, 6))]
    for target in targets:
        target["masks"] = (
            torch.rand(len(target["boxes"]), *CANVAS, generator=torch.Generator().manual_seed(1)).round().byte()
        )
    ours.train()
    theirs.train()
    ours.backbone.eval()
    theirs.backbone.eval()
    _, terms = ours(images, targets, ours.counts(targets, CANVAS))
    theirs.rpn.fg_bg_sampler = Counting(theirs.rpn.fg_bg_sampler)
    theirs.roi_heads.fg_bg_sampler = Counting(theirs.roi_heads.fg_bg_sampler)
    wanted = theirs(
        list(images), [one | {"boxes": one["boxes"].double(), "labels": one["labels"] + 1} for one in targets]
    )
    names = {"objectness": "loss_objectness", "proposal_box": "loss_rpn_box_reg"}
    names |= {"class": "loss_classifier", "box": "loss_box_reg"}
    for name, theirs_name in names.items():
        part = theirs.rpn if "rpn" in theirs_name or "obj" in theirs_name else theirs.roi_heads
        drawn = part.fg_bg_sampler.count / (EVERYTHING * len(images))
        torch.testing.assert_close(terms[name].sum(), wanted[theirs_name].detach().double() * drawn, rtol=1e-6, atol=0)
    if masks:
        torch.testing.assert_close(terms["mask"].sum(), wanted["loss_mask"].detach(), rtol=1e-6, atol=0)


def test_detections_are_torchvisions():
    ours, theirs = both(masks=True)
    images = images_of(2)
    with torch.no_grad():
        wanted = theirs(list(images))
    found = ours.detect(images, torch.tensor([[192, 128]] * 2))
    for one, other in zip(found, wanted, strict=True):
        assert len(one["boxes"]) == len(other["boxes"]) > 0
        torch.testing.assert_close(one["scores"], other["scores"])
        torch.testing.assert_close(one["boxes"], other["boxes"])
        assert torch.equal(one["labels"] + 1, other["labels"])
        assert one["masks"].shape == (len(one["boxes"]), 28, 28) and one["masks"].min() >= 0
        assert one["masks"].max() <= 1
