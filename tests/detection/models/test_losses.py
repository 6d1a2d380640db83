"""FCOS, RetinaNet and R-CNNs have torchvision's losses where their definitions coincide.

That they find the same boxes is tested with a run's export (test_export) and with torchvision's
weights (weights/).
"""

import pytest
import torch
from torchvision.models import get_model_builder
from torchvision.models.detection import _utils

from common.detection.models.anchors import draw_integers, match_boxes, sample_balanced
from common.detection.models.boxes import BoxCoder
from common.detection.models.detectors import build_detector
from common.detection.models.rcnn import RPNOutputs
from common.detection.models.spec import DetectorSpec
from tests.detection.models.pieces import CANVAS, build_scene

EVERYTHING = 20_000  # more than there are anchors and proposals: nothing is left to chance
NAMES = {
    "fcos": {"class": "classification", "box": "bbox_regression", "centerness": "bbox_ctrness"},
    "retinanet": {"class": "classification", "box": "bbox_regression"},
    "faster_rcnn": {
        "objectness": "loss_objectness",
        "proposal_box": "loss_rpn_box_reg",
        "class": "loss_classifier",
        "box": "loss_box_reg",
    },
}
NAMES["mask_rcnn"] = NAMES["faster_rcnn"] | {"mask": "loss_mask"}


