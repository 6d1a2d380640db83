"""RetinaNet agrees with torchvision's where their definitions coincide, and decodes its outputs rightly."""

from functools import partial

import torch
from torch import nn
from torchvision.models.detection import RetinaNet as TorchvisionRetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import box_iou

from common.detection.models.anchors import match
from common.detection.models.detectors import build_detector
from common.detection.models.spec import DetectorSpec
from tests.detection.models.pieces import CANVAS, LEVELS, OrderedMaps, scene


def both():
    ours = build_detector(DetectorSpec("retinanet", "test_resnet", 4, levels=LEVELS, width=32, seed=2)).double().eval()
    sizes = tuple((4 * 2**n, int(4 * 2**n * 2 ** (1 / 3)), int(4 * 2**n * 2 ** (2 / 3))) for n in range(3, 7))
    theirs = TorchvisionRetinaNet(
        OrderedMaps(ours.backbone),
        4,
        min_size=CANVAS[0],
        max_size=CANVAS[1],
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 4),
        head=RetinaNetHead(32, 9, 4, partial(nn.GroupNorm, 32)),
        detections_per_img=100,
    )
    theirs.load_state_dict(ours.state_dict())  # strict: the names are the same
    return ours, theirs.double().eval()


def test_losses_are_torchvisions_on_one_whole_batch():
    ours, theirs = both()
    images = torch.randn(4, 3, *CANVAS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = [scene(count) for count in (3, 0, 9, 1)]
    _, terms = ours(images, targets, ours.counts(targets, CANVAS))
    theirs.train()
    theirs.backbone.eval()
    wanted = theirs(list(images), [{key: one[key].clone() for key in ("boxes", "labels")} for one in targets])
    for name, theirs_name in {"class": "classification", "box": "bbox_regression"}.items():
        torch.testing.assert_close(terms[name].sum(), wanted[theirs_name].detach(), rtol=1e-6, atol=0)


def test_detections_are_torchvisions():
    ours, theirs = both()
    with torch.no_grad():
        for model in (ours, theirs):
            model.head.classification_head.cls_logits.bias.fill_(-0.5)
        images = torch.randn(2, 3, *CANVAS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        wanted = theirs(list(images))
    found = ours.detect(images, torch.tensor([[192, 128]] * 2))
    for one, other in zip(found, wanted, strict=True):
        assert len(one["boxes"]) == len(other["boxes"]) == 100
        for key in ("scores", "boxes", "labels"):
            torch.testing.assert_close(one[key], other[key])


class Perfect(nn.Module):
    """A head that answers what the targets ask for."""

    def __init__(self, detector, targets):
        super().__init__()
        self.classification_head = detector.head.classification_head  # where the dtype is read
        anchors = detector.anchors(CANVAS, torch.float32, torch.device("cpu"))
        logits, deltas = [], []
        for target in targets:
            boxes, which, foreground, _ = match(
                anchors, target, torch.tensor([192, 128]), foreground_iou=0.5, background_iou=0.4, rescue=True
            )
            labels = nn.functional.pad(target["labels"], (0, 1))[which]
            logits.append(torch.where(nn.functional.one_hot(labels, 4).bool() & foreground[:, None], 20.0, -20.0))
            wanted = torch.where(foreground[:, None], boxes, anchors)
            deltas.append(detector.coder.encode_single(wanted, anchors))
        self.answer = {"cls_logits": torch.stack(logits), "bbox_regression": torch.stack(deltas)}

    def forward(self, _):
        return self.answer


def test_perfect_outputs_are_perfect_boxes_also_under_bf16():
    detector = build_detector(DetectorSpec("retinanet", "test_resnet", 4, levels=LEVELS, width=32)).eval()
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
            overlap, which = box_iou(wanted["boxes"], one["boxes"]).max(1)
            assert overlap.min() > 0.999
            assert torch.equal(one["labels"][which], wanted["labels"])


def test_anchors_in_a_crowd_region_are_no_background_but_boxes_within_it_count():
    places = torch.tensor([[0.0, 0, 10, 10], [-10, 0, 10, 20], [30, 30, 40, 40], [8, 0, 18, 10], [60, 60, 70, 70]])
    target = {
        "boxes": torch.tensor([[0.0, 0, 45, 45], [30, 30, 40, 41]]),
        "labels": torch.tensor([0, 1]),
        "crowd": torch.tensor([True, False]),
    }
    rule = {"foreground_iou": 0.5, "background_iou": 0.4}
    _, which, foreground, ignored = match(places, target, torch.tensor([64, 64]), **rule)
    assert foreground.tolist() == [False, False, True, False, False] and which[2] == 1
    assert ignored.tolist() == [True, True, False, True, False]


def test_a_box_that_no_anchor_touches_does_not_claim_them_all():
    places = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    target = {"boxes": torch.tensor([[50.0, 50, 60, 60]]), "labels": torch.tensor([0]), "crowd": torch.tensor([False])}
    rule = {"foreground_iou": 0.5, "background_iou": 0.4, "rescue": True}
    assert not match(places, target, torch.tensor([64, 64]), **rule)[2].any()
