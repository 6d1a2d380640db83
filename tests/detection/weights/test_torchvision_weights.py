"""A detector that begins with torchvision's weights is torchvision's; other files are refused.

torchvision's own models get random weights, ours their file. Both then see the same photographs.
"""

import argparse
import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_sample_images
from torchvision.models import get_model_builder
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops.misc import FrozenBatchNorm2d

from common.config.parsing import parse
from common.detection.batches import DetectionBatch
from common.detection.weights import sources, torchvision_weights
from common.errors import Refused
from tests.harness.several import load_recipe

RECIPE = load_recipe(Path("recipes/det.py"))
# The others have the most parts of their own.
LONG = ("retinanet_resnet50_fpn", "maskrcnn_resnet50_fpn")
LONG += ("fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2")
SKIPPED = {"fcos_resnet50_fpn": 0.2}  # scores up to this are no detections of torchvision's


def load_photographs() -> list[torch.Tensor]:
    """Crops of two photographs, uint8[3, H, W]: portrait, tiny, and three times as wide as high."""
    china, flower = (
        torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images
    )
    return [flower[:, 100:331, 200:350], china[:, :61, :50], flower[:, 100:230, 50:440]]


def build_random_model(name: str, classes: int = 91, frozen: bool = False) -> torch.nn.Module:
    """A model of torchvision whose scores and boxes differ from place to place."""
    torch.manual_seed(0)
    model = get_model_builder(name)(weights=None, weights_backbone=None, num_classes=classes).eval()
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
            elif key.endswith("running_mean"):
                buffer.normal_(0, 0.1)
        for key, parameter in model.named_parameters():
            if re.search(r"(?<!rpn.head.)(cls_logits|cls_score)", key):
                scale = 0.02 if key.startswith("head") else 0.05
                if name == "fasterrcnn_resnet50_fpn_v2":  # its features are a hundred times larger
                    scale = 0.001
                parameter.normal_(0, scale) if parameter.dim() > 1 else parameter.fill_(
                    -2.0 * key.startswith("head")
                )
            elif key.endswith("bbox_reg.bias") and name.startswith("fcos"):
                parameter.normal_(2, 0.5)  # boxes with an area
            elif "bbox_pred.weight" in key:
                parameter.normal_(0, 0.02)
    if frozen:  # as published, with the state dict of its kind of batch norm
        for parent in list(model.modules()):
            for key, child in list(parent.named_children()):
                if isinstance(child, torch.nn.BatchNorm2d):
                    frozen_norm = FrozenBatchNorm2d(child.num_features)
                    frozen_norm.load_state_dict(
                        {key: child.state_dict()[key] for key in frozen_norm.state_dict()}
                    )
                    setattr(parent, key, frozen_norm)
    return model


def start_from(source: str | Path, classes: tuple[str, ...], *words: str):
    """The recipe's configuration, detector and words about it for `--init SOURCE`."""
    argv = ["--init", str(source), "--data", "digits"] + list(words)
    config = parse(RECIPE.Config, argv)
    model = RECIPE.build_model(config, classes, torch.device("cpu"))
    return config, model, model.weights_summary


