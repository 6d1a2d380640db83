"""Box functions without waits compute what torchvision and transformers compute, gradients included."""

import pytest
import torch
from torchvision.models.detection import _utils
from torchvision.ops import batched_nms, generalized_box_iou_loss

from common.detection.models.boxes import BoxCoder, filled, overlaps, suppress
from common.detection.models.detectors import build_detector
from common.detection.models.detr import _Outputs
from common.detection.models.spec import DetectorSpec


def drawn(count, seed=0, dtype=torch.float64):
    """Boxes [n, 4] of which some touch, some are alike, and some are points."""
    corners = torch.randint(0, 12, (count, 2, 2), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return torch.cat([corners.amin(1), corners.amax(1)], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generalised_overlaps_are_torchvisions_to_the_bit(dtype):
    boxes, others = (drawn(4000, seed, dtype).requires_grad_() for seed in (1, 2))
    theirs = generalized_box_iou_loss(boxes, others)
    wanted = torch.autograd.grad(theirs.sum(), (boxes, others))
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    mine = 1 - overlaps(boxes, others, eps=1e-7)[1]
    assert torch.equal(mine, theirs)
    for gradient, other in zip(torch.autograd.grad(mine.sum(), (boxes, others)), wanted, strict=True):
        torch.testing.assert_close(gradient, other, **close)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)])
def test_boxes_are_coded_as_torchvision_codes_them_to_the_bit(weights):
    ours, theirs = BoxCoder(weights), _utils.BoxCoder(weights)
    boxes, others = drawn(500, 1, torch.float32) + 1.5, drawn(500, 2, torch.float32)
    boxes[:, 2:] += 1
    others[:, 2:] += 1
    assert torch.equal(ours.encode_single(boxes, others), theirs.encode_single(boxes, others))
    codes = 4 * torch.randn(500, 12, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ours.decode_single(codes, others), theirs.decode_single(codes, others))


@pytest.mark.parametrize("count", [0, 1, 300, 2000])
def test_suppression_is_torchvisions(count):
    boxes = drawn(count) + 0.25 * drawn(count, 5)
    scores = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    groups = torch.arange(count) % 3
    assert torch.equal(suppress(boxes, scores, groups, 0.4), batched_nms(boxes, scores, groups, 0.4))


@pytest.mark.parametrize("bad", ["none", "some", "all"])
def test_proposals_without_a_side_are_left_out(bad):
    """As if they were left out before the suppression, of which they take no part."""
    spec = DetectorSpec("faster_rcnn", "test_resnet", 2, levels=(3, 4), width=32, hidden=8)
    proposals = build_detector(spec).rpn.double()
    anchors = drawn(60) * 4 + filled((0, 0, 3, 5), drawn(1))
    proposals.anchors.level_lengths = lambda canvas: [40, 20]
    deltas = torch.randn(1, 60, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / 4
    without = {"none": [], "some": range(0, 60, 3), "all": range(60)}[bad]
    deltas[0, [*without], 2] = -100.0  # as thin as a hair
    objectness = torch.randn(1, 60, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    size = torch.tensor([60, 50])
    ((boxes, which),) = proposals.select((objectness, deltas, anchors), (64, 64), [size])

    levels = zip(objectness[0].split([40, 20]), (0, 40), strict=True)
    order = torch.cat([part.argsort(descending=True) + start for part, start in levels])
    decoded = _utils.BoxCoder((1.0, 1.0, 1.0, 1.0)).decode_single(deltas[0, order], anchors[order])
    decoded = torch.minimum(decoded.clamp(min=0), size.repeat(2))
    good = (decoded[:, 2:] - decoded[:, :2] >= 1e-3).all(1)
    assert good.any() == (bad != "all")
    decoded, order = decoded[good], order[good]
    keep = batched_nms(decoded, objectness[0, order].sigmoid(), (order >= 40).long(), 0.7)
    assert torch.equal(boxes, decoded[keep]) and torch.equal(which, order[keep])


def test_queries_and_boxes_are_matched_as_transformers_matches_them():
    """Images with any number of boxes, also none or more than queries; with predictions that are not finite."""
    matching = pytest.importorskip("transformers.loss.loss_rt_detr")
    detector = build_detector(DetectorSpec("rtdetr_v2", "test_resnet", 5, width=32))
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(4, 2, 8, 5, generator=generator)
    boxes = torch.rand(4, 2, 8, 4, generator=generator) * 0.5 + 0.1
    logits[0, 0, 3, 2], boxes[1, 1, 5, 0] = float("nan"), float("inf")
    counts = [3, 0, 11, 1]
    wanted = [torch.rand(count, 4, generator=generator) * 0.5 + 0.1 for count in counts]
    labels = [torch.randint(5, (count,), generator=generator) for count in counts]
    targets = [torch.nn.functional.pad(x, (0, 0, 0, 12 - len(x))) for x in wanted]
    ids = [torch.nn.functional.pad(x, (0, 12 - len(x))) for x in labels]
    match = detector._match(_Outputs(logits, boxes), torch.stack(targets), torch.stack(ids), counts)

    theirs = matching.RTDetrHungarianMatcher(detector.config)
    for image in range(4):
        outputs = {"logits": logits[image].nan_to_num(), "pred_boxes": boxes[image].nan_to_num(0).clamp(0, 1)}
        expected = torch.full((2, 8), -1)
        if counts[image]:
            pairs = theirs(outputs, [{"class_labels": labels[image], "boxes": wanted[image]}] * 2)
            for row, (query, box) in zip(expected, pairs, strict=True):
                row[query] = box
        assert torch.equal(match[image], expected)
        assert (expected >= 0).sum() == 2 * min(8, counts[image])
