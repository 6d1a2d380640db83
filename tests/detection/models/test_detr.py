"""Detectors of transformers have its losses, and export folders in which it finds the same boxes."""

import copy
import functools
import importlib
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.detection.data.masks import decode_masks, encode_logits
from common.detection.models import queries
from common.detection.models.detectors import build_detector
from common.detection.models.detr_models import TRANSFORMERS_FAMILIES, get_auto_class
from common.detection.models.rf_detr_masks import MaskLosses
from common.detection.models.spec import DetectorSpec
from common.errors import Refused
from common.training import batch_norm
from tests.detection.models.pieces import CANVAS, build_scene
from tests.harness import small_rf_detr
from tests.harness.small_rf_detr import SIDE

transformers = pytest.importorskip("transformers")

NAMES = ("one", "two", "three", "four")


def make(family, dtype=torch.float64, name="test_resnet"):
    """A detector, moved off its initial weights, where many distributions are alike."""
    detector = build_detector(DetectorSpec(family, name, 4, width=64, seed=1))
    move_weights(detector)
    batch_norm.convert_batch_norm(detector, "frozen")
    return detector.to(dtype)


def move_weights(detector, boxes=0.2, classes=0.02, rest=0.02):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            if parameter.dim() > 1:
                size = boxes if "bbox_embed" in name else classes if "class_embed" in name else rest
                parameter += size * torch.randn(parameter.shape, generator=generator)


def make_rf_detr(family="rf_detr"):
    """A small RF-DETR; its initial boxes all have one size, and all its groups select the same."""
    detector = small_rf_detr.build(4, family)
    move_weights(detector, 0.2, 0.2, 0.1)
    return detector


def draw_batch(counts, dtype=torch.float64, canvas=CANVAS):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(len(counts), 3, *canvas, generator=generator).to(dtype)
    targets = [build_scene(count) | {"position": 10 + i} for i, count in enumerate(counts)]
    for target in targets:
        target["boxes"] = target["boxes"] * torch.tensor(
            [canvas[1] / CANVAS[1], canvas[0] / CANVAS[0]] * 2
        )
        coarse = torch.rand(len(target["labels"]), 1, 6, 6, generator=generator).round()
        target["masks"] = F.interpolate(coarse, canvas)[:, 0].byte()
    return images, targets


def convert_to_relative(target, dtype, canvas=CANVAS):
    """As transformers wants them."""
    left, top, right, bottom = (
        target["boxes"].to(dtype) / torch.tensor([canvas[1], canvas[0]] * 2)
    ).unbind(1)
    boxes = torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], 1)
    return {"class_labels": target["labels"], "boxes": boxes}


def compute_reference(detector, images, targets):
    """The loss that transformers has for the same model: in all, and by the names of ours.

    Where the number of pairs across outputs would be the divisor, each image is a batch of its own.
    """
    if getattr(detector.config, "use_dense_one_to_one", False) and len(images) > 1:
        terms = {}
        everything = sum(len(target["labels"]) for target in targets)
        for image, target in zip(images, targets, strict=True):
            share = max(1, len(target["labels"])) / everything
            for name, value in compute_reference(detector, image[None], [target])[1].items():
                terms[name] = terms.get(name, 0) + value * (
                    1 / len(images) if name == "ddf" else share
                )
        return sum(terms.values()), terms
    whole = transformers.AutoModelForObjectDetection.from_config(
        copy.deepcopy(detector.config)
    ).train()
    whole.model = detector.model
    output = whole(images, labels=[convert_to_relative(target, images.dtype) for target in targets])
    kinds = dict(vfl="class", mal="class", bbox="box", giou="giou", fgl="fgl", ddf="ddf")
    terms = {}
    for name, value in output.loss_dict.items():
        kind = kinds[name.split("_")[1]]
        terms[kind] = terms.get(kind, 0) + value.detach()
    return output.loss, terms


# transformers' losses of D-FINE and DEIMv2 can't be had in float64.
PRECISE = {
    "rtdetr_v2": (torch.float64, 1e-12),
    "dfine": (torch.float32, 2e-5),
    "deimv2": (torch.float32, 2e-5),
}


@pytest.fixture(autouse=True)
def stable(monkeypatch):
    """Of boxes that a query of DEIMv2 has equally often, transformers takes any; here the first."""
    monkeypatch.setattr(torch, "argsort", functools.partial(torch.argsort, stable=True))


