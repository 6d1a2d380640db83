"""An exported detector is loaded by others and by us; any other folder is refused."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from common.detection.data import scenes
from common.detection.export import export
from common.detection.models.detectors import ClassRemapper, build_detector
from common.detection.models.spec import DetectorSpec
from common.detection.transforms import BoxAugmentation
from common.detection.weights.pretrained import load_pretrained
from common.detection.weights.sources import read_weights
from common.errors import Refused

SCRIPT = Path(__file__).parents[2] / "docs" / "detect.py"
SOURCE = scenes.load(0)[1]  # ten classes


def make(family, backbone="test_resnet", levels=(3, 5), classes=10, **options):
    """A detector that finds something, in the state that training leaves."""
    width = {"width": 32, "drop_path": 0.0} | options
    spec = DetectorSpec(family, backbone, classes, levels=levels, seed=3, **width)
    detector = build_detector(spec)
    spec_options = {name: getattr(spec, name) for name in ("width", "convolutions", "variant")}
    named = {
        "detector": family,
        "levels": f"{levels[0]}-{levels[1]}",
        "init_classes": "",
        "eval_only": "",
    }
    detector.flags = SimpleNamespace(**spec_options, **named)  # of the command line
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            if parameter.dim() > 1:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
            if name.endswith("cls_logits.bias") and "rpn" not in name:
                parameter.fill_(-1.0)
            if name.endswith("bbox_reg.bias") and family == "fcos":  # boxes with an area
                parameter.copy_(2 + 0.5 * torch.randn(parameter.shape, generator=generator))
    return detector.eval()


def export_to(detector, folder, short_side=128, long_side=256, source=SOURCE):
    export(detector, source, BoxAugmentation(0, (short_side,), long_side), {"AP": 0.5}, folder)
    return folder


@pytest.mark.parametrize(
    "family, backbone, levels",
    # the first: channels last
    [("fcos", "test_mambaout", (3, 7)), ("mask_rcnn", "test_efficientnet", (3, 4))],
)
def test_the_script_detects_without_this_project(
    family, backbone, levels, tmp_path, monkeypatch, capsys
) -> None:
    """Other sizes and families are compared in tests/recipes/test_det_evaluation.py."""
    assert not re.search(r"(import|from) (common|recipes|tools)\b", SCRIPT.read_text())
    detector = make(family, backbone, levels)
    blocks = np.random.default_rng(0).integers(0, 256, (8, 10, 3), dtype=np.uint8)
    image = Image.fromarray(blocks).resize((160, 128), Image.Resampling.NEAREST)
    image.save(tmp_path / "photo.png")
    argv = ["detect.py", str(export_to(detector, tmp_path / "best")), str(tmp_path / "photo.png")]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(SCRIPT))
    mean, std = (
        torch.tensor(detector.pretrained_cfg[name])[:, None, None] for name in ("mean", "std")
    )
    pixels = ((torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - mean) / std)[None]
    (expected_detections,) = detector.detect(pixels, torch.tensor([[160, 128]]))
    printed = (line.split() for line in capsys.readouterr().out.splitlines())
    _, names, scores, *sides = zip(*printed, strict=True)
    assert len(names) >= 20, "a comparison of next to nothing"
    np.testing.assert_allclose(np.array(scores, float), expected_detections["scores"], atol=2e-4)
    same = (
        np.array([SOURCE.classes.index(name) for name in names])
        == expected_detections["labels"].numpy()
    )
    apart = np.abs(np.array(sides, float).T - expected_detections["boxes"].numpy()).max(1)
    # Boxes of equal score may change places.
    assert same.mean() > 0.95 and np.quantile(apart[same], 0.95) < 0.05


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """A detector of three classes, and its folder."""
    detector = make("faster_rcnn", classes=3)
    return detector, export_to(detector, tmp_path_factory.mktemp("run") / "best", source=Three())


class Three:
    classes = ("cat", "dog", "emu")
    category_ids = np.array([7, 1, 90])


def test_a_folder_names_classes_and_is_readable_by_others(best, tmp_path) -> None:
    detector, folder = best
    config = json.loads((folder / "config.json").read_text())
    assert config["classes"] == ["cat", "dog", "emu"] and config["category_ids"] == [7, 1, 90]
    assert json.loads((folder / "results.json").read_text()) == {"AP": 0.5}
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "results.json",
    ]
    # It is for more than its owner.
    assert len({path.stat().st_mode & 0o777 for path in folder.iterdir()}) == 1
    with pytest.raises(FileExistsError):
        export_to(detector, folder)


def test_a_folder_that_is_not_whole_is_refused_in_one_line(best, tmp_path) -> None:
    for name, content, says in (
        ("model.safetensors", "torn", "not a whole exported detector .SafetensorError"),
        ("config.json", "{", "not a whole exported detector .JSONDecodeError"),
        ("config.json", None, "no exported detector, no config.json is in it"),
    ):
        folder = shutil.copytree(best[1], tmp_path / "best", dirs_exist_ok=True)
        (folder / name).unlink()
        if content:
            (folder / name).write_text(content)
        with pytest.raises(Refused, match=says):
            read_weights(str(folder))


NEW_CLASSES = {
    "emu cat dog": (3, 0),  # in another order
    "gnu elk dog fox cat": (5, 3),
    "elk gnu": (2, 2),
    "cat dog emu": (3, 0),  # all of it, bit by bit
}


@pytest.mark.parametrize("family", ["retinanet", "mask_rcnn"])
def test_a_new_run_begins_with_the_classes_that_are_known(family, tmp_path) -> None:
    options = {"hidden": 16, "mask_width": 16} if family == "mask_rcnn" else {}
    trained = make(family, classes=3, **options)
    folder = export_to(trained, tmp_path / "best", source=Three())
    trained_state = trained.state_dict()
    background = 1 if family.endswith("rcnn") else 0
    of_head = r"(?<!rpn.head.)(cls_logits|cls_score|mask_fcn_logits)\.|box_predictor.bbox"
    heads = {name for name in trained_state if re.search(of_head, name)}
    assert len(heads) == (6 if background else 2)

    def of_class(tensor, count: int, number: int):
        """The part of a tensor that is for a class, as torchvision lays it out: -1 is the background."""
        if background:
            return tensor.reshape(count + 1, -1)[number + 1]
        return tensor.reshape(-1, count, *tensor.shape[1:])[:, number]

    for names, (count, new) in NEW_CLASSES.items():
        fresh = make(family, classes=count, **options)
        names = names.split()
        before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
        message = load_pretrained(fresh, read_weights(str(folder)), fresh.flags, names)
        for name, tensor in fresh.state_dict().items():
            if name not in heads:
                assert torch.equal(tensor, trained_state[name]), name
                continue
            for number in range(-background, count):
                is_known = number < 0 or names[number] in Three.classes
                row = Three.classes.index(names[number]) if is_known and number >= 0 else number
                expected = (
                    of_class(trained_state[name], 3, row)
                    if is_known
                    else of_class(before[name], count, number)
                )
                assert torch.equal(of_class(tensor, count, number), expected), (name, number)
        taken = len(trained_state) - len(heads) * bool(new)
        kinds = (
            [name for name in names if (name in Three.classes) == is_known_class]
            for is_known_class in (False, True)
        )
        unknown, is_known = map(", ".join, kinds)
        some = f", head new for {new} of {count} classes ({unknown}), kept for {is_known}"
        head = {0: "", count: ", head new for all classes"}.get(new, some)
        assert message == f"{taken} of {len(trained_state)} tensors of {folder}{head}"


def test_classes_of_a_detector_are_matched_with_the_data() -> None:
    matches = {
        "boxes": torch.arange(20.0).view(5, 4),
        "scores": torch.arange(5.0),
        "labels": torch.tensor([2, 0, 1, 2, 0]),
    }
    detector = nn.Module()
    detector.detect = lambda images, sizes: [matches]
    (matched,) = ClassRemapper(detector, [2, 0]).detect(
        torch.zeros(1, 3, 8, 8), torch.tensor([[8, 8]])
    )
    assert matched["labels"].tolist() == [0, 1, 0, 1] and matched["scores"].tolist() == [0, 1, 3, 4]
