"""A run finds a removed, a moved and a relabelled box early, with the same `suspicious.csv` on one and two processes."""

import csv
import json
import shutil
from pathlib import Path

import pytest

PRESET = ["--config", "recipes/presets/det_digits.yaml", "--tracker", "none"]
REMOVED, MOVED, RELABELLED = 4, 10, 16  # images, of each of which the largest box is changed


@pytest.fixture
def spoilt(scenes: Path, tmp_path: Path) -> Path:
    """Scenes three of whose boxes are wrong."""
    folder = Path(shutil.copytree(scenes, tmp_path / "spoilt"))
    content = json.loads((folder / "train.json").read_text())
    for number in (REMOVED, MOVED, RELABELLED):
        found = [each for each in content["annotations"] if each["image_id"] == number]
        largest = max(found, key=lambda each: each["bbox"][2] * each["bbox"][3])
        left, top, width, height = largest["bbox"]
        if number == REMOVED:
            content["annotations"].remove(largest)
        if number == MOVED:
            largest["bbox"] = [left + 0.4 * width * (1 if left + 1.4 * width <= 96 else -1), top, width, height]
        if number == RELABELLED:
            largest["category_id"] = (largest["category_id"] - 1 + 9) % 30 + 1
    (folder / "train.json").write_text(json.dumps(content))
    return folder


@pytest.mark.long
def test_wrong_boxes_are_found_on_any_layout_and_once_a_run(run_several, spoilt, tmp_path) -> None:
    words, det = [*PRESET, "--output_dir", tmp_path, "--workers", 1], {"recipe": "recipes/det.py", "timeout": 600}
    again = ["--data", spoilt, "--init", tmp_path / "knowing/best", *"--opt adamw --lr 1e-5 --dtype float64".split()]
    words_of_two = [*words, *again, "--max_steps", 12, "--eval_every", 2]
    cases = {"knowing": [*words, "--max_steps", 250], "two": words_of_two}
    runs = run_several(2, cases, pictures=True, **det) | run_several(1, {"one": words_of_two}, **det)
    assert not {name: run.text for name, run in runs.items() if run.outcome != "ok"}
    assert not (tmp_path / "knowing/suspicious.csv").exists(), "no scene is seen twice"
    text = (tmp_path / "two/suspicious.csv").read_text()
    assert (tmp_path / "one/suspicious.csv").read_text() == text, "the same on any layout"
    rows = list(csv.DictReader(text.splitlines()))
    verdicts = {(row["kind"], int(Path(row["image"]).stem)): row["verdict"] for row in rows}
    assert verdicts.keys() >= {("missing", REMOVED), ("moved", MOVED), ("relabelled", RELABELLED)}, verdicts
    assert len(rows) < 12 and verdicts["missing", REMOVED] == "likely wrong"
    assert sum(row["verdict"] == "likely wrong" for row in rows) <= 3, "nobody else is accused"
    assert (tmp_path / "two/pictures/suspicious.png").stat().st_size > 10_000
    # A run that goes on does not look again, unless the file is gone.
    for steps, kept in ((14, True), (16, False)):
        if not kept:
            (tmp_path / "one/suspicious.csv").unlink()
        run_several(1, {"one": [*words_of_two, "--max_steps", steps]}, **det)
        found = (tmp_path / "one/suspicious.csv").read_text()
        assert found == text if kept else found.splitlines()[0] == text.splitlines()[0]
