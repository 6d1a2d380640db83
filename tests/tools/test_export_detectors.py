"""An exported detector is the one that was measured: the same boxes, scores and classes for
pictures of any size.

It is compared with the recipe's own evaluation: on the validation set by average precision, and
detection by detection; on photographs for every family of detectors, with and without the runtimes.
What differs is refused by the images' names.
"""

import contextlib
import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image

from common.detection.batches import EvalDataset, Transforms
from common.detection.data.annotated import Annotated, build_empty_columns
from common.detection.models.detectors import Detector, build_detector
from common.detection.models.detr_models import TRANSFORMERS_FAMILIES
from common.detection.models.spec import DetectorSpec
from common.detection.transforms import BoxAugmentation
from common.errors import Refused
from common.run.eval_batches import EvalBatches
from tests.harness import small_rf_detr
from tests.harness.runs import copy_run, read
from tests.tools.test_export import check
from tools.export import formats, verify
from tools.export.__main__ import load_task, main
from tools.export.detector import MAX_SCORE_CHANGE, compare
from tools.export.detector_module import Exportable
from tools.export.proof import evaluate
from tools.trained import RECIPES, TrainedModel, load_recipe

CLASSES = tuple("0123456789")
SPECS = {
    "fcos": DetectorSpec("fcos", "test_resnet", 10, levels=(3, 6), width=64, convolutions=2),
    "retinanet": DetectorSpec(
        "retinanet", "test_resnet", 10, levels=(3, 6), width=64, convolutions=2
    ),
    "faster_rcnn": DetectorSpec(
        "faster_rcnn", "test_resnet", 10, levels=(2, 5), width=64, hidden=64, mask_width=32
    ),
    "mask_rcnn": DetectorSpec(
        "mask_rcnn", "test_resnet", 10, levels=(2, 5), width=64, hidden=64, mask_width=32
    ),
    "rtdetr_v2": DetectorSpec("rtdetr_v2", "resnet10t", 10, width=64),
    "dfine": DetectorSpec("dfine", "resnet10t", 10, width=64),
    "deimv2": DetectorSpec("deimv2", "deimv2_n", 10),
    "rf_detr": None,
    "rf_detr_seg": None,
}
MASKS = {"mask_rcnn": "masks", "rf_detr_seg": "mask_logits"}
# Of class scores, which random weights hardly tell difference.
CONTRAST = {"faster_rcnn": 30, "mask_rcnn": 30}
DETECTIONS = ["boxes", "scores", "labels"]
EVERYWHERE = ("onnx", "openvino", "torch_export")


class Photographs(Annotated):
    """Photographs of several sizes, without boxes."""

    def __init__(self) -> None:
        pictures = [
            getattr(skimage.data, name)() for name in ("astronaut", "coffee", "chelsea", "rocket")
        ]
        pictures += [
            pictures[0][:90, :300],
            pictures[1][:, :37],
            pictures[2][:64, :64],
            pictures[3][:33, :600],
        ]
        self.pictures = [Image.fromarray(picture) for picture in pictures]
        super().__init__(
            **build_empty_columns(CLASSES, np.array([picture.size for picture in self.pictures]))
        )

    def get_content(self, index: int) -> Image.Image:
        return self.pictures[index]

    def get_name(self, index: int) -> str:
        return f"photograph {index}"

    def pixels(self, index: int) -> np.ndarray:
        """uint8[1, 3, H, W]"""
        return np.asarray(self.pictures[index]).transpose(2, 0, 1)[None].copy()


def build_random_detector(family: str) -> tuple[Detector, BoxAugmentation]:
    """A small detector with random weights that finds something, and how images are resized for it."""
    is_rf_detr = family in small_rf_detr.FAMILIES
    detector = small_rf_detr.build(10, family) if is_rf_detr else build_detector(SPECS[family])
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in detector.named_parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            parameter.add_(0.3 * noise * (parameter.abs().mean() + 0.01))
            if any(
                part in name for part in ("cls_logits", "cls_score", "class_embed", "score_head")
            ):
                parameter.mul_(CONTRAST.get(family, 1) if name.endswith("weight") else 0.5)
    side = small_rf_detr.SIDE if is_rf_detr else 160
    return detector.eval(), BoxAugmentation(0, (side,), 256, square=family in TRANSFORMERS_FAMILIES)


