"""A detector's evaluation is the same on any layout, and users of `best/` get the same results.

The detectors have not learnt anything: the objects to find are what they detect themselves, moved a
little, which makes the AP sensitive to every pixel.
"""

import contextlib
import dataclasses
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from common.config.fields import get_fields_with
from common.config.origin import build_run_info
from common.config.parsing import get_identity, parse
from common.data.loader import create_eval_loader
from common.detection.data import sources
from common.detection.evaluation.metrics import Detections
from common.detection.export import build_export_config, export
from common.detection.models.detr_models import TRANSFORMERS_FAMILIES
from common.run.eval_batches import EvalBatches
from tests.harness.annotations import build_annotation, write_coco
from tests.harness.launching import add_small_defaults
from tests.harness.outcomes import read
from tests.harness.photographs import build_exif
from tests.harness.several import load_recipe

recipe = load_recipe(Path("recipes/det.py"))
FAMILIES = {
    "fcos": "--long_side 160 --levels 3-5 --batch_norm group",
    "retinanet": "--long_side 160 --levels 3-5",
    "faster_rcnn": "--long_side 160 --levels 2-5",
    "rtdetr_v2": "--short_sides 96",
    "dfine": "--short_sides 96",
    "deimv2": "--short_sides 96",
    "rf_detr": "--short_sides 128 --model RF_DETR --width 128",
}
FLAGS = "--short_sides 112 --width 64 --workers 0"
COUNT = 10
LIMITS = (1, 3, 30)  # images at once


@pytest.fixture(scope="module")
def photos(tmp_path_factory, rf_detr) -> Path:
    """Digits in COCO format, in images of many sizes, up to more than twice the evaluated size."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "rf_detr").symlink_to(rf_detr)
    draws = np.random.default_rng(0)
    _, source = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    for part, count in (("train", 1), ("val", COUNT)):
        (folder / part).mkdir()
        images = []
        for number in range(count):
            width, height = draws.integers(70, 129, 2).tolist()
            photo = Image.fromarray(source.draw_scene(number)[0][:height, :width])
            width, height = (round(side * (0.7 + 0.35 * number)) for side in (width, height))
            photo = photo.resize((width, height), Image.Resampling.BICUBIC)
            name = f"{part}/{number}.png"
            if number % 5 == 1:  # stored lying on its side, as cameras do
                name = f"{part}/{number}.jpg"
                photo.transpose(Image.Transpose.ROTATE_90).save(folder / name, exif=build_exif(6))
            else:
                photo.save(folder / name)
            images.append({"id": number, "file_name": name, "width": width, "height": height})
        category = [{"id": number + 1, "name": name} for number, name in enumerate(source.classes)]
        box = [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [2, 2, 9, 9]}]
        content = {"images": images, "annotations": box, "categories": category}
        (folder / f"{part}.json").write_text(json.dumps(content))
    return folder


@dataclasses.dataclass
class Case:
    """A detector, the images, and the recipe's evaluation of them."""

    family: str
    data: str
    dtype: str = "float32"

    def __post_init__(self) -> None:
        args = (
            f"{FLAGS} --detector {self.family} {FAMILIES[self.family]} --dtype {self.dtype} "
            f"--data {self.data}"
        )
        self.config = parse(
            recipe.Config,
            add_small_defaults(args.replace("RF_DETR", f"{self.data}/rf_detr").split(), "det"),
        )
        train, self.val = recipe.build_data(self.config)
        self.model = recipe.build_model(self.config, train.classes, torch.device("cpu"))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                scores = re.search("cls_(logits|score)", name) and "rpn" not in name
                if parameter.dim() > 1:
                    parameter += (0.2 if scores else 0.03) * torch.randn(
                        parameter.shape, generator=generator
                    )
                elif scores:
                    parameter.fill_(-7.0)
                if name.endswith("bbox_reg.bias") and self.family == "fcos":  # boxes with an area
                    parameter.copy_(2 + 0.5 * torch.randn(parameter.shape, generator=generator))
        self.transforms = recipe.build_transforms(self.config, self.model, torch.device("cpu"))

    def evaluate(self, max_images: int) -> tuple[dict, Detections]:
        dataset = recipe.EvalDataset(self.val, self.transforms)
        loader = create_eval_loader(dataset, max_images, self.config.workers)
        accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=contextlib.nullcontext)
        self.model.eval()
        evaluation = recipe.evaluate(
            self.model, EvalBatches(loader, dataset.normalize, accelerator), self.val
        )
        self.model.train()
        return evaluation.results(), evaluation.detections

    def with_objects(self):
        """The images, with every third detection of each, moved a little, as its objects."""
        images, rows = self.evaluate(COUNT)[1].to_arrays()
        chosen = np.concatenate([np.flatnonzero(images == index)[:30:3] for index in range(COUNT)])
        images = images[chosen]
        rows = rows[chosen]
        sides = np.tile(rows[:, 2:4] - rows[:, :2], 2)
        moved = rows[:, :4] + sides * np.random.default_rng(1).normal(0, 0.04, sides.shape)
        boxes = (
            np.sort(moved.reshape(-1, 2, 2), axis=1)
            .reshape(-1, 4)
            .clip(0, np.tile(self.val.sizes[images], 2))
        )
        return dataclasses.replace(
            self.val,
            offsets=np.concatenate([[0], np.cumsum(np.bincount(images, minlength=COUNT))]),
            boxes=boxes.astype(np.float32),
            truth=np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1).astype(
                np.float64
            ),
            labels=rows[:, 5].astype(np.int64),
            crowd=np.zeros(len(rows), bool),
            areas=(boxes[:, 2:] - boxes[:, :2]).prod(1).astype(np.float32),
        )


