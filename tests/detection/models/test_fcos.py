"""FCOS agrees with torchvision's where their definitions coincide, and decodes its outputs rightly."""

import torch
from torch import nn
from torchvision.models.detection import FCOS as TorchvisionFCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead
from torchvision.ops import box_iou

from common.detection.models.detectors import build_detector
from common.detection.models.spec import DetectorSpec
from tests.detection.models.pieces import CANVAS, LEVELS, OrderedMaps, scene


def both():
    ours = (
        build_detector(DetectorSpec("fcos", "test_resnet", 4, levels=LEVELS, width=32, convolutions=2, seed=2))
        .double()
        .eval()
    )
    nn.init.normal_(ours.head.regression_head.bbox_reg.bias, mean=2.0, std=0.5)
    anchors = AnchorGenerator(tuple((2**level,) for level in range(3, 7)), ((1.0,),) * 4)
    theirs = TorchvisionFCOS(
        OrderedMaps(ours.backbone),
        4,
        min_size=CANVAS[0],
        max_size=CANVAS[1],
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        anchor_generator=anchors,
        head=FCOSHead(32, 1, 4, 2),
        score_thresh=0.05,
    )
    theirs.double().eval()
    theirs.load_state_dict(ours.state_dict())  # strict: the names are the same
    return ours, theirs


def test_losses_are_torchvisions_on_one_whole_batch():
    """Also the names of the parameters: its model loads ours, and so does a script without our code."""
    ours, theirs = both()
    images = torch.randn(4, 3, *CANVAS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = [scene(count) for count in (3, 0, 9, 1)]
    _, terms = ours(images, targets, ours.counts(targets, CANVAS))
    theirs.train()  # GroupNorm does not mind; the backbone's batch norms stay as they are
    theirs.backbone.eval()
    wanted = theirs(list(images), [{key: one[key].clone() for key in ("boxes", "labels")} for one in targets])
    names = {"class": "classification", "box": "bbox_regression", "centerness": "bbox_ctrness"}
    for name, theirs_name in names.items():
        torch.testing.assert_close(terms[name].sum(), wanted[theirs_name].detach(), rtol=1e-6, atol=0)


def test_detections_are_torchvisions():
    ours, theirs = both()
    with torch.no_grad():
        ours.head.classification_head.cls_logits.bias.fill_(-0.5)
        theirs.head.classification_head.cls_logits.bias.fill_(-0.5)
        images = torch.randn(2, 3, *CANVAS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        wanted = theirs(list(images))
    found = ours.detect(images, torch.tensor([[192, 128]] * 2))
    for one, other in zip(found, wanted, strict=True):
        assert len(one["boxes"]) == len(other["boxes"]) == 100
        for key in ("scores", "boxes", "labels"):
            torch.testing.assert_close(one[key], other[key])


class Perfect(nn.Module):
    """A head that answers what the targets ask for, in the precision that autocast gives a network."""

    def __init__(self, detector, targets):
        super().__init__()
        self.classification_head = detector.head.classification_head  # where the dtype is read
        points, strides, reach = detector._places(CANVAS, torch.device("cpu"))
        boxes, labels, foreground, _ = zip(
            *(detector._assign(points, strides, reach, one) for one in targets), strict=True
        )
        boxes, labels, foreground = torch.stack(boxes), torch.stack(labels), torch.stack(foreground)[..., None]
        sides = torch.cat([points - boxes[..., :2], boxes[..., 2:] - points], -1) / strides[:, None]
        self.answer = {
            "cls_logits": torch.where(nn.functional.one_hot(labels, 4).bool() & foreground, 20.0, -20.0),
            "bbox_regression": torch.where(foreground, sides, 0),
            "bbox_ctrness": torch.full((*sides.shape[:2], 1), 20.0),
        }

    def forward(self, _):
        return self.answer


def test_perfect_outputs_are_perfect_boxes_also_under_bf16():
    detector = build_detector(DetectorSpec("fcos", "test_resnet", 4, levels=LEVELS, width=32)).eval()
    targets = [scene(6), scene(0), scene(2)]
    detector.head = Perfect(detector, targets)
    images = torch.zeros(3, 3, *CANVAS)
    with torch.autocast("cpu", torch.bfloat16):
        _, terms = detector(images, targets, detector.counts(targets, CANVAS))
        found = detector.detect(images, torch.tensor([[192, 128]] * 3))
    assert terms["class"].sum() < 1e-6 and terms["box"].sum() < 1e-5
    for one, wanted in zip(found, targets, strict=True):
        assert len(one["boxes"]) == len(wanted["boxes"])
        if len(one["boxes"]):
            overlap, match = box_iou(wanted["boxes"], one["boxes"]).max(1)
            assert overlap.min() > 0.9999
            assert torch.equal(one["labels"][match], wanted["labels"])


def test_a_crowd_region_is_no_background_but_boxes_within_it_count():
    detector = build_detector(DetectorSpec("fcos", "test_resnet", 4, levels=(3, 3), width=32))
    places = detector._places((64, 64), torch.device("cpu"))
    region, within = [8.0, 8.0, 56.0, 56.0], [24.0, 24.0, 40.0, 40.0]
    target = {
        "boxes": torch.tensor([region, within]),
        "labels": torch.tensor([1, 2]),
        "crowd": torch.tensor([True, False]),
    }
    _, labels, foreground, ignored = detector._assign(*places, target)
    foreground, ignored = foreground.view(8, 8), ignored.view(8, 8)
    assert foreground.sum() == 1 and foreground[4, 4] and labels.view(8, 8)[4, 4] == 2  # the point strictly inside
    assert ignored[1:8, 1:8].sum() == 48 and ignored.sum() == 48 and not ignored[4, 4]


def test_every_size_belongs_to_some_level():
    """A box whose far side is exactly at a boundary is not lost between two levels."""
    detector = build_detector(DetectorSpec("fcos", "test_resnet", 4, levels=(3, 5), width=32))
    target = {
        "boxes": torch.tensor([[64.0, 64.0, 192.0, 192.0]]),  # 64 from its centre: the boundary of levels 3 and 4
        "labels": torch.tensor([0]),
        "crowd": torch.tensor([False]),
    }
    places = detector._places((256, 256), torch.device("cpu"))
    assert detector._assign(*places, target)[2][places[0].eq(128).all(1)].tolist() == [False, True, False]