def evaluate_by_recipe(
    detector: Detector, plain: BoxAugmentation, source: Photographs
) -> list[dict[str, np.ndarray]]:
    """What the recipe's evaluation finds in each image."""
    recipe = load_recipe(RECIPES / "det.py")
    transforms = Transforms(detector, plain, plain, torch.float32, torch.device("cpu"))
    dataset = EvalDataset(source, transforms)
    batches = [dataset.__getitems__(np.array([index])) for index in range(len(source))]
    loader = type("Loader", (list,), {"dataset": dataset})(batches)
    accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=contextlib.nullcontext)
    trained = TrainedModel(recipe, recipe.Config(), None)
    return [
        {name: detections[name].numpy() for name in DETECTIONS}
        for _, (detections,) in trained.predict(
            detector, EvalBatches(loader, dataset.normalize, accelerator)
        )
    ]


def list_outputs(family: str) -> list[str]:
    if family in MASKS:
        return DETECTIONS + [MASKS[family]]
    return DETECTIONS


def detect(module: torch.nn.Module, pixels: np.ndarray) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return dict(
            zip(
                DETECTIONS,
                (column.numpy() for column in module(torch.from_numpy(pixels))),
                strict=False,
            )
        )


def check_photographs(detector: Detector, plain: BoxAugmentation, sessions: dict) -> None:
    """Compare what `sessions` {name: (session, largest difference in pixels)} find with the evaluation."""
    source = Photographs()
    expected = evaluate_by_recipe(detector, plain, source)
    sure = [
        int((detections["scores"] > detections["scores"].min(initial=1) + MAX_SCORE_CHANGE).sum())
        for detections in expected
    ]
    # Those must have a counterpart. Scores of a DEIMv2 with random weights are all alike, so that
    # only they are compared.
    assert max(sure) >= 10 or getattr(detector.model.config, "model_type", "") == "deimv2", sure
    for name, (session, max_change) in sessions.items():
        for index, detections in enumerate(expected):
            exported = session(source.pixels(index))
            assert [exported[column].dtype for column in DETECTIONS] == [
                np.float32,
                np.float32,
                np.int64,
            ]
            assert np.abs(exported["scores"] - detections["scores"]).max(initial=0) <= 1e-3
            difference = compare(detections, exported, CLASSES)
            assert not difference.is_too_large and difference.largest["scores"] <= 1e-3, (
                name,
                source.get_name(index),
                difference,
            )
            assert difference.largest["boxes"] <= max_change, (
                name,
                source.get_name(index),
                difference,
            )


# The queries of the first are D-FINE's, too, and the boxes of the second Faster R-CNN's.
ALIKE = {"rtdetr_v2", "mask_rcnn"}


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[pytest.mark.long] * (family in ALIKE)) for family in SPECS],
)
def test_what_is_exported_finds_what_the_evaluation_finds(family, thorough, tmp_path) -> None:
    """The module; among long tests its files, too."""
    detector, plain = build_random_detector(family)
    module = Exportable(copy.deepcopy(detector), plain)
    outputs = list_outputs(family)
    sessions = {"torch": (lambda pixels: detect(module, pixels), 1e-3)}
    for name in EVERYWHERE if thorough else ():
        formats.write(name, module, False, outputs, tmp_path)
        sessions[name] = (
            verify.open_model(tmp_path, name, formats.FORMATS[name].file, outputs),
            0.05,
        )
    check_photographs(detector, plain, sessions)


@pytest.mark.parametrize("family", ["retinanet", pytest.param("mask_rcnn", marks=pytest.mark.long)])
def test_a_picture_may_show_one_object_or_none(family, thorough, tmp_path) -> None:
    detector, plain = build_random_detector(family)
    source = Photographs()
    scores = np.concatenate(
        [detections["scores"] for detections in evaluate_by_recipe(detector, plain, source)]
    )
    # Only the best detection of all is left.
    detector.score_threshold = float(np.sort(scores)[-2:].mean())
    expected = evaluate_by_recipe(detector, plain, source)
    assert sorted(len(detections["scores"]) for detections in expected) == [0] * 7 + [1]
    outputs = list_outputs(family)
    for name in EVERYWHERE if thorough else ["torch_export"]:
        formats.write(name, Exportable(copy.deepcopy(detector), plain), False, outputs, tmp_path)
        session = verify.open_model(tmp_path, name, formats.FORMATS[name].file, outputs)
        for index, detections in enumerate(expected):
            exported = session(source.pixels(index))
            assert {len(column) for column in exported.values()} == {len(detections["scores"])}
            assert np.abs(exported["boxes"] - detections["boxes"]).max(initial=0) <= 0.05
            assert np.array_equal(exported["labels"], detections["labels"])


