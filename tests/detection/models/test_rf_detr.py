"""RF-DETR has transformers' outputs and losses on any layout, and exports folders that transformers loads."""

import copy
import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_images

from common.detection.models.detectors import build_detector
from common.detection.models.spec import DetectorSpec
from common.training import drop_path
from tests.detection.models.pieces import scene
from tests.harness import small_rf_detr
from tests.harness.small_rf_detr import SIDE

transformers = pytest.importorskip("transformers")

NAMES = ("one", "two", "three", "four")


def moved(detector, scale=1.0):
    """Off its initial weights, where all boxes have one size and all groups select the same."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            if parameter.dim() > 1:
                size = 0.2 if "embed" in name else 0.05
                parameter += scale * size * torch.randn(parameter.shape, generator=generator)
    return detector


def batch(counts, side=SIDE):
    generator = torch.Generator().manual_seed(3)
    images, targets = torch.randn(len(counts), 3, side, side, generator=generator).double(), []
    for place, count in enumerate(counts):
        target = scene(count) | {"position": 10 + place}
        targets.append(target | {"boxes": target["boxes"].double() * side / torch.tensor([192, 128, 192, 128])})
    return images, targets


def theirs(detector):
    """transformers' model with the same weights, and no dropout."""
    whole = transformers.AutoModelForObjectDetection.from_config(copy.deepcopy(detector.config))
    whole.load_state_dict(detector.model.state_dict())
    return whole.to(detector.model.dtype)


# At 96 position embeddings are as they are trained, at 128 transformers interpolates them in float32.
@pytest.mark.parametrize("side, tolerance", [(SIDE, 1e-12), (128, 1e-7)])
def test_the_losses_of_a_batch_add_up_to_those_of_transformers(side, tolerance):
    detector = moved(small_rf_detr.build(4)).double()
    for counts in ([3, 0, 7, 1], [0, 0]):
        images, targets = batch(counts, side)
        losses, terms = detector.losses(images, targets, detector.counts(targets, images.shape[2:]))
        labels = []
        for target in targets:
            low, high = target["boxes"].split(2, 1)
            boxes = torch.cat([(low + high) / 2, high - low], 1) / side
            labels.append({"class_labels": target["labels"], "boxes": boxes})
        output = theirs(detector).train()(images, labels=labels)
        torch.testing.assert_close(losses.sum(), output.loss, rtol=tolerance, atol=0)
        weights = {"class": ("ce", 1), "box": ("bbox", 5), "giou": ("giou", 2)}
        assert terms.keys() == weights.keys()
        for name, (kind, weight) in weights.items():
            parts = [value for key, value in output.loss_dict.items() if key.startswith(f"loss_{kind}")]
            assert len(parts) == 3 and (sum(parts) > 0 or not any(counts))
            torch.testing.assert_close(terms[name].sum(), weight * sum(parts), rtol=tolerance, atol=1e-15)


def photos():
    """Of several shapes: [H, W, 3] each."""
    china, flower = load_sample_images().images
    return [china, flower[:, 100:300], china[150:230, :600], np.tile(flower, (3, 2, 1)), flower[:50, :40]]