def test_the_limit_of_detections_follows_the_objects(tmp_path) -> None:
    """It is kept for best/ and for tools, and is no part of a run's identity."""
    boxes = [build_annotation(4, [3 * x, 3 * y, 2, 2]) for x in range(11) for y in range(10)]
    write_coco(write_coco(tmp_path, annotations=boxes), "val")
    for flags, limit in (
        ("fcos", 110),
        ("retinanet --variant torchvision", 300),
        ("fcos --max_detections 120", 120),
    ):
        flags = f"{FLAGS} --levels 3-5 --detector {flags} --data {tmp_path}"
        config = parse(recipe.Config, add_small_defaults(flags.split(), "det"))
        fields = get_identity(config)
        train, _ = recipe.build_data(config)
        model = recipe.build_model(config, train.classes, torch.device("cpu"))
        assert model.limit == limit and model.title.endswith(
            f", up to {limit} detections in an image"
        )
        assert build_export_config(model)["options"][
            "detections_per_img"
        ] == limit and fields == get_identity(config)
        transforms = recipe.build_transforms(config, model, torch.device("cpu"))
        best = tmp_path / f"best {limit}"
        export(model, train, transforms.resize, {}, best)
        record = {
            "name": "a",
            "recipe": "det",
            "step": 1,
            "config": dataclasses.asdict(config),
            "identity": fields,
        }
        (best / "run.json").write_text(
            json.dumps(build_run_info(record, get_fields_with(config, "is_recorded")))
        )
        evaluated = parse(recipe.Config, ["--eval_only", str(best)], "det")
        assert evaluated.max_detections == (120 if limit == 120 else 110)
    count = (
        "1 of 3 images have more than 100 boxes: up to 110 detections of a class count in each "
        "image, first"
    )
    assert any(count in note for note in train.notes)


@pytest.mark.parametrize("family", ["fcos", "faster_rcnn", "rtdetr_v2", "rf_detr"])
def test_detections_are_the_same_for_1_to_30_images_at_once(family, photos) -> None:
    """In float64."""
    case = Case(family, str(photos), "float64")
    case.val = case.with_objects()
    (results, detections), *results_by_limit = map(case.evaluate, LIMITS)
    images, rows = detections.to_arrays()
    assert 0.1 < results["AP"] < 0.95 and len(np.unique(images)) == COUNT
    for limit, (their_results, actual) in zip(LIMITS[1:], results_by_limit, strict=True):
        their_images, their_rows = actual.to_arrays()
        assert their_results == results, limit
        np.testing.assert_array_equal(their_images, images)
        np.testing.assert_allclose(their_rows, rows, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_users_of_best_get_the_ap_that_the_evaluation_gave(
    family, photos, tmp_path, monkeypatch, capsys
) -> None:
    """By transformers' pipeline, before it cuts coordinates to whole pixels, or by docs/detect.py."""
    case = Case(family, str(photos))
    case.val = case.with_objects()
    results, _ = case.evaluate(8)
    assert 0.1 < results["AP"] < 0.95
    best = tmp_path / "best"
    export(case.model, case.val, case.transforms.resize, results, best)
    files = [str(photos / image["file_name"]) for image in read(photos / "val.json")["images"]]
    rows = {file: [] for file in files}  # label, score, box
    if family in TRANSFORMERS_FAMILIES:
        pipeline = pytest.importorskip("transformers").pipeline(
            "object-detection", model=str(best), device="cpu"
        )
        pipeline._get_bounding_box = torch.Tensor.tolist
        for file in files:
            for detection in pipeline(file, threshold=0.0):
                rows[file].append((detection["label"], detection["score"], detection["box"]))
    else:
        monkeypatch.setattr(sys, "argv", ["detect.py", str(best)] + files)
        capsys.readouterr()
        runpy.run_path("docs/detect.py")
        for line in capsys.readouterr().out.splitlines():
            file, label, *numbers = line.split()
            score, *box = map(float, numbers)
            rows[file].append((label, score, box))
    sources = []
    for file in files:
        class_ids = [case.val.classes.index(label) for label, _, _ in rows[file]]
        boxes = torch.tensor([box for _, _, box in rows[file]]).reshape(-1, 4)
        scores = torch.tensor([score for _, score, _ in rows[file]])
        sources.append(
            {"labels": torch.tensor(class_ids, dtype=torch.int64), "scores": scores, "boxes": boxes}
        )
    detections = Detections()
    detections.update(range(COUNT), sources)
    assert detections.results(case.val)["AP"] == pytest.approx(results["AP"], abs=5e-4)
