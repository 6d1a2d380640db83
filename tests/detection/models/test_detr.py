"""RT-DETRv2 and D-FINE have transformers' losses on any layout, and export folders that transformers loads."""

import copy
import functools
import importlib
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images

from common.detection.models import denoising, rf_detr_models
from common.detection.models.detectors import build_detector
from common.detection.models.detr_models import ARCHITECTURES, FAMILIES, build_model
from common.detection.models.spec import DetectorSpec
from common.errors import Refused
from common.training import batch_norm
from tests.detection.models.pieces import CANVAS, scene

transformers = pytest.importorskip("transformers")


def make(family, dtype=torch.float64, norm="frozen"):
    """A small detector that has moved off its initial weights, where many distributions are alike."""
    detector = build_detector(DetectorSpec(family, "test_resnet", 4, width=64, seed=1))
    move(detector)
    batch_norm.convert(detector, norm, group_size=2)
    return detector.to(dtype)


def move(detector, boxes=0.2, classes=0.02):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            if parameter.dim() > 1:
                size = boxes if "bbox_embed" in name else classes if "class_embed" in name else 0.02
                parameter += size * torch.randn(parameter.shape, generator=generator)


def batch(counts, dtype=torch.float64):
    images = torch.randn(len(counts), 3, *CANVAS, generator=torch.Generator().manual_seed(3)).to(dtype)
    targets = [scene(count) | {"position": 10 + place} for place, count in enumerate(counts)]
    return images, targets


def relative(target, dtype):
    """As transformers wants them."""
    left, top, right, bottom = (target["boxes"].to(dtype) / torch.tensor([CANVAS[1], CANVAS[0]] * 2)).unbind(1)
    boxes = torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], 1)
    return {"class_labels": target["labels"], "boxes": boxes}


def theirs(detector, images, targets):
    """The loss that transformers has for the same model: in all, and by the names of ours.

    Where the number of pairs across outputs would be the divisor, each image is a batch of its own.
    """
    if getattr(detector.config, "use_dense_one_to_one", False) and len(images) > 1:
        terms = {}
        everything = sum(len(target["labels"]) for target in targets)
        for image, target in zip(images, targets, strict=True):
            share = max(1, len(target["labels"])) / everything
            for name, value in theirs(detector, image[None], [target])[1].items():
                terms[name] = terms.get(name, 0) + value * (1 / len(images) if name == "ddf" else share)
        return sum(terms.values()), terms
    whole = transformers.AutoModelForObjectDetection.from_config(copy.deepcopy(detector.config)).train()
    whole.model = detector.model
    output = whole(images, labels=[relative(target, images.dtype) for target in targets])
    kinds = dict(vfl="class", mal="class", bbox="box", giou="giou", fgl="fgl", ddf="ddf")
    terms = {}
    for name, value in output.loss_dict.items():
        kind = kinds[name.split("_")[1]]
        terms[kind] = terms.get(kind, 0) + value.detach()
    return output.loss, terms


# transformers' losses of D-FINE and DEIMv2 can't be had in float64.
PRECISE = {"rtdetr_v2": (torch.float64, 1e-12), "dfine": (torch.float32, 2e-5), "deimv2": (torch.float32, 2e-5)}


@pytest.fixture(autouse=True)
def stable(monkeypatch):
    """Of several boxes that a query of DEIMv2 has equally often, transformers takes any; here the first."""
    monkeypatch.setattr(torch, "argsort", functools.partial(torch.argsort, stable=True))