def compare(detector, images, targets, tolerance):
    losses, terms = detector.compute_losses(
        images, targets, detector.count_divisors(targets, CANVAS)
    )
    loss, expected = compute_reference(detector, images, targets)
    torch.testing.assert_close(losses.sum(), loss, rtol=tolerance, atol=0)
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        assert value > 0
        torch.testing.assert_close(terms[name].sum(), value, rtol=tolerance, atol=1e-8)


@pytest.mark.parametrize("family", PRECISE)
def test_the_losses_of_a_batch_add_up_to_those_of_transformers(family):
    dtype, tolerance = PRECISE[family]
    detector = make(family, dtype)
    detector.config.num_denoising = 0
    compare(detector, *draw_batch([3, 0, 7, 1], dtype), tolerance)


# At 128 transformers interpolates position embeddings in float32.
@pytest.mark.parametrize("side, tolerance", [(SIDE, 1e-12), (128, 1e-7)])
def test_the_losses_of_rf_detr_add_up_to_those_of_transformers(side, tolerance):
    detector = make_rf_detr().double()
    canvas = (side, side)
    whole = (
        transformers.AutoModelForObjectDetection.from_config(copy.deepcopy(detector.config))
        .double()
        .train()
    )
    whole.load_state_dict(detector.model.state_dict())
    for counts in ([3, 0, 7, 1], [0, 0]):
        images, targets = draw_batch(counts, canvas=canvas)
        losses, terms = detector.compute_losses(
            images, targets, detector.count_divisors(targets, canvas)
        )
        output = whole(
            images,
            labels=[convert_to_relative(target, torch.float64, canvas) for target in targets],
        )
        torch.testing.assert_close(losses.sum(), output.loss, rtol=tolerance, atol=0)
        for name, (kind, weight) in {
            "class": ("ce", 1),
            "box": ("bbox", 5),
            "giou": ("giou", 2),
        }.items():
            parts = [
                value for key, value in output.loss_dict.items() if key.startswith(f"loss_{kind}")
            ]
            assert len(parts) == 3 and (sum(parts) > 0 or not any(counts))
            torch.testing.assert_close(
                terms[name].sum(), weight * sum(parts), rtol=tolerance, atol=1e-15
            )


class Draws:
    """The random points of the masks of one run, in the order in which transformers asks for them."""

    def __init__(self, monkeypatch):
        self.points = {}
        original = MaskLosses._draw_points

        def draw(losses, i, purpose, shape):
            self.points[i, purpose] = points = original(losses, i, purpose, shape)
            return points

        monkeypatch.setattr(MaskLosses, "_draw_points", draw)

    def in_order(self, i, num_layers):
        """Those of an image: of the last decoder layer, the layers before, and the selection."""
        for layer in (num_layers - 2, *range(num_layers - 2), num_layers - 1):
            yield self.points[i, "costs"][layer, None]
            for purpose in ("candidates", "anywhere"):
                of_layer = self.points[i, purpose].unflatten(0, (num_layers, -1))[layer]
                if len(of_layer):
                    yield of_layer