def compute_both(reference, config, ours, photo: torch.Tensor) -> tuple[dict, dict]:
    """What torchvision finds in a photograph at scale 1, and what we find."""
    height, width = photo.shape[1:]
    reference.transform.min_size, reference.transform.max_size = (
        (min(height, width),),
        max(height, width),
    )
    # Around it.
    noise = torch.randint(
        256, (1, 3, -(-height // 32) * 32, -(-width // 32) * 32), dtype=torch.uint8
    )
    noise[0, :, :height, :width] = photo
    batch = DetectionBatch(noise, [], torch.zeros(1), torch.tensor([[width, height]]))
    normalize = RECIPE.build_transforms(config, ours, torch.device("cpu")).normalize
    with torch.no_grad():
        return reference([photo / 255])[0], ours.eval().detect(normalize(batch), batch.sizes)[0]


EVERY = [
    pytest.param(name, marks=[pytest.mark.long] * (name in LONG))
    for name in torchvision_weights.SETTINGS
]


@pytest.mark.parametrize("name", EVERY)
def test_a_file_of_torchvision_is_its_detector(name: str, tmp_path: Path) -> None:
    reference = build_random_model(name)
    torch.save(reference.state_dict(), tmp_path / "x.pth")
    weights = sources.read_weights(str(tmp_path / "x.pth"))
    config, ours, message = start_from(
        tmp_path / "x.pth", weights.row_names[weights.has_background :]
    )
    everything = len(ours.state_dict())
    assert (
        message == f"{everything} of {everything} tensors of {tmp_path}/x.pth"
        and config.batch_norm == "frozen"
    )
    assert (
        weights.classes == sources.read_weights(f"torchvision:{name}", load_tensors=False).classes
        and weights.classes[1] == "person"
    )
    images = torch.rand(1, 3, 160, 288)
    with torch.no_grad():  # few boxes come from the coarsest levels
        for actual, expected in zip(
            ours.eval().backbone(images), reference.backbone(images).values(), strict=True
        ):
            torch.testing.assert_close(actual, expected)
    num_detections = 0
    for photo in load_photographs()["rcnn" in name :]:  # second stages take long
        expected, actual = compute_both(reference, config, ours, photo)
        is_certain = actual["scores"] > SKIPPED.get(name, 0)
        boxes, scores, labels = (actual[key][is_certain] for key in ("boxes", "scores", "labels"))
        assert len(boxes) == len(expected["boxes"])
        torch.testing.assert_close(boxes, expected["boxes"], rtol=0, atol=0.01)
        torch.testing.assert_close(scores, expected["scores"], rtol=0, atol=1e-5)
        assert torch.equal(labels + weights.has_background, expected["labels"])
        if name.startswith("mask"):
            pasted = paste_masks_in_image(actual["masks"][:, None], boxes, photo.shape[1:])
            torch.testing.assert_close(pasted, expected["masks"], rtol=0, atol=1e-4)
            assert (pasted > 0.5).any()
        num_detections += len(boxes)
    assert num_detections >= 40


@pytest.fixture(scope="module")
def fcos() -> torch.nn.Module:
    return build_random_model("fcos_resnet50_fpn")


def test_classes_keep_their_rows_by_name(fcos, tmp_path: Path) -> None:
    torch.save(fcos.state_dict(), tmp_path / "x.pth")
    names = ("mug", "Traffic_Light", "gnu", "pedestrian")
    argv = ["--init_classes", "mug=cup,pedestrian=person"]
    _, ours, message = start_from(tmp_path / "x.pth", names, *argv)
    assert message.endswith(
        ", head new for 1 of 4 classes (gnu), kept for mug, Traffic_Light, pedestrian"
    )
    trained = fcos.head.classification_head.cls_logits
    head = ours.head.classification_head.cls_logits
    for row, number in ((0, 47), (1, 10), (3, 1)):  # their ids in COCO
        assert (
            torch.equal(head.weight[row], trained.weight[number])
            and head.bias[row] == trained.bias[number]
        )
    with pytest.raises(Refused, match="must be OWN=THEIRS"):
        start_from(tmp_path / "x.pth", names, "--init_classes", "mug")


def test_checkpoints_of_training_programs_are_read(fcos, tmp_path: Path) -> None:
    """torchvision's references keep the command line in a checkpoint; DDP, Lightning and
    torch.compile add to names.
    """
    state = fcos.state_dict()
    older = {name: tensor + 1 for name, tensor in fcos.state_dict().items()}
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    program = {"optimizer": {"state": {}}, "args": argparse.Namespace(data="coco"), "epoch": 3}
    lightning = {f"model.{name}": tensor for name, tensor in state.items()}
    compiled = {f"_orig_mod.module.{name}": tensor for name, tensor in state.items()}
    for content, argv in (
        ({"epoch": 3, "model_state_dict": state, "optimizer_state_dict": {}, "loss": 0.1}, ""),
        (program | {"state_dict": lightning, "pytorch-lightning_version": "2.5.0"}, ""),
        ({"weights": compiled}, ""),
        (lightning, ""),
        ({"model": older, "ema_state_dict": state}, ", its moving average"),
        (program | {"model": wrapped}, ""),
        (
            {"model": older, "model_ema": wrapped | {"n_averaged": torch.ones(())}},
            ", its moving average",
        ),
    ):
        torch.save(content, tmp_path / "x.pth")
        weights = sources.read_weights(str(tmp_path / "x.pth"))
        assert "".join(weights.notes) == argv
        assert torch.equal(
            weights.tensors["backbone.features.conv1.weight"], state["backbone.body.conv1.weight"]
        )


def test_published_batch_norm_has_no_epsilon(tmp_path: Path) -> None:
    """A published file has none, as its name or the user says; for other files a note says so."""
    reference = build_random_model("retinanet_resnet50_fpn", frozen=True)
    with torch.no_grad():
        for module in reference.modules():
            if isinstance(module, FrozenBatchNorm2d):
                module.eps = 0.0
                module.weight.mul_(0.003)
                module.running_var.mul_(1e-5)  # where an epsilon of 1e-5 makes a difference
    file = tmp_path / "x.pth"
    torch.save(reference.state_dict(), file)
    names = sources.read_weights("torchvision:retinanet_resnet50_fpn", load_tensors=False).row_names
    config, unsure, message = start_from(file, names)
    assert message.endswith("name them torchvision:retinanet_resnet50_fpn=FILE")
    _, marked, message = start_from(f"torchvision:retinanet_resnet50_fpn={file}", names)
    assert "epsilon" not in message
    published = file.rename(tmp_path / "retinanet_resnet50_fpn_coco-eeacb38b.pth")
    file.symlink_to(published)
    weights = sources.read_weights(str(published))
    named = sources.read_weights(f"torchvision:retinanet_resnet50_fpn={file}")
    assert (
        "epsilon" not in "".join(weights.notes) and weights.tensors.keys() == named.tensors.keys()
    )
    assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in named.tensors.items())
    photo = load_photographs()[1]
    for ours, same in ((marked, True), (unsure, False)):
        expected, actual = compute_both(reference, config, ours, photo)
        near = len(actual["boxes"]) == len(expected["boxes"]) > 10
        assert same == (
            near and torch.allclose(actual["scores"], expected["scores"], rtol=0, atol=1e-5)
        )


def test_what_is_no_detector_of_torchvision_is_refused(fcos, tmp_path: Path, monkeypatch) -> None:
    state = fcos.state_dict()
    file = tmp_path / "x.pth"
    small = state | {"head.classification_head.conv.0.weight": torch.zeros(64, 256, 3, 3)}
    for content, says in (
        (
            {"conv1.weight": torch.zeros(1), "fc.weight": torch.zeros(2)},
            "of no detector that is known here .2 tensors",
        ),
        (
            {"state": {0: {"step": torch.ones(())}}, "param_groups": []},
            "no weights of a model, it has state, param",
        ),
        (torch.nn.Linear(1, 1), "would execute code to be read .torch.nn.modules.linear.Linear"),
        (
            {"backbone.body.0.0.weight": torch.ones(1)},
            "of no detector that is known here .1 tensors, first backbone.body",
        ),
        (small, "not of fcos_resnet50_fpn, which it resembles: size mismatch for head"),
        (state, ""),
    ):
        torch.save(content, file)
        with pytest.raises(
            Refused, match=says or "--width 256 there, 128 here; leave these flags out"
        ):
            start_from(file, ("mug",), "--width", "128")
    file.write_bytes(file.read_bytes()[:100_000])
    (tmp_path / "garbage.pth").write_bytes(b"abc")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    for source, says in (
        (str(file), "not a whole file of torch"),
        (str(tmp_path / "garbage.pth"), "not a whole file of torch"),
        (
            "torchvision:fcos_resnet50_fpn",
            "can't be downloaded .*; fetch https://.* on a machine with a network",
        ),
        (
            "torchvision:fcos_resnet50",
            "no detector of torchvision that .*; did you mean fcos_resnet50_fpn",
        ),
        (
            "torchvision:ssd300_vgg16",
            "no detector of torchvision that a family of --detector matches; there are "
            "torchvision:fcos",
        ),
        (
            str(tmp_path / "nothing.pth"),
            "nothing is there; there are a run's best/, torchvision:NAME",
        ),
    ):
        with pytest.raises(Refused, match=says):
            sources.read_weights(source)
