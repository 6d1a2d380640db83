"""Every picture is drawn from whatever the run left: nothing, one row, not-a-number, a torn line, odd class names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from PIL import Image

from common import pictures

ROWS = [
    {"step": 1, "train/loss": 2.0, "train/lr": 0.1},
    {"step": 2, "train/loss": float("nan"), "train/lr": 0.1, "eval/loss": float("inf"), "eval/top1": None},
    {"step": 3, "eval/loss": 1.5, "eval/top1": 0.5, "eval/ema_top1": 0.75},
    {"epoch": 1},
]


def drawn(path: Path) -> np.ndarray:
    """The picture's pixels; nothing else may lie beside it."""
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert min(pixels.shape[:2]) > 150
    path.unlink()
    return pixels


def has(pixels: np.ndarray, colour: str) -> bool:
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return bool((np.abs(pixels.astype(int) - wanted).sum(2) < 12).any())


@pytest.mark.parametrize("rows", [0, 1, 2, 4], ids=lambda rows: f"{rows} rows")
def test_curves_show_what_is_there(tmp_path: Path, rows: int) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:rows]) + '{"step": 4, "tra')
    pictures.curves(tmp_path)
    pixels = drawn(tmp_path / "pictures" / "curves.png")
    shown = [has(pixels, colour) for colour in (pictures.BLUE, pictures.ORANGE, pictures.GREEN)]
    assert shown == [rows > 0, rows == 4, rows == 4]


def test_curves_of_a_detector_show_average_precision(tmp_path: Path) -> None:
    rows = [{"step": step, "eval/AP": step / 9, "eval/AP50": step / 5, "eval/ema_AP50": 0.9} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pictures.curves(tmp_path)
    pixels = drawn(tmp_path / "pictures" / "curves.png")
    assert [has(pixels, colour) for colour in (pictures.BLUE, pictures.ORANGE, pictures.GREEN)] == [False, True, True]


def test_curves_of_a_long_run_and_of_none(tmp_path: Path) -> None:
    pictures.curves(tmp_path, tmp_path / "pictures" / "other.png")
    drawn(tmp_path / "pictures" / "other.png")
    rows = ({"step": step, "train/loss": 1 / step, "train/lr": 0.0} for step in range(1, 2001))
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pictures.curves(tmp_path)
    assert has(drawn(tmp_path / "pictures" / "curves.png"), pictures.BLUE)


@pytest.mark.parametrize("classes", [1, 2, 10, 21, 100, 1000])
def test_a_confusion_matrix_of_any_size_shows_its_single_mistake(tmp_path: Path, classes: int) -> None:
    names = [f"$class_{{{index}}} 猫 & dog" for index in range(classes)]
    matrix = np.diag(np.full(classes, 2))
    matrix[0] = 0  # a class that does not occur
    if classes > 1:
        matrix[-1, 0] = 2
    path = tmp_path / "pictures" / "confusion.png"
    pictures.confusion(matrix, names, path)
    assert drawn(path).shape[0] < 3000
    if classes > pictures.NUMBERED_CLASSES:
        assert "dog: 2" in pictures._most_confused(matrix, names)


@pytest.mark.parametrize("classes", [1, 20, 50, 200])
def test_a_confusion_matrix_may_have_a_background(tmp_path: Path, monkeypatch, classes: int) -> None:
    figures, save = [], pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, path: (figures.append(figure), save(figure, path)))
    matrix = np.eye(classes + 1, dtype=int)
    pictures.confusion(matrix, ["a"] * classes, tmp_path / "pictures" / "a.png", headline="all is found")
    drawn(tmp_path / "pictures" / "a.png")
    axes = figures[0].axes[0]
    assert axes.get_title().endswith("last evaluation: all is found")
    if classes <= pictures.NAMED_CLASSES:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["a"] * classes + ["background"]
    assert len(axes.texts) == (classes + 1 if classes <= pictures.NUMBERED_CLASSES else 0)


def test_mistakes_of_all_shapes(tmp_path: Path) -> None:
    path = tmp_path / "pictures" / "mistakes.png"
    red = np.zeros((8, 8, 3), np.uint8) + np.array([200, 0, 0], np.uint8)
    images = [red, Image.new("RGB", (3000, 20), "blue"), Image.new("RGB", (1, 1))]
    for count in (0, 1, 3):
        pictures.mistakes(images[:count], [0] * count, [1] * count, [0.97] * count, ["a $ 猫", "b" * 200], path)
        assert has(drawn(path), "#c80000") == (count > 0)


def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "confusion.png"
    path.write_bytes(b"old")
    from matplotlib.figure import Figure

    def half(figure: Figure, file: BinaryIO, **options) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="no space"):
        pictures.confusion(np.eye(2, dtype=int), ["a", "b"], path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"confusion.png": b"old"}


def test_neither_pyplot_nor_an_early_matplotlib() -> None:
    """Importing the module costs no Matplotlib, and drawing touches no global state."""
    code = (
        "import sys; from common import pictures; assert 'matplotlib' not in sys.modules;"
        "import tempfile, pathlib; pictures.curves(pathlib.Path(tempfile.mkdtemp()));"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