def test_mask_losses_are_those_of_transformers_at_its_points(monkeypatch):
    """Of each image: transformers draws a number of points for matching that depends on the batch."""
    detector = make_rf_detr("rf_detr_seg").double()
    config = detector.config
    canvas = (SIDE, SIDE)
    counts = [3, 0, 14, 1]  # of 12 queries
    config.class_loss_coefficient, config.mask_dice_loss_coefficient = 3, 4
    whole = transformers.AutoModelForInstanceSegmentation.from_config(copy.deepcopy(config))
    whole = whole.double().train()
    whole.load_state_dict(detector.model.state_dict())
    images, targets = draw_batch(counts, canvas=canvas)
    draws = Draws(monkeypatch)
    totals = detector.count_divisors(targets, canvas)
    losses, terms = detector.compute_losses(images, targets, totals)
    losses.sum().backward()

    module = importlib.import_module("transformers.loss.loss_rf_detr")
    sample = module.sample_point  # of masks in single precision
    in_double = lambda x, points, **options: sample(x.double(), points, **options)  # noqa: E731
    monkeypatch.setattr(module, "sample_point", in_double)
    weights = {"class": ("ce", 3), "box": ("bbox", 5), "giou": ("giou", 2)}
    weights |= {"mask": ("mask_ce", 5), "dice": ("mask_dice", 4)}
    for i, target in enumerate(targets):
        points = draws.in_order(i, num_layers=3)
        monkeypatch.setattr(torch, "rand", lambda *_, points=points, **__: next(points))
        label = convert_to_relative(target, torch.float64, canvas) | {"masks": target["masks"]}
        output = whole(images[i, None], labels=[label])
        share = max(3 * counts[i], 1) / (3 * sum(counts))
        expected = {}  # without boxes, a loss of transformers is an empty tensor
        for name, (kind, weight) in weights.items():
            parts = [x for key, x in output.loss_dict.items() if re.match(f"loss_{kind}(_|$)", key)]
            expected[name] = share * weight * sum(part.sum() for part in parts)
            assert len(parts) == 3 and (expected[name] > 0 or not counts[i])
            torch.testing.assert_close(terms[name][i], expected[name], rtol=1e-12, atol=1e-15)
        loss = sum(expected.values())
        loss.backward()
        torch.testing.assert_close(losses[i], loss, rtol=1e-12, atol=0)
        if counts[i]:
            assert next(points, None) is None
            torch.testing.assert_close(share * output.loss, loss, rtol=1e-12, atol=0)
    for (name, parameter), trained in zip(
        whole.named_parameters(), detector.model.parameters(), strict=True
    ):
        if trained.requires_grad:
            torch.testing.assert_close(
                trained.grad, parameter.grad, rtol=1e-9, atol=1e-13, msg=name
            )

    targets[0]["position"] += 1  # other points, of this image only
    _, logged = detector.compute_losses(images, targets, totals)
    is_same = torch.isclose(logged["mask"], terms["mask"], rtol=1e-12, atol=0)
    assert is_same.tolist() == [False, True, True, True]


@pytest.mark.parametrize("family", PRECISE)
def test_losses_of_denoising_are_those_of_transformers(family, monkeypatch):
    """Of images with equally many boxes: transformers' groups depend on the batch."""
    dtype, tolerance = PRECISE[family]
    detector = make(family, dtype)
    images, targets = draw_batch([5, 5, 5], dtype)
    for i, target in enumerate(targets):
        target["boxes"] = target["boxes"] * torch.tensor([0.9, 0.95, 1.0][i])
    module = importlib.import_module(type(detector.model).__module__)
    seen = 0
    original = module.get_contrastive_denoising_training_group
    columns = [
        [convert_to_relative(target, dtype)[key] for target in targets]
        for key in ("boxes", "class_labels")
    ]
    positions = [target["position"] for target in targets]
    noise = queries.build_denoising(
        *columns, positions, detector.seed, detector._count_queries(CANVAS), detector.config
    )

    def ours(class_embed, **options):
        nonlocal seen
        labels, _boxes, mask, values = original(class_embed=class_embed, **options)
        rows = slice(seen, seen + len(options["targets"]))
        seen = rows.stop
        assert values["dn_num_group"] == noise.num_groups[0]
        for indices, match in zip(values["dn_positive_idx"], noise.match[rows], strict=True):
            assert indices.tolist() == (match >= 0).nonzero()[:, 0].tolist()
        assert all(torch.equal(mask == 0, visible) for visible in noise.attention_mask[rows, 0])
        return (
            class_embed(noise.labels[rows]),
            torch.logit(noise.boxes[rows], 1e-5),
            mask.to(labels.dtype),
            values,
        )

    monkeypatch.setattr(module, "get_contrastive_denoising_training_group", ours)
    compare(detector, images, targets, tolerance)


def test_noise_is_a_function_of_image_and_position():
    """A positive keeps most of its box, a negative does not. Both are the same in any batch."""
    images = [convert_to_relative(build_scene(count), torch.float64) for count in (3, 0, 8)]
    config = SimpleNamespace(
        num_labels=4, num_denoising=24, label_noise_ratio=0.5, box_noise_scale=1.0
    )

    def noise(indices, position=5, seed=1):
        boxes, labels = ([images[i][key] for i in indices] for key in ("boxes", "class_labels"))
        return queries.build_denoising(
            boxes, labels, [position, 6, 7][: len(indices)], seed, 10, config
        )

    at_once = noise([0, 1, 2])
    alone = noise([0])
    assert alone.labels.shape[1] == 48 and at_once.num_groups.tolist() == [8, 0, 3]
    for field in ("labels", "boxes", "match"):
        assert torch.equal(getattr(at_once, field)[:1, :48], getattr(alone, field))
    assert not torch.equal(noise([0], position=8).boxes, alone.boxes)
    assert not torch.equal(noise([0], seed=2).boxes, alone.boxes)
    positive = alone.match[0] >= 0
    index = torch.arange(48) % 3
    boxes = images[0]["boxes"]
    offset = (alone.boxes[0, :, :2] - boxes[index, :2]).abs() / boxes[index, 2:]
    assert offset[positive].max() <= 0.5 < offset[~positive].max()
    assert 0.6 < (alone.labels[0] == images[0]["class_labels"][index]).double().mean() < 1
    assert at_once.attention_mask.any(-1).all()  # a row that sees nothing would be NaN


