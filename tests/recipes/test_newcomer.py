"""The shortest command on a folder of photographs trains with settings that suit photographs, and says so."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_sample_images

from common.config.parsing import parse
from tests.harness.several import load

SHAPES = ((320, 240), (240, 320), (300, 300), (427, 200))


def crops(count: int) -> list[Image.Image]:
    """Parts of scikit-learn's two photographs, in turn of each and of several shapes."""
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    generator, parts = np.random.default_rng(0), []
    for number in range(count):
        width, height = SHAPES[number // 2 % len(SHAPES)]
        left, top = generator.integers((640 - width, 427 - height), endpoint=True).tolist()
        parts.append(photographs[number % 2].crop((left, top, left + width, top + height)))
    return parts


@pytest.fixture(scope="module")
def flowers(tmp_path_factory) -> Path:
    """A folder a class: 5 photographs of a temple, 5 of a flower."""
    folder = tmp_path_factory.mktemp("home") / "flowers"
    for name in ("china", "flower"):
        (folder / name).mkdir(parents=True)
    for number, part in enumerate(crops(10)):
        part.save(folder / ("china", "flower")[number % 2] / f"IMG_{number:04}.JPG")
    return folder


@pytest.fixture(scope="module")
def boxes(tmp_path_factory) -> Path:
    """A folder in COCO's format: 5 photographs, of which the middle is an object."""
    folder = tmp_path_factory.mktemp("boxes")
    (folder / "train").mkdir()
    images, annotations = [], []
    for number, part in enumerate(crops(5)):
        part.save(folder / "train" / f"{number}.jpg")
        width, height = part.size
        images.append({"id": number, "file_name": f"{number}.jpg", "width": width, "height": height})
        box = [width // 4, height // 4, width // 2, height // 2]
        annotations.append({"id": number, "image_id": number, "category_id": number % 2, "bbox": box, "iscrowd": 0})
    categories = [{"id": 0, "name": "china"}, {"id": 1, "name": "flower"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "train.json").write_text(json.dumps(content))
    return folder


def table(stdout: str) -> dict[str, str]:
    return dict(re.findall(r"^  ([a-z ]+?)  +(.+)$", stdout, re.MULTILINE))


def test_a_folder_is_trained_on_as_photographs_on_any_layout(run_several, flowers) -> None:
    """With an odd batch."""
    command = ["--data", flowers, "--max_steps", 2, "--global_batch_size", 3, "--log_every", 1]
    one, two = (run_several(count, {"run": command}, as_typed=True)["run"] for count in (1, 2))
    for run in (one, two):
        assert run.outcome == "ok", run.text
        said = table(run.stdout)
        assert said["pretrained"].startswith("no; --pretrained ")
        assert said["input"] == "3 x 224 x 224"
        assert said["batch norm"].startswith("none in this model")
        config = yaml.safe_load((run.folder / "config.yaml").read_text())
        assert (config["image_size"], config["hflip"], config["model"]) == (0, 0.5, "convnext_atto")
        exported = json.loads((run.folder / "best" / "config.json").read_text())
        assert exported["pretrained_cfg"]["input_size"] == [3, 224, 224]
    assert len(one.column("train/loss")) == 2
    np.testing.assert_allclose(two.column("train/loss"), one.column("train/loss"), rtol=1e-3)


def test_photographs_with_boxes_are_trained_on_as_photographs(run_several, boxes) -> None:
    command = ["--data", boxes, "--max_steps", 1, "--global_batch_size", 2]
    run = run_several(1, {"one": command}, recipe="recipes/det.py", as_typed=True)["one"]
    assert run.outcome == "ok", run.text
    said = table(run.stdout)
    assert said["batch norm"].startswith("none in this model")
    assert said["pretrained"].startswith("no; --pretrained ")
    exported = json.loads((run.folder / "best" / "config.json").read_text())
    assert (exported["short_side"], exported["long_side"]) == (480, 800)
    recipe = load(Path("recipes/det.py"))
    assert parse(recipe.Config, ["--config", str(run.folder / "config.yaml")]).levels == "3-7"