@pytest.mark.parametrize("family, dense", [*((family, True) for family in FAMILIES), ("deimv2", False)])
def test_the_losses_of_a_batch_add_up_to_those_of_transformers(family, dense):
    dtype, tolerance = PRECISE[family]
    detector = make(family, dtype)
    detector.config.num_denoising, detector.config.use_dense_one_to_one = 0, dense and family == "deimv2"
    images, targets = batch([3, 0, 7, 1], dtype)
    losses, terms = detector.losses(images, targets, detector.counts(targets, CANVAS))
    loss, expected = theirs(detector, images, targets)
    torch.testing.assert_close(losses.sum(), loss, rtol=tolerance, atol=0)
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        assert value > 0
        torch.testing.assert_close(terms[name].sum(), value, rtol=tolerance, atol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_the_same_noise_the_losses_of_denoising_are_those_of_transformers(family, monkeypatch):
    """Where all images have as many boxes: else its groups, and what its padding costs, depend on the batch."""
    dtype, tolerance = PRECISE[family]
    detector = make(family, dtype)
    images, targets = batch([5, 5, 5], dtype)
    for place, target in enumerate(targets):
        target["boxes"] = target["boxes"] * torch.tensor([0.9, 0.95, 1.0][place])
    made = {"images": 0}

    def remembered(*args, **options):
        made["noise"] = noised(*args, **options)
        return made["noise"]

    noised = denoising.noised
    monkeypatch.setattr("common.detection.models.detr.noised", remembered)
    losses, terms = detector.losses(images, targets, detector.counts(targets, CANVAS))

    module = importlib.import_module(type(detector.model).__module__)
    original = module.get_contrastive_denoising_training_group

    def ours(class_embed, **options):
        labels, _boxes, mask, values = original(class_embed=class_embed, **options)
        noise, first = made["noise"], made["images"]
        rows = slice(first, first + len(options["targets"]))
        made["images"] = rows.stop
        assert values["dn_num_group"] == noise.groups[0]
        for places, match in zip(values["dn_positive_idx"], noise.match[rows], strict=True):
            assert places.tolist() == (match >= 0).nonzero()[:, 0].tolist()
        assert all(torch.equal(mask == 0, visible) for visible in noise.visible[rows, 0])
        return class_embed(noise.labels[rows]), torch.logit(noise.boxes[rows], 1e-5), mask.to(labels.dtype), values

    monkeypatch.setattr(module, "get_contrastive_denoising_training_group", ours)
    loss, expected = theirs(detector, images, targets)
    torch.testing.assert_close(losses.sum(), loss, rtol=tolerance, atol=0)
    for name, value in expected.items():
        torch.testing.assert_close(terms[name].sum(), value, rtol=tolerance, atol=1e-8)


def test_noise_is_a_function_of_the_image_and_its_position_in_the_stream():
    images = [relative(scene(count), torch.float64) for count in (3, 0, 8)]
    boxes, labels = [image["boxes"] for image in images], [image["class_labels"] for image in images]

    def noise(*places, positions=(5, 6, 7), seed=1):
        return denoising.noised(
            [boxes[place] for place in places],
            [labels[place] for place in places],
            [positions[place] for place in places],
            seed=seed,
            classes=4,
            queries=10,
            budget=24,
            label_noise=0.5,
            box_noise=1.0,
        )

    at_once, alone = noise(0, 1, 2), noise(0)
    count = alone.labels.shape[1]
    assert count == 48 and alone.groups.tolist() == [8] and at_once.groups.tolist() == [8, 0, 3]
    assert at_once.real.sum(1).tolist() == [48, 0, 48]
    for field in ("labels", "boxes", "match"):
        assert torch.equal(getattr(at_once, field)[:1, :count], getattr(alone, field))
    assert not torch.equal(noise(0, positions=(8, 6, 7)).boxes, alone.boxes)
    assert not torch.equal(noise(0, seed=2).boxes, alone.boxes)

    # A positive keeps most of its box, and most labels; a negative does not.
    positive = alone.match[0] >= 0
    index = torch.arange(count) % 3
    offset = (alone.boxes[0, :, :2] - boxes[0][index, :2]).abs() / boxes[0][index, 2:]
    assert offset[positive].max() <= 0.5 < offset[~positive].max()
    assert 0.6 < (alone.labels[0] == labels[0][index]).double().mean() < 1

    # Seen by all: the decoder's own queries, which see no noise. Seen by its group alone: a noised box.
    visible = alone.visible[0, 0]
    assert visible[:, count:].all() and not visible[count:, :count].any()
    groups = torch.arange(count) // 6
    assert torch.equal(visible[:count, :count], groups[:, None] == groups)
    assert at_once.visible.any(-1).all()  # a row that sees nothing would be NaN


def test_group_statistics_make_every_split_into_whole_groups_the_same():
    detector = make("rtdetr_v2", norm="group").train()
    images, targets = batch([3, 0, 7, 1])
    totals = detector.counts(targets, CANVAS)
    totals = F.pad(
        totals, (0, 1), value=1
    )  # as a mean over one image: the hook that counts samples is of the whole call
    whole, _ = detector(images, targets, totals)
    shares = [detector(images[place], targets[place], totals)[0] for place in (slice(2), slice(2, 4))]
    torch.testing.assert_close(torch.cat(shares), whole, rtol=1e-10, atol=1e-10)
    assert len(detector.step_batch_norms) > 20
    frozen = [name for name, module in detector.named_modules() if "FrozenBatchNorm" in type(module).__name__]
    assert not frozen  # that --batch_norm would not reach


@pytest.mark.parametrize("family", FAMILIES)
def test_under_bf16_autocast_queries_and_boxes_are_float32(family):
    detector = make(family, torch.float32)
    images, _ = batch([1], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = detector._predict(images)
        features = detector.backbone(images).feature_maps[0]
    assert features.dtype == torch.bfloat16
    kept = ("intermediate_reference_points", "intermediate_logits", "init_reference_points", "enc_topk_bboxes")
    assert {getattr(output, name).dtype for name in kept} == {torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_folder_is_one_of_transformers_and_one_of_ours(family, tmp_path):
    detector = make(family, torch.float32).eval()
    names = ("one", "two", "three", "four")
    detector.export(tmp_path / "best", names, 128)
    auto, options = transformers.AutoModelForObjectDetection, {"output_loading_info": True}
    model, info = auto.from_pretrained(tmp_path / "best", **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.id2label == dict(enumerate(names))
    heads = model.model.decoder.class_embed
    assert not torch.equal(heads[0].weight, heads[1].weight)

    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "best")
    photo = torch.randint(256, (3, 128, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model.eval()(**processor(photo, return_tensors="pt"))
    (expected,) = processor.post_process_object_detection(output, threshold=0.0, target_sizes=[(128, 128)])
    mean, std = (torch.tensor(detector.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    (found,) = detector.detect(((photo / 255 - mean) / std)[None], torch.tensor([[128, 128]]))
    count = len(found["scores"])
    torch.testing.assert_close(found["scores"], expected["scores"][:count], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["boxes"], expected["boxes"], rtol=1e-4, atol=1e-2)

    # With other classes, those of the same name are kept.
    other = build_detector(DetectorSpec(family, str(tmp_path / "best"), 3, names=("new", "four", "two"), seed=2)).eval()
    assert other.pretrained_cfg["mean"] == pytest.approx(detector.pretrained_cfg["mean"])
    mine, loaded = detector.model.decoder.class_embed[-1], other.model.decoder.class_embed[-1]
    assert torch.equal(loaded.weight[1:], mine.weight[[3, 1]]) and loaded.weight.shape == (3, 64)
    assert other.config.num_labels == 3
    assert torch.equal(
        other.model.decoder.bbox_embed[1].layers[0].weight, detector.model.decoder.bbox_embed[1].layers[0].weight
    )


_ALIKE = [pytest.param(name, marks=pytest.mark.long) for name in ("deimv2_atto", "deimv2_n")]


@pytest.mark.parametrize("name", ["rtdetr_v2_r18vd", "dfine_n", "deimv2_s", *_ALIKE])
def test_on_photographs_boxes_and_scores_are_those_of_transformers(name, tmp_path):
    """A portrait, a tiny one and a strip, with equal random weights; in float64, but for norms of transformers."""
    family = next(family for family in FAMILIES if name.startswith(family))
    detector = build_detector(DetectorSpec(family, name, 80, seed=1))
    move(detector, boxes=0.05, classes=0.1)
    first, second = load_sample_images().images
    for module in detector.modules():  # statistics that fit photographs, or all queries would be nearly the same
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        detector._predict(torch.from_numpy(first[:256, :256] / 255).float().permute(2, 0, 1)[None])
    detector.eval()
    detector.export(tmp_path / "best", [f"class {number}" for number in range(80)], 256)
    theirs = transformers.AutoModelForObjectDetection.from_pretrained(tmp_path / "best").double().eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "best")
    for photo in (first[:, 100:300], second[200:231, 300:347], second[:200, :600]):
        pixels = processor(photo, return_tensors="pt")["pixel_values"].double()
        with torch.no_grad():
            output, mine = theirs(pixels), detector.double()._predict(pixels)
        torch.testing.assert_close(mine.intermediate_logits[:, -1], output.logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(mine.intermediate_reference_points[:, -1], output.pred_boxes, rtol=0, atol=1e-5)
        height, width, _ = photo.shape
        (expected,) = processor.post_process_object_detection(output, threshold=0.0, target_sizes=[(height, width)])
        (found,) = detector.detect(pixels, torch.tensor([[256, 256]]))
        torch.testing.assert_close(found["scores"], expected["scores"], rtol=0, atol=1e-5)  # as many as queries
        boxes = found["boxes"] * torch.tensor([width, height, width, height]) / 256
        torch.testing.assert_close(boxes, expected["boxes"], rtol=0, atol=0.01)
        assert torch.equal(found["labels"], expected["labels"])
        assert boxes.std() > 1 and found["scores"].std() > 1e-4  # not all alike


@pytest.mark.parametrize(
    "name, published",
    [
        *(("rtdetr_v2_r18vd", 20), ("rtdetr_v2_r34vd", 31), ("rtdetr_v2_r50vd", 42), ("rtdetr_v2_r101vd", 76)),
        *(("dfine_n", 4), ("dfine_s", 10), ("dfine_m", 19), ("dfine_l", 31), ("dfine_x", 62)),
        *(("deimv2_atto", 0.5), ("deimv2_femto", 1.0), ("deimv2_pico", 1.5), ("deimv2_n", 3.6)),
        *(("deimv2_s", 9.7), ("deimv2_m", 18.1), ("deimv2_l", 32.2), ("deimv2_x", 50.3)),
        *(("rf_detr_nano", 30.5), ("rf_detr_small", 32.1), ("rf_detr_medium", 33.7)),
    ],
)
def test_an_architecture_has_as_many_parameters_as_the_published_model(name, published):
    kinds, made = FAMILIES | {"rf_detr": "rf_detr"}, ARCHITECTURES | rf_detr_models.ARCHITECTURES
    family = next(family for family in kinds if name.startswith(family))
    others = {"decoder_n_points": 2, "num_labels": 91} if family == "rf_detr" else {"num_labels": 80}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kinds[family], **made[name], **others)
        config.tie_word_embeddings = False
        model = transformers.AutoModelForObjectDetection.from_config(config)
    model = model if family == "rf_detr" else model.model
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    # DEIMv2's figures are with fused convolutions, and without the embedding of denoising.
    tolerance = {"deimv2": 0.02 + 0.025 * published, "rf_detr": 0.05}.get(family, 1)
    assert count == pytest.approx(published, abs=tolerance)


@pytest.mark.parametrize(
    "family, name, options, told",
    [
        (
            "dfine",
            "dfine_xxl",
            {},
            "--model dfine_xxl: no model of --detector dfine; there are dfine_n, dfine_s, dfine_m, ",
        ),
        ("dfine", "rtdetr_v2_r18vd", {}, "--model rtdetr_v2_r18vd: not of --detector dfine; there are dfine_n"),
        ("dfine", "dfine_s", {"pretrained": True}, "--pretrained: dfine_s is a configuration without weights"),
        ("dfine", "dfine_s", {"drop_path": 0.1}, "--drop_path 0.1: dfine_s has none"),
        ("rtdetr_v2", "test_vit", {}, "--model test_vit: has features at strides 16; .* needs 8, 16 and 32"),
        ("rtdetr_v2", "swin_tiny_patch4_window7_224", {}, "strides 4, 8, 16, 32, channels last"),
        (
            "rf_detr",
            "rf_detr_huge",
            {},
            "--model rf_detr_huge: no model of --detector rf_detr; there are rf_detr_nano, rf_",
        ),
        (
            "rf_detr",
            "resnet18",
            {},
            "--model resnet18: --detector rf_detr has a backbone of its own; there are rf_detr_nano",
        ),
        (
            "rf_detr",
            "rf_detr_nano",
            {"pretrained": True},
            "--pretrained: rf_detr_nano is a configuration without weights",
        ),
    ],
)
def test_what_can_not_be_built_is_refused_in_one_line(family, name, options, told):
    with pytest.raises(Refused, match=told) as raised:
        build_detector(DetectorSpec(family, name, 4, **options))
    assert "\n" not in str(raised.value)


def test_a_folder_of_another_family_and_one_without_a_model_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rt_detr_v2"}))
    with pytest.raises(Refused, match="a rt_detr_v2, which --detector dfine can't train"):
        build_model(DetectorSpec("dfine", str(tmp_path), 4))
    with pytest.raises(Refused, match="can't be loaded"):
        build_model(DetectorSpec("rtdetr_v2", str(tmp_path), 4))
    (tmp_path / "config.json").unlink()
    with pytest.raises(Refused, match=r"the folder has no config.json"):
        build_model(DetectorSpec("dfine", str(tmp_path), 4))


def test_without_transformers_the_refusal_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Refused, match="pip install transformers"):
        build_model(DetectorSpec("dfine", "dfine_s", 4))