def test_an_export_has_the_ap_of_its_run_without_torch(trained_detector, tmp_path) -> None:
    run = copy_run(trained_detector, tmp_path / "run")
    main([str(run), "--to", "onnx", "--workers", "0"])
    folder = run / "export" / "onnx"
    about = read(folder / "export.json")
    figures = about["validation"]
    recorded = read(run / "best" / "results.json")
    assert figures["AP"] == pytest.approx(recorded["AP"], abs=1e-6) and figures["AP"] > 0.1
    assert figures["AP_exported"] == pytest.approx(figures["AP"], abs=1e-4)
    assert figures["images"] == recorded["count"] and figures["differing"] == 0
    assert figures["largest_boxes_difference"] < 0.01 and len(about["vectors"]) == 10

    blocked = ("torch", "torchvision", "common", "tools")
    assert check(folder, blocked).returncode == 0
    with np.load(folder / "vectors.npz") as vectors:
        arrays = dict(vectors)
    arrays["boxes_3"][0] += 1
    np.savez_compressed(folder / "vectors.npz", **arrays)
    del about["files"]["vectors.npz"]
    (folder / "export.json").write_text(json.dumps(about))
    done = check(folder, blocked)
    assert done.returncode == 1 and f"{about['vectors'][3]}: missing: " in done.stdout

    # Other sizes than the training's, by both runtimes that read the file.
    import openvino

    session = verify.open_model(folder, "onnx", "model.onnx", list(DETECTIONS))
    exactly = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(folder / "model.onnx", "CPU", exactly)
    run_openvino = lambda pixels: {name: compiled([pixels])[name].copy() for name in DETECTIONS}  # noqa: E731
    task = load_task(str(run), ["--workers", "0"], 0)
    detector = task.model
    plain = task.batches.loader.dataset.augmentation
    check_photographs(detector, plain, {"onnx": (session, 0.01), "openvino": (run_openvino, 0.01)})


def test_other_boxes_are_refused_by_the_names_of_images(trained_detector, scenes) -> None:
    task = load_task(str(trained_detector), ["--workers", "0", "--data", str(scenes)], 0)
    assert not evaluate(task, lambda pixels: detect(task.module, pixels)).refusal

    def shifted(pixels: np.ndarray) -> dict[str, np.ndarray]:
        detections = detect(task.module, pixels)
        return detections | {"boxes": detections["boxes"] + np.float32(2)}

    verdict = evaluate(task, shifted)
    assert "AP is 0." in verdict.refusal and "7 of 7 images differ" in verdict.refusal
    assert not verdict.vectors and len(verdict.worst) == 7
    assert all(".png: " in text and "pixels" in text for text in verdict.worst)
    with pytest.raises(Refused, match=r"0\.png: scores of the exported model are not finite"):
        evaluate(
            task,
            lambda pixels: (
                detect(task.module, pixels) | {"scores": np.full(100, np.nan, np.float32)}
            ),
        )


def test_counterparts_of_detections() -> None:
    boxes = np.array([[0, 0, 10, 10], [20, 0, 30, 10], [50, 50, 60, 60]], np.float32)
    these = {
        "boxes": boxes,
        "scores": np.array([0.9, 0.5, 0.1], np.float32),
        "labels": np.array([1, 2, 3]),
    }
    part = lambda rows: {name: column[rows] for name, column in these.items()}  # noqa: E731
    assert not compare(these, part([1, 0, 2]), CLASSES).is_too_large  # in any order
    # The lowest may be below the threshold.
    assert not compare(these, part([0, 1]), CLASSES).is_too_large
    assert compare(these, part([0, 2]), CLASSES).text == "2 0.5000 at [20, 0, 30, 10] is missing"
    assert compare(part([0, 2]), these, CLASSES).text == "2 0.5000 at [20, 0, 30, 10] is new"
    difference = compare(these, these | {"boxes": boxes + np.float32(0.5)}, CLASSES)
    assert not difference.is_too_large and difference.largest == {"boxes": 0.5, "scores": 0}
    assert compare(these, these | {"labels": np.array([1, 1, 3])}, CLASSES).is_too_large
    none = part([])
    assert (
        not compare(none, none, CLASSES).is_too_large and compare(these, none, CLASSES).is_too_large
    )