PUBLISHED_TOO = [("rtdetr_v2", "rtdetr_v2_r18vd"), ("dfine", "dfine_n"), ("deimv2", "deimv2_s")]


@pytest.mark.parametrize(
    "family, name", [*((family, "test_resnet") for family in TRANSFORMERS_FAMILIES), *PUBLISHED_TOO]
)
def test_an_export_is_a_folder_of_transformers_and_ours(family, name, tmp_path):
    """That both find the same in photographs is tested in tests/recipes/test_det_evaluation.py."""
    if family in small_rf_detr.FAMILIES:
        detector = make_rf_detr(family).eval()
        # As folders of the hub.
        detector.config.dropout = detector.config.backbone_config.hidden_dropout_prob = 0.1
    else:
        detector = make(family, torch.float32, name).eval()
    detector.export(tmp_path / "best", NAMES, 128)
    auto = get_auto_class(family == "rf_detr_seg")
    model, info = auto.from_pretrained(tmp_path / "best", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.id2label == dict(enumerate(NAMES))

    # With other classes, those of the same name are kept, in any case.
    names = ("new", "Four", "two")
    rebuilt = build_detector(
        DetectorSpec(family, str(tmp_path / "best"), 3, class_names=names, seed=2)
    )
    assert rebuilt.pretrained_cfg["mean"] == pytest.approx(detector.pretrained_cfg["mean"])
    assert rebuilt.weights_summary.endswith("head new for 1 of 3 classes (new), kept for Four, two")
    expected_state = detector.state_dict()
    loaded = rebuilt.state_dict()
    heads = {name for name in expected_state if "class_embed" in name or "enc_score_head" in name}
    for name, tensor in expected_state.items():
        if name not in heads:
            assert torch.equal(loaded[name], tensor), name
        elif "denoising" not in name:
            assert len(loaded[name]) == 3 and torch.equal(loaded[name][1:], tensor[[3, 1]]), name
    same = build_detector(DetectorSpec(family, str(tmp_path / "best"), 4, class_names=NAMES))
    assert (
        same.weights_summary
        == f"{len(expected_state)} of {len(expected_state)} tensors of {tmp_path / 'best'}"
    )
    images, targets = draw_batch([3, 0], torch.float32, (128, 128))
    first, second = (
        same.compute_losses(images, targets, same.count_divisors(targets, (128, 128)))[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)  # without dropout


def test_masks_are_those_that_transformers_draws(tmp_path):
    detector = make_rf_detr("rf_detr_seg").eval()
    detector.export(tmp_path, NAMES, SIDE)
    model = transformers.AutoModelForInstanceSegmentation.from_pretrained(tmp_path).eval()
    images, _ = draw_batch([0, 0], torch.float32, (SIDE, SIDE))
    with torch.no_grad():
        outputs = model(images)
    draw = transformers.RfDetrImageProcessor().post_process_instance_segmentation
    drawn = draw(outputs, 0.0, target_sizes=[(70, 150)] * 2, return_binary_maps=True)
    size = np.array([150, 70])
    for detections, expected in zip(detector.detect(images, images), drawn, strict=True):
        masks = decode_masks(encode_logits(detections["mask_logits"], size), size)
        (indices,) = masks.any((1, 2)).nonzero()  # transformers leaves out empty ones
        infos = expected["segments_info"]
        assert len(indices) >= 3 and 0.05 < masks.mean() < 0.95
        assert [info["label_id"] for info in infos] == detections["labels"][indices].tolist()
        assert (masks[indices] != expected["segmentation"].numpy()).mean() < 1e-4
    assert encode_logits(detections["mask_logits"][:0], size) == []


def test_small_images_have_fewer_queries_and_so_has_an_export(tmp_path):
    detector = make_rf_detr()
    outputs = detector._predict(torch.zeros(2, 3, 32, 32))
    assert outputs.logits.shape[:3] == outputs.boxes.shape[:3] == (2, 9, 4)
    detector.eval().export(tmp_path, NAMES, 32)
    rebuilt = build_detector(DetectorSpec("rf_detr", str(tmp_path), 4, class_names=NAMES)).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rebuilt._predict(images), detector._predict(images))
    for name in ("reference_point_embed", "query_feat"):  # the first queries of each group
        actual, expected = (
            getattr(x.model.model, name).weight.unflatten(0, (3, -1)) for x in (detector, rebuilt)
        )
        assert torch.equal(actual[:, :4], expected)


def test_a_new_rf_detr_leaves_the_selected_boxes_as_they_are():
    detector = small_rf_detr.build(4)
    assert not detector.model.model.reference_point_embed.weight.any()
    assert not detector.model.bbox_embed.layers[-1].weight.any()
    assert detector.no_weight_decay() == {
        "model.model.backbone.backbone.embeddings.position_embeddings"
    }


# Millions of parameters of the published models. DEIMv2's are with fused convolutions and without
# denoising.
PUBLISHED = {
    "rtdetr_v2_r18vd": 20,
    "dfine_n": 4,
    "dfine_s": 10,
    "deimv2_n": 3.6,
    "deimv2_s": 9.7,
    "rf_detr_nano": 30.5,
    "rf_detr_seg_nano": 33.6,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_architecture_is_as_large_as_the_published_model(name):
    family = name.rpartition("_")[0]
    is_rf_detr = family in small_rf_detr.FAMILIES
    model = build_detector(DetectorSpec(family, name, 91 if is_rf_detr else 80)).model
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    tolerance = {"deimv2": 0.02 + 0.025 * PUBLISHED[name]}.get(family, 0.05 if is_rf_detr else 1)
    assert count == pytest.approx(PUBLISHED[name], abs=tolerance)


def test_predictions_that_are_not_finite_are_matched():
    """The step's loss then says so. There may be more boxes than queries, or none."""
    logits = torch.full((2, 1, 3, 4), float("nan"))
    boxes = torch.full((2, 1, 3, 4), float("inf"))
    costs = {"alpha": 0.25, "gamma": 2.0, "class_cost": 2.0, "bbox_cost": 5.0, "giou_cost": 2.0}
    targets = queries.PaddedTargets(torch.rand(2, 6, 4), torch.zeros(2, 6).long(), [5, 0])
    match = queries.match_queries(logits, boxes, targets, **costs)
    assert len(set(match[0, 0].tolist()) - {-1}) == 3 and (match[1] == -1).all()


def test_what_can_not_be_built_is_refused_in_one_line(tmp_path, monkeypatch):
    for spec_args, options, message in (
        ("dfine dfine_xxl", {}, "no model of --detector dfine; there are dfine_n, dfine_s, "),
        ("dfine rtdetr_v2_r18vd", {}, "not of --detector dfine; there are dfine_n"),
        ("dfine dfine_s", {"drop_path": 0.1}, "--drop_path 0.1: dfine_s has none"),
        ("rtdetr_v2 test_vit", {}, "ends in features at strides 16, 16, 16; .* needs 8, 16 and 32"),
        (
            "rf_detr resnet18",
            {},
            "--detector rf_detr has a backbone of its own; there are rf_detr_nano",
        ),
        (
            "rf_detr rf_detr_nano",
            {"pretrained": True},
            "--pretrained: rf_detr_nano is a configuration without",
        ),
        ("rf_detr rf_detr_seg_nano", {}, "not of --detector rf_detr; there are rf_detr_nano, and"),
    ):
        with pytest.raises(Refused, match=message):
            build_detector(DetectorSpec(*spec_args.split(), 4, **options))
    with_masks = {"model_type": "rf_detr", "architectures": ["RfDetrForInstanceSegmentation"]}
    for family, kind, config in (
        ("deimv2", "rt_detr_v2", {"model_type": "rt_detr_v2"}),
        ("deimv2", "deimv2 with one", {"model_type": "deimv2", "share_bbox_head": True}),
        ("rf_detr", "rf_detr with masks", with_masks),
        ("rf_detr_seg", "rf_detr", {"model_type": "rf_detr"}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        message = f"a {kind}.*, which --detector {family} can't train"
        with pytest.raises(Refused, match=message):
            build_detector(DetectorSpec(family, str(tmp_path), 4))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Refused, match="pip install transformers"):
        build_detector(DetectorSpec("dfine", "dfine_s", 4))