@pytest.mark.parametrize(
    "name", ["small", *(pytest.param(name, marks=pytest.mark.long) for name in ("rf_detr_nano", "rf_detr_base"))]
)
def test_an_exported_folder_finds_in_photographs_what_the_detector_finds(name, tmp_path):
    if name == "small":
        detector, side = moved(small_rf_detr.build(4)), 128  # which is not the side of its position embeddings
    else:
        detector = moved(build_detector(DetectorSpec("rf_detr", name, 4)), 0.1)
        side = {"rf_detr_nano": 384, "rf_detr_base": 560}[name]
    detector.eval().export(tmp_path / "best", NAMES, side)
    auto, options = transformers.AutoModelForObjectDetection, {"output_loading_info": True}
    model, info = auto.from_pretrained(tmp_path / "best", **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.id2label == dict(enumerate(NAMES)) and model.config.dropout == 0

    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "best")
    found = []
    for photo in photos():
        pixels = processor(photo, return_tensors="pt")
        assert pixels["pixel_values"].shape == (1, 3, side, side)
        with torch.no_grad():
            output = model.eval()(**pixels)
            logits, boxes = detector._predict(pixels["pixel_values"])
        torch.testing.assert_close(logits[:, -2], output.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(boxes[:, -2], output.pred_boxes, rtol=0, atol=1e-5)
        height, width = photo.shape[:2]
        (expected,) = processor.post_process_object_detection(output, 0.0, [(height, width)])
        (mine,) = detector.detect(pixels["pixel_values"], torch.tensor([[side, side]]))
        assert len(mine["scores"]) == detector.config.num_queries
        torch.testing.assert_close(mine["scores"], expected["scores"], rtol=0, atol=1e-5)
        mine["boxes"] *= torch.tensor([width, height] * 2) / side
        torch.testing.assert_close(mine["boxes"], expected["boxes"], rtol=0, atol=1e-2)
        assert torch.equal(mine["labels"], expected["labels"])
        found.append(mine["scores"])
    assert not torch.allclose(found[0], found[1], atol=1e-4)


def test_a_loaded_folder_keeps_the_classes_that_it_knows_and_has_no_dropout(tmp_path):
    made = moved(small_rf_detr.build(4)).eval()
    of_backbone = made.config.backbone_config  # folders of the hub have dropout
    made.config.dropout = of_backbone.attention_probs_dropout_prob = of_backbone.hidden_dropout_prob = 0.1
    made.export(tmp_path, NAMES, SIDE)
    spec = DetectorSpec("rf_detr", str(tmp_path), 3, names=("new", "Four", "two"), seed=2)
    detector = build_detector(spec)
    heads = [detector.model.class_embed, *detector.model.model.enc_out_class_embed]
    originals = [made.model.class_embed, *made.model.model.enc_out_class_embed]
    for head, original in zip(heads, originals, strict=True):
        assert torch.equal(head.weight[1:], original.weight[[3, 1]])
        assert torch.equal(head.bias[1:], original.bias[[3, 1]]) and head.bias[0].item() == pytest.approx(-math.log(99))
    count = len(detector.state_dict())
    kept = "head new for 1 of 3 classes (new), kept for Four, two"
    assert detector.begins_with == f"{count - 8} of {count} tensors of {tmp_path}, {kept}"
    same = build_detector(DetectorSpec("rf_detr", str(tmp_path), 4, names=NAMES))
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in made.state_dict().items())
    assert same.begins_with == f"{count} of {count} tensors of {tmp_path}" and same.stride == 32

    images, targets = batch([3, 0])
    targets[0]["labels"] %= 3
    detector.double()
    first, second = (detector.losses(images, targets, detector.counts(targets, (SIDE, SIDE)))[0] for _ in range(2))
    assert torch.equal(first, second)


def test_images_with_fewer_places_than_queries_have_fewer_and_so_does_their_export(tmp_path):
    detector = moved(small_rf_detr.build(4))
    assert [x.shape[:3] for x in detector._predict(torch.zeros(2, 3, 32, 32))] == [(2, 9, 4)] * 2
    detector.eval().export(tmp_path, NAMES, 32)
    again = build_detector(DetectorSpec("rf_detr", str(tmp_path), 4, names=NAMES)).eval()
    assert again.config.num_queries == 4
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(again._predict(images), detector._predict(images))
    for name in ("reference_point_embed", "query_feat"):  # the first queries of each group
        mine, theirs = (getattr(x.model.model, name).weight.unflatten(0, (3, -1)) for x in (detector, again))
        assert torch.equal(mine[:, :4], theirs)


