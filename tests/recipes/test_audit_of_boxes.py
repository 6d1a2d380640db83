"""A run finds a removed, a moved and a relabelled box early, with the same `suspicious.csv` on one and two processes."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from common.detection.data import sources

PRESET = ["--config", "recipes/presets/det_digits.yaml", "--tracker", "none"]
REMOVED, MOVED, RELABELLED = 3, 8, 13  # images, of each of which the largest box is changed
TRAIN, VAL = 32, 8


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    """Scenes of digits in COCO's format, three of whose boxes are wrong."""
    folder = tmp_path / "spoilt"
    (folder / "annotations").mkdir(parents=True)
    for part, count, source in zip(
        ("train", "val"), (TRAIN, VAL), sources.load(sources.Spec("digits", 0, 0.2)), strict=True
    ):
        (folder / part).mkdir()
        images, annotations = [], []
        for number in range(count):
            pixels, boxes, labels = source.scene(number)
            Image.fromarray(pixels).save(folder / part / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "width": 128, "height": 128})
            largest = (boxes[:, 2:] - boxes[:, :2]).prod(1).argmax()
            for row, ((left, top, right, bottom), label) in enumerate(
                zip(boxes.tolist(), labels.tolist(), strict=True)
            ):
                width, height = right - left, bottom - top
                change = number if part == "train" and row == largest else None
                if change == MOVED:
                    left += 0.4 * width * (1 if left + 1.4 * width <= 128 else -1)
                if change == RELABELLED:
                    label = (label + 3) % 10
                if change != REMOVED:
                    box = {"bbox": [left, top, width, height], "area": width * height, "category_id": label + 1}
                    annotations.append({"id": len(annotations) + 1, "image_id": number, "iscrowd": 0, **box})
        content = {"images": images, "annotations": annotations}
        content["categories"] = [{"id": label + 1, "name": str(label)} for label in range(10)]
        (folder / f"annotations/instances_{part}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.long
def test_wrong_boxes_are_found_on_any_layout_and_once_a_run(launch, run_several, spoilt, tmp_path) -> None:
    words = [*PRESET, "--output_dir", tmp_path, "--workers", 1]
    done = launch("multi_cpu", "recipes/det.py", *words, "--name", "knowing", "--max_steps", 250, timeout=400)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "knowing/suspicious.csv").exists(), "no scene is seen twice"
    words += [
        "--data",
        spoilt,
        "--init",
        tmp_path / "knowing/best",
        "--opt",
        "adamw",
        "--lr",
        1e-5,
        "--dtype",
        "float64",
    ]
    words += ["--max_steps", 12, "--eval_every", 2]
    done = launch("multi_cpu", "recipes/det.py", *words, "--name", "two", timeout=300)
    assert done.returncode == 0, done.stderr
    (one,) = run_several(1, {"one": words}, recipe="recipes/det.py").values()
    text = (tmp_path / "two/suspicious.csv").read_bytes()
    assert (one.folder / "suspicious.csv").read_bytes() == text, "the same on any layout"
    rows = list(csv.DictReader(text.decode().splitlines()))
    found = {(row["kind"], int(Path(row["image"]).stem)) for row in rows}
    assert found >= {("missing", REMOVED), ("moved", MOVED), ("relabelled", RELABELLED)}, found
    assert len(rows) < 12
    verdicts = {(row["kind"], int(Path(row["image"]).stem)): row["verdict"] for row in rows}
    assert verdicts["missing", REMOVED] == "likely wrong"
    assert sum(row["verdict"] == "likely wrong" for row in rows) <= 3 + TRAIN / 500, "nobody else is accused"
    assert (tmp_path / "two/pictures/suspicious.png").stat().st_size > 10_000
    # A run that goes on does not look again, unless the file is gone.
    (longer,) = run_several(1, {"one": [*words, "--max_steps", 14]}, recipe="recipes/det.py").values()
    assert (longer.folder / "suspicious.csv").read_bytes() == text
    (longer.folder / "suspicious.csv").unlink()
    (again,) = run_several(1, {"one": [*words, "--max_steps", 16]}, recipe="recipes/det.py").values()
    assert (again.folder / "suspicious.csv").read_text().splitlines()[0] == text.decode().splitlines()[0]
