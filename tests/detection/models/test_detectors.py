"""Every family of detectors keeps the promises of `Detector`."""

import contextlib
import copy
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.detection.models.detectors import FAMILIES, build_detector
from common.detection.models.detr_models import TRANSFORMERS_FAMILIES
from common.detection.models.spec import DetectorSpec
from common.training import batch_norm
from tests.harness import small_rf_detr

CANVAS = (64, 96)  # H, W
CLASSES = 3
EVERY = pytest.mark.parametrize("family", [*FAMILIES, *TRANSFORMERS_FAMILIES])


def build(family, classes, **options):
    if family in small_rf_detr.FAMILIES:
        return small_rf_detr.build(classes, family, **options)
    return build_detector(DetectorSpec(family, "test_resnet", classes, width=64, **options))


def make(family):
    """A small detector that has moved off its initial weights, where many scores are alike."""
    return copy.deepcopy(_build(family))


@functools.cache
def _build(family):
    options = {"hidden": 64} if "rcnn" in family else {}
    options |= {"mask_width": 16} if family == "mask_rcnn" else {}
    detector = build(family, CLASSES, seed=1, **options)
    if "rcnn" in family:  # few are drawn, so that it matters which
        detector.num_samples = 32
        detector.rpn.num_samples = 32
    batch_norm.convert_batch_norm(detector, "frozen")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in detector.parameters():
            if parameter.dim() > 1:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return detector


def build_target(position, boxes=(), labels=(), crowd=None):
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "masks": (torch.arange(len(labels) * CANVAS[0] * CANVAS[1]) % 3 == 0)
        .view(-1, *CANVAS)
        .byte(),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "crowd": torch.tensor(crowd or [False] * len(labels), dtype=torch.bool),
        "position": position,
        "size": torch.tensor([90, 60]),
    }


def build_five():
    """Images and targets: one without boxes, one with a crowd region, one that is only crowd."""
    images = torch.randn(5, 3, *CANVAS, generator=torch.Generator().manual_seed(3))
    targets = [
        build_target(40, [[3, 4, 30, 40], [20, 10, 60, 55]], [0, 2]),
        build_target(41),
        build_target(42, [[10, 10, 24, 22], [40, 5, 88, 58]], [1, 1], [False, True]),
        build_target(43, [[30, 20, 80, 50]], [0], [True]),
        build_target(44, [[5, 5, 15, 15], [6, 6, 40, 30], [50, 30, 70, 58]], [0, 1, 2]),
    ]
    return images, targets


def run(detector, images, targets, split):
    """Losses [5], terms and summed gradients of images in shares of the sizes `split`."""
    detector.zero_grad()
    remaining_targets = iter(targets)
    shares = [(some, [next(remaining_targets) for _ in some]) for some in images.split(split)]
    totals = sum(detector.count_divisors(share, CANVAS) for _, share in shares)
    losses_by_share = [detector.compute_losses(some, share, totals) for some, share in shares]
    losses = torch.cat([loss for loss, _ in losses_by_share])
    losses.sum().backward()
    terms = {
        name: torch.cat([parts[name] for _, parts in losses_by_share])
        for name in losses_by_share[0][1]
    }
    learnt = [
        (name, parameter)
        for name, parameter in detector.named_parameters()
        if parameter.requires_grad
    ]
    return losses.detach(), terms, {name: parameter.grad.clone() for name, parameter in learnt}


@EVERY
def test_losses_do_not_depend_on_the_split_of_the_batch(family):
    detector = make(family).double()
    images, targets = build_five()
    whole, terms, gradients = run(detector, images.double(), targets, [5])
    assert whole.dtype == torch.float64 and whole.min() > 0
    torch.testing.assert_close(sum(terms.values()), whole, rtol=1e-12, atol=1e-12)
    losses, _, logged = run(detector, images.double(), targets, [1, 3, 1])
    torch.testing.assert_close(losses, whole, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(logged[name], gradient, rtol=1e-9, atol=1e-11, msg=name)


@EVERY
def test_crowds_and_images_without_boxes_are_learnt_from(family):
    """The latter are all background. An image that is all crowd teaches nothing but boxes within."""
    detector = make(family)
    images, _ = build_five()
    everywhere = [0, 0, CANVAS[1], CANVAS[0]]
    within = [20, 10, 60, 55]
    inside = build_target(1, [everywhere, within], [1, 0], [True, False])
    crowds = [build_target(1, [everywhere], [1], [True]), build_target(1), inside]
    losses, terms, gradients = run(detector, images[:3], crowds, [3])
    assert losses[0] == 0 < losses[1] and losses.isfinite().all()
    assert terms["box"][2] > 0 and terms["class"][2] > 0
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@EVERY
def test_half_precision_stays_in_the_network(family):
    """Under bf16 autocast losses and boxes are float32 and close to what they are without."""
    detector = make(family)
    detector.score_threshold = 0.0
    images, targets = build_five()
    exact, _ = detector.compute_losses(images, targets, detector.count_divisors(targets, CANVAS))
    with torch.autocast("cpu", torch.bfloat16):
        losses, _ = detector.compute_losses(
            images, targets, detector.count_divisors(targets, CANVAS)
        )
        detections = detector.eval().detect(images[:2], torch.tensor([[90, 60]] * 2))
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, exact, rtol=0.1, atol=0.05)
    for detection in detections:
        assert detection["boxes"].dtype == detection["scores"].dtype == torch.float32
        # Nor were they rounded on the way.
        assert not torch.equal(detection["boxes"], detection["boxes"].bfloat16().float())


class Singles(TorchDispatchMode):
    """Refuses float64, except arrays of the host, which are converted before they are sent."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function is not torch.ops.aten.lift_fresh.default:
            assert not any(
                getattr(x, "dtype", None) == torch.float64 for x in tree_leaves(result)
            ), function
        return result


@EVERY
def test_double_precision_is_not_used_unless_it_is_asked_for(family):
    """Apple's devices have none. The second time: transformers makes positions once."""
    detector = make(family)
    images, targets = build_five()
    for watch in (contextlib.nullcontext(), Singles()):
        with watch:
            run(detector, images[2:3], targets[2:3], [1])
            detector.detect(images[:1], torch.tensor([[90, 60]]))


@EVERY
def test_detections_are_sorted_and_inside_the_image(family):
    """Boxes of the DETRs are not clipped, as in transformers, and each query gives one."""
    detector, (images, _) = make(family).eval(), build_five()
    detector.score_threshold = 0.0
    limit = 100 if family in FAMILIES else detector.model.config.num_queries
    sizes = torch.tensor([[90, 60], [50, 64], [96, 30]])
    for detection, size in zip(detector.detect(images[:3], sizes), sizes, strict=True):
        boxes = detection["boxes"]
        labels = detection["labels"]
        assert 0 < len(boxes) <= limit and (detection["scores"].diff() <= 0).all()
        assert set(labels.tolist()) <= {0, 1, 2} and labels.dtype == torch.int64
        assert (boxes[:, 2:] >= boxes[:, :2]).all()
        if family in FAMILIES:
            assert (boxes >= 0).all() and (boxes <= size.repeat(2)).all()