@pytest.mark.parametrize("side", [64, 224])
def test_positions_are_interpolated_as_transformers_does_and_in_the_precision_of_the_run(side):
    embeddings = moved(small_rf_detr.build(4)).model.model.backbone.backbone.embeddings
    tokens = torch.zeros(1, 1 + (side // 16) ** 2, 32)
    mine = embeddings.interpolate_pos_encoding(tokens, side, side)
    expected = type(embeddings).interpolate_pos_encoding(embeddings, tokens, side, side)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(embeddings.interpolate_pos_encoding(tokens, side, side), mine)
    assert mine.shape == tokens.shape
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)
    embeddings.double()
    exact = embeddings.interpolate_pos_encoding(tokens, side, side)
    assert exact.dtype == torch.float64 and not torch.equal(exact, exact.float().double())


def test_under_bf16_autocast_queries_and_boxes_are_float32():
    detector = moved(small_rf_detr.build(4))
    images = torch.randn(1, 3, 128, 128, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        logits, boxes = detector._predict(images)
        attended = detector.backbone.encoder.layer[0].attention(torch.zeros(4, 17, 32))[0]
    assert attended.dtype == torch.bfloat16 and logits.dtype == boxes.dtype == torch.float32
    assert not torch.equal(logits, detector._predict(images)[0])


def test_what_is_never_used_is_frozen_and_all_else_is_trained():
    detector = small_rf_detr.build(4)
    token, last = "model.model.backbone.backbone.embeddings.mask_token", "layer.3."
    frozen = {name for name, p in detector.named_parameters() if not p.requires_grad}
    assert token in frozen and {name.rpartition(last)[1] for name in frozen - {token}} == {last}
    nano = build_detector(DetectorSpec("rf_detr", "rf_detr_nano", 4))
    assert [name for name, p in nano.named_parameters() if not p.requires_grad] == [token]


def test_stochastic_depth_drops_all_windows_of_an_image_and_more_in_deeper_layers():
    detector = small_rf_detr.build(4, drop_path=0.6)
    layers = detector.backbone.encoder.layer
    assert drop_path.convert(detector) == 3  # the first layer keeps all
    assert [layer.drop_path.drop_prob for layer in layers[1:]] == pytest.approx([0.2, 0.4, 0.6])
    detector.double().train()
    images, targets = batch([3, 1])
    totals = detector.counts(targets, (SIDE, SIDE))
    losses = []
    for draws in ([0.0, 0.0], [1.0, 0.0], [1.0, 0.0]):
        drop_path.set_draws(detector, torch.tensor([draws] * 3))
        losses.append(detector.losses(images, targets, totals)[0].tolist())
    assert losses[1] == losses[2] and losses[0][0] != losses[1][0]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-12)
    rows = layers[1].drop_path(torch.ones(8, 5, 32))  # two images of four windows each
    assert rows[:4].eq(0).all() and rows[4:].gt(1).all()


def test_initial_weights_are_those_of_the_authors():
    detector = build_detector(DetectorSpec("rf_detr", "rf_detr_nano", 4))
    whole, model = detector.model, detector.model.model
    assert whole.class_embed.bias.tolist() == pytest.approx([-math.log(99)] * 4)
    assert not model.reference_point_embed.weight.any()
    assert model.query_feat.weight.std().item() == pytest.approx(1, abs=0.01)
    assert not whole.bbox_embed.layers[-1].weight.any() and not whole.bbox_embed.layers[-1].bias.any()
    for heads, head in ((model.enc_out_class_embed, whole.class_embed), (model.enc_out_bbox_embed, whole.bbox_embed)):
        assert len(heads) == 13
        for name, tensor in head.state_dict().items():
            assert all(torch.equal(of_group.state_dict()[name], tensor) for of_group in heads)
    layer = model.decoder.layers[0]
    bounds = {"self_attn.q_proj": (6 / 1024) ** 0.5, "self_attn.o_proj": (6 / 512) ** 0.5, "mlp.fc1": (6 / 2304) ** 0.5}
    for name, bound in bounds.items():
        assert layer.get_submodule(name).weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert not layer.cross_attn.sampling_offsets.weight.any() and layer.cross_attn.sampling_offsets.bias.any()
    assert detector.backbone.encoder.layer[5].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert detector.no_weight_decay() == {"model.model.backbone.backbone.embeddings.position_embeddings"}
    # At first, each group selects the same places, and all boxes have the same size.
    logits, boxes = detector.train()._predict(torch.randn(1, 3, 96, 96))
    assert logits.sigmoid().mean().item() == pytest.approx(0.01, abs=0.01) and boxes[..., 2:].std() < 1e-6
