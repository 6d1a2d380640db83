"""FCOS, RetinaNet and R-CNNs have torchvision's losses where their definitions coincide.

That they find the same boxes is tested with a run's export (test_export) and with torchvision's weights (weights/).
"""

from functools import partial

import pytest
import torch
from torch import nn
from torchvision.models import detection
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import MultiScaleRoIAlign

from common.detection.models.anchors import draws_of, match, sample
from common.detection.models.detectors import build_detector
from common.detection.models.spec import DetectorSpec
from tests.detection.models.pieces import CANVAS, scene

EVERYTHING = 20_000  # more than there are anchors and proposals: nothing is left to chance
RATIOS = ((0.5, 1.0, 2.0),) * 4
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


class OrderedMaps(nn.Module):
    """Our backbone as torchvision wants one."""

    def __init__(self, backbone):
        super().__init__()
        self.features, self.fpn, self.out_channels = backbone.features, backbone.fpn, backbone.width
        self.maps = partial(type(backbone).forward, backbone)

    def forward(self, images):
        return dict(enumerate(self.maps(images)))


class Counting:
    """torchvision's sampler, which remembers how many it drew: torchvision divides by this."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __call__(self, matched):
        drawn = self.sampler(matched)
        self.count = sum(int(one.sum()) for kind in drawn for one in kind)
        return drawn


def theirs_of(family, backbone):
    """torchvision's detector on our backbone."""
    levels = range(3, 7)
    if family == "fcos":
        anchors = AnchorGenerator(tuple((2**level,) for level in levels), ((1.0,),) * 4)
        make, parts = detection.FCOS, {"anchor_generator": anchors, "head": FCOSHead(32, 1, 4, 2)}
    elif family == "retinanet":
        sizes = tuple(tuple(int(4 * 2**n * 2 ** (third / 3)) for third in range(3)) for n in levels)
        make, parts = detection.RetinaNet, {"anchor_generator": AnchorGenerator(sizes, RATIOS)}
        parts["head"] = RetinaNetHead(32, 9, 4, partial(nn.GroupNorm, 32))
    else:
        make, parts = detection.FasterRCNN, {"box_roi_pool": MultiScaleRoIAlign([0, 1, 2], 7, 2)}
        parts |= {"rpn_anchor_generator": AnchorGenerator(tuple((8 * 2**n,) for n in levels), RATIOS)}
        parts |= {"box_head": TwoMLPHead(32 * 49, 48), "box_predictor": FastRCNNPredictor(48, 5)}
        for stage in ("rpn", "box"):
            parts |= {f"{stage}_batch_size_per_image": EVERYTHING, f"{stage}_positive_fraction": 1.0}
        if family == "mask_rcnn":
            make = detection.MaskRCNN
            parts |= {"mask_roi_pool": MultiScaleRoIAlign([0, 1, 2], 14, 2)}
            parts |= {"mask_head": MaskRCNNHeads(32, (8,) * 4, 1), "mask_predictor": MaskRCNNPredictor(8, 8, 5)}
    sizes = {"min_size": CANVAS[0], "max_size": CANVAS[1], "image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    classes = () if "rcnn" in family else (4,)
    return make(OrderedMaps(backbone), *classes, **sizes, **parts).double()


@pytest.mark.parametrize("family", NAMES)
def test_losses_are_torchvisions_on_one_whole_batch(family):
    """Also the names of the parameters: its model loads ours, and so does a script without our code.

    R-CNNs: up to the divisor, where torchvision takes what it happened to draw. Masks: of one image, as ours are per image.
    """
    options = {"hidden": 48, "mask_width": 8} if "rcnn" in family else {}
    convolutions = 2 if family == "fcos" else 4
    spec = DetectorSpec(family, "test_resnet", 4, levels=(3, 6), width=32, convolutions=convolutions, seed=2, **options)
    ours = build_detector(spec).double().train()
    theirs = theirs_of(family, ours.backbone)
    theirs.load_state_dict(ours.state_dict())  # strict: the names are the same
    theirs.train()
    for model in (ours, theirs):
        model.backbone.eval()  # batch norms stay as they are
    two_stages = "rcnn" in family
    for part in (ours, ours.rpn) if two_stages else ():
        part.drawn, part.foreground_share = EVERYTHING, 1.0
    counts = {"mask_rcnn": (5,), "faster_rcnn": (3, 0, 6)}.get(family, (3, 0, 9, 1))
    images = torch.randn(len(counts), 3, *CANVAS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = [scene(count) for count in counts]
    for target, count in zip(targets, counts, strict=True):
        target["masks"] = torch.rand(count, *CANVAS, generator=torch.Generator().manual_seed(1)).round().byte()
    _, terms = ours.losses(images, targets, ours.counts(targets, CANVAS))
    stages = (theirs.rpn, theirs.roi_heads) if two_stages else ()
    for stage in stages:
        stage.fg_bg_sampler = Counting(stage.fg_bg_sampler)
    boxes = [one["boxes"].double() if two_stages else one["boxes"].clone() for one in targets]
    labels = [one["labels"] + two_stages for one in targets]
    masks = [one["masks"] for one in targets]
    columns = zip(boxes, labels, masks, strict=True)
    wanted = theirs(list(images), [dict(zip(("boxes", "labels", "masks"), row, strict=True)) for row in columns])
    for name, theirs_name in NAMES[family].items():
        share = 1.0
        if two_stages and name != "mask":
            stage = stages[0] if name in ("objectness", "proposal_box") else stages[1]
            share = stage.fg_bg_sampler.count / (EVERYTHING * len(images))
        expected = wanted[theirs_name].detach().double() * share
        torch.testing.assert_close(terms[name].sum(), expected, rtol=1e-6, atol=0, msg=name)


def target(boxes, crowd):
    return {"boxes": torch.tensor(boxes), "labels": torch.arange(len(boxes)) + 1, "crowd": torch.tensor(crowd)}


def test_a_box_that_no_anchor_touches_claims_none_and_half_in_a_crowd_region_is_ignored():
    places, rule = torch.tensor([[-20.0, 0, 20, 10], [0, 0, 30, 10]]), {"foreground_iou": 0.5, "background_iou": 0.4}
    boxes = target([[0.0, 0, 10, 10], [50, 50, 60, 60]], [True, False])
    *_, foreground, ignored = match(places, boxes, torch.tensor([64, 64]), **rule, rescue=True)
    assert not foreground.any() and ignored.tolist() == [True, False]  # of the first, the half inside counts


def test_a_sample_has_foreground_first_up_to_its_share_and_background_for_the_rest():
    kinds = torch.arange(60) % 3  # foreground, background, neither
    for size, counts in ((8, (2, 6)), (40, (10, 20))):
        chosen, valid = sample(kinds == 0, kinds == 1, draws_of(torch.arange(60), 7), size, 0.25)
        drawn = chosen[valid]
        assert len({*drawn.tolist()}) == len(drawn) and (kinds[drawn[: counts[0]]] == 0).all()
        assert [int((kinds[drawn] == kind).sum()) for kind in range(3)] == [*counts, 0]


def test_rounding_errors_do_not_decide_which_of_equal_proposals_stay():
    """In a plain area all anchors have one score in exact arithmetic; the rest depends on the size of the micro-batch."""
    rpn = build_detector(DetectorSpec("faster_rcnn", "test_resnet", 4, levels=(3, 4), width=32, hidden=32)).rpn
    anchors = rpn.anchors((256, 256), torch.float64, torch.device("cpu"))
    errors = 1e-12 * torch.randn(2, len(anchors), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = 0.1 + errors, torch.zeros(2, len(anchors), 4, dtype=torch.float64), anchors
    assert max(rpn.anchors.level_lengths((256, 256))) > rpn.candidates[True], "also decides who is a candidate"
    one, other = rpn.select(outputs, (256, 256), [torch.tensor([200, 160])] * 2)
    assert one[1].tolist() == other[1].tolist()


def test_every_size_belongs_to_some_level():
    detector = build_detector(DetectorSpec("fcos", "test_resnet", 4, levels=(3, 5), width=32))
    boxes = target([[64.0, 64.0, 192.0, 192.0]], [False])  # 64 from its centre: the boundary of levels 3 and 4
    places = detector._places((256, 256), torch.device("cpu"))
    assert detector._assign(*places, boxes)[2][places[0].eq(128).all(1)].tolist() == [False, True, False]