class Counting:
    """torchvision's sampler, which remembers how many it drew: torchvision divides by this."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __call__(self, matched):
        drawn = self.sampler(matched)
        self.count = sum(int(mask.sum()) for kind in drawn for mask in kind)
        return drawn


@pytest.mark.parametrize("family", NAMES)
def test_losses_are_torchvisions_on_one_whole_batch(family):
    """R-CNNs: up to the divisor, the number that torchvision drew. Masks: of one image."""
    two_stages = "rcnn" in family
    options = {
        "min_size": CANVAS[0],
        "max_size": CANVAS[1],
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
    }
    for stage in ("rpn", "box") if two_stages else ():
        options |= {f"{stage}_batch_size_per_image": EVERYTHING, f"{stage}_positive_fraction": 1.0}
    options |= {f"rpn_{order}_nms_top_n_train": 200 for order in ("pre", "post") if two_stages}
    make = get_model_builder(f"{family.replace('_', '')}_resnet50_fpn")
    torch.manual_seed(0)
    reference = (
        make(weights=None, weights_backbone=None, num_classes=4 + two_stages, **options)
        .double()
        .train()
    )
    ours = (
        build_detector(DetectorSpec(family, "resnet50", 4, variant="torchvision")).double().train()
    )
    ours.load_state_dict(
        {
            key.replace(".body.", ".features."): value
            for key, value in reference.state_dict().items()
        }
    )
    for model in (ours, reference):
        model.backbone.eval()  # batch norms stay as they are
    for part in (ours, ours.rpn) if two_stages else ():
        part.num_samples = EVERYTHING
        part.foreground_share = 1.0
        part.train_top_n = 200
    counts = {"mask_rcnn": (5,), "faster_rcnn": (3, 0, 6)}.get(family, (3, 0, 9, 1))
    images = torch.randn(
        len(counts), 3, *CANVAS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    targets = [build_scene(count) for count in counts]
    for target, count in zip(targets, counts, strict=True):
        target["masks"] = (
            torch.rand(count, *CANVAS, generator=torch.Generator().manual_seed(1)).round().byte()
        )
    stages = (reference.rpn, reference.roi_heads) if two_stages else ()
    for stage in stages:
        stage.fg_bg_sampler = Counting(stage.fg_bg_sampler)
    with torch.no_grad():
        _, terms = ours.compute_losses(images, targets, ours.count_divisors(targets, CANVAS))
        for target in targets:
            target["labels"] = target["labels"] + two_stages
            target["boxes"] = target["boxes"].double() if two_stages else target["boxes"]
        reference_losses = reference(list(images), targets)
    for name, theirs_name in NAMES[family].items():
        share = 1.0
        if two_stages and name != "mask":
            stage = stages[0] if name in ("objectness", "proposal_box") else stages[1]
            share = stage.fg_bg_sampler.count / (EVERYTHING * len(images))
        expected = reference_losses[theirs_name].double() * share
        assert expected > 0
        torch.testing.assert_close(terms[name].sum(), expected, rtol=1e-6, atol=0, msg=name)


def build_target(boxes, crowd):
    return {
        "boxes": torch.tensor(boxes),
        "labels": torch.arange(len(boxes)) + 1,
        "crowd": torch.tensor(crowd),
    }


def test_a_box_that_no_anchor_touches_claims_none():
    anchors = torch.tensor([[-20.0, 0, 20, 10], [0, 0, 30, 10]])
    boxes = build_target([[0.0, 0, 10, 10], [50, 50, 60, 60]], [True, False])
    matches = match_boxes(anchors, boxes, torch.tensor([64, 64]), 0.5, 0.4, allow_low_quality=True)
    # Of the first, the half inside counts.
    assert not matches.foreground.any() and matches.ignored.tolist() == [True, False]


def test_a_sample_has_its_share_of_foreground():
    kinds = torch.arange(60) % 3  # foreground, background, neither
    for size, counts in ((8, (2, 6)), (40, (10, 20))):
        chosen, valid = sample_balanced(
            kinds == 0, kinds == 1, draw_integers(torch.arange(60), 7), size, 0.25
        )
        drawn = chosen[valid]
        assert len(set(drawn.tolist())) == len(drawn) and (kinds[drawn[: counts[0]]] == 0).all()
        assert [int((kinds[drawn] == kind).sum()) for kind in range(3)] == [*counts, 0]


def test_rounding_does_not_choose_among_equal_proposals():
    """In a plain area all anchors have one score, up to errors that depend on the micro-batch."""
    rpn = build_detector(
        DetectorSpec("faster_rcnn", "test_resnet", 4, levels=(3, 4), width=32, hidden=32)
    ).rpn
    anchors = rpn.anchors((256, 256), torch.float64, torch.device("cpu"))
    errors = 1e-12 * torch.randn(
        2, len(anchors), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    deltas = torch.zeros(2, len(anchors), 4, dtype=torch.float64)
    outputs = RPNOutputs(0.1 + errors, deltas, anchors)
    assert max(rpn.anchors.count_per_level((256, 256))) > rpn.train_top_n, (
        "also decides who is a candidate"
    )
    first, second = rpn.select_proposals(outputs, (256, 256), [torch.tensor([200, 160])] * 2)
    assert first.anchor_ids.tolist() == second.anchor_ids.tolist()


def test_every_size_belongs_to_some_level():
    detector = build_detector(DetectorSpec("fcos", "test_resnet", 4, levels=(3, 5), width=32))
    # 64 from its centre: the boundary of levels 3 and 4.
    boxes = build_target([[64.0, 64.0, 192.0, 192.0]], [False])
    points = detector._create_points((256, 256), torch.device("cpu"))
    is_centre = points.centres.eq(128).all(1)
    foreground = detector._assign_boxes(points, boxes).foreground
    assert foreground[is_centre].tolist() == [False, True, False]


def test_boxes_are_decoded_as_by_torchvision() -> None:
    """With weights that differ between shifts and sides, also where the sides are limited."""
    generator = torch.Generator().manual_seed(0)
    references = build_scene(6)["boxes"].double()
    codes = 20 * torch.randn(6, 8, dtype=torch.float64, generator=generator)
    weights = (10.0, 10.0, 5.0, 5.0)
    actual = BoxCoder(weights).decode_single(codes, references)
    expected = _utils.BoxCoder(weights).decode_single(codes, references)
    torch.testing.assert_close(actual, expected)
