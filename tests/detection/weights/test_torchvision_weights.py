"""A detector that begins with torchvision's weights is torchvision's detector; other files are refused in one line.

torchvision's own models get random weights, ours their file. Both then see the same photographs.
"""

import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_sample_images
from torchvision.models import get_model_builder
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops.misc import FrozenBatchNorm2d

from common.config.parsing import parse
from common.detection import defaults
from common.detection.batches import DetectionBatch
from common.detection.weights import sources, torchvision_weights
from tests.harness.several import load

RECIPE = load(Path("recipes/det.py"))
LONG = ("fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2")  # whose parts others have
SKIPPED = {"fcos_resnet50_fpn": 0.2}  # scores up to this are no detections of torchvision's


def photographs() -> list[torch.Tensor]:
    """Two photographs and crops of them, uint8[3, H, W]: portrait, tiny, and three times as wide as high."""
    china, flower = (torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images)
    return [china[:, :213, :320], flower[:, 100:331, 200:350], china[:, :61, :50], flower[:, 100:230, 50:440]]


def random_model(name: str, classes: int = 91, frozen: bool = False) -> torch.nn.Module:
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
                parameter.normal_(0, scale) if parameter.dim() > 1 else parameter.fill_(-2.0 * key.startswith("head"))
            elif key.endswith("bbox_reg.bias") and name.startswith("fcos"):
                parameter.normal_(2, 0.5)  # boxes with an area
            elif "bbox_pred.weight" in key:
                parameter.normal_(0, 0.02)
    if frozen:  # as published, with the state dict of its kind of batch norm
        for parent in [*model.modules()]:
            for key, child in [*parent.named_children()]:
                if isinstance(child, torch.nn.BatchNorm2d):
                    other = FrozenBatchNorm2d(child.num_features)
                    other.load_state_dict({key: child.state_dict()[key] for key in other.state_dict()})
                    setattr(parent, key, other)
    return model


def begun(source: str | Path, classes: tuple[str, ...], *words: str):
    """The recipe's configuration, detector and words about it for `--init SOURCE`."""
    argv = ["--init", str(source), "--data", "digits", *words]
    config = parse(RECIPE.Config, argv, suit=defaults.suited, origin=sources.origin)
    return config, *RECIPE.build_model(config, classes, torch.device("cpu"))


def both(theirs, config, ours, photo: torch.Tensor) -> tuple[dict, dict]:
    """What torchvision finds in a photograph at scale 1, and what we find."""
    height, width = photo.shape[1:]
    theirs.transform.min_size, theirs.transform.max_size = (min(height, width),), max(height, width)
    noise = torch.randint(256, (1, 3, -(-height // 32) * 32, -(-width // 32) * 32), dtype=torch.uint8)  # around it
    noise[0, :, :height, :width] = photo
    batch = DetectionBatch(noise, [], torch.zeros(1), torch.tensor([[width, height]]))
    normalize, _ = RECIPE.build_normalize(config, ours, torch.device("cpu"))
    with torch.no_grad():
        return theirs([photo / 255])[0], ours.eval().detect(normalize(batch), batch.sizes)[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name == "fasterrcnn_resnet50_fpn_v2"))
        for name in torchvision_weights.SETTINGS
    ],
)
def test_a_file_of_torchvision_is_its_detector(name: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    torch.save(theirs.state_dict(), tmp_path / "x.pth")
    weights = sources.read(str(tmp_path / "x.pth"))
    config, ours, said = begun(tmp_path / "x.pth", weights.row_names[weights.has_background :])
    everything = len(ours.state_dict())
    assert said == f"{everything} of {everything} tensors of {tmp_path}/x.pth" and config.batch_norm == "frozen"
    assert weights.classes == sources.peek(f"torchvision:{name}").classes and weights.classes[1] == "person"
    found = 0
    for photo in photographs():
        wanted, mine = both(theirs, config, ours, photo)
        kept = mine["scores"] > SKIPPED.get(name, 0)
        boxes, scores, labels = (mine[key][kept] for key in ("boxes", "scores", "labels"))
        assert len(boxes) == len(wanted["boxes"])
        torch.testing.assert_close(boxes, wanted["boxes"], rtol=0, atol=0.01)
        torch.testing.assert_close(scores, wanted["scores"], rtol=0, atol=1e-5)
        assert torch.equal(labels + weights.has_background, wanted["labels"])
        if name.startswith("mask"):
            pasted = paste_masks_in_image(mine["masks"][:, None], boxes, photo.shape[1:])
            torch.testing.assert_close(pasted, wanted["masks"], rtol=0, atol=1e-4)
            assert (pasted > 0.5).any()
        found += len(boxes)
    assert found >= 40
