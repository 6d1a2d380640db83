"""Plots can be drawn from whatever a run left: no rows, one row, NaN, an incomplete line, odd class names."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from common.run import plots
from tests.harness.pictures import collect_texts, has_colour, read_picture

ROWS = [
    {"step": 1, "train/loss": 2.0, "train/lr": 0.1},
    {
        "step": 2,
        "train/loss": float("nan"),
        "train/lr": 0.1,
        "eval/loss": float("inf"),
        "eval/top1": None,
    },
    {"step": 3, "eval/loss": 1.5, "eval/top1": 0.5, "eval/ema_top1": 0.75},
]


@pytest.mark.parametrize("rows", [0, 1, 3, 2000], ids=lambda rows: f"{rows} rows")
def test_curves_are_drawn_from_the_rows_that_there_are(tmp_path: Path, rows: int) -> None:
    more = [{"step": step, "train/loss": 1 / step, "train/lr": 0.0} for step in range(4, rows + 1)]
    lines = "".join(json.dumps(row) + "\n" for row in (ROWS[:rows] + more))
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 4, "tra')
    plots.curves(tmp_path)
    pixels = read_picture(tmp_path / "pictures" / "curves.png")
    has_curve = [has_colour(pixels, colour) for colour in (plots.BLUE, plots.ORANGE, plots.GREEN)]
    assert has_curve == [rows > 0, rows >= 3, rows >= 3]


CURVES = {  # results of steps 1 to 3, the metric that leads, the step of best/ -> title and lines
    "the averaged weights lead": (
        {"top1": [0.9, 0.7, 0.7], "ema_top1": [0.4, 0.6, 0.65]},
        "ema_top1",
        3,
        "best/ is of step 3, top-1 (EMA) 65.00 %",
        ["top-1", "top-1 of the averaged weights (EMA)"],
    ),
    "a detector": (
        {"AP": [0.1, 0.3, 0.2], "AP50": [0.4, 0.5, 0.6]},
        "AP",
        2,
        "step 2, AP 30.00 %",
        ["AP", "AP50"],
    ),
    "a custom metric": (
        {"neg_error": [-3.0, -2.0, -1.5]},
        "neg_error",
        3,
        "neg_error -1.5",
        ["neg_error"],
    ),
}


@pytest.mark.parametrize("case", CURVES)
def test_curves_name_the_leading_metric_and_mark_the_best_step(tmp_path, monkeypatch, case) -> None:
    results, leading, best, title, lines = CURVES[case]
    rows = [
        {"step": index + 1} | {f"eval/{key}": of[index] for key, of in results.items()}
        for index in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "summary.json").write_text(
        json.dumps({"leading": f"eval/{leading}", "best": {"step": best}})
    )
    texts = collect_texts(monkeypatch, lambda: plots.curves(tmp_path))
    assert any(text.endswith(title) for text in texts) and f"best/ (step {best})" in texts
    assert all(line in texts for line in lines)
    assert not [text for text in texts if "top-1" in text and "top-1" not in lines]


def test_the_first_batch_is_shown_before_normalisation(tmp_path, monkeypatch) -> None:
    cells = []
    originals = np.random.default_rng(0).integers(256, size=(3, 8, 6, 3), dtype=np.uint8)
    originals[:, 0, 0] = 0
    originals[:, 0, 1] = 255
    monkeypatch.setattr(
        plots, "draw_cells", lambda of, headline, path: cells.extend([*of, headline])
    )
    colours = np.zeros((8, 6, 4), np.uint8)  # of a mask
    colours[2:4] = (200, 100, 0, 255)
    mean = (0.2, 0.4, 0.6)
    std = (0.1, 0.2, 0.3)
    images = torch.from_numpy((originals / 255.0 - mean) / std).permute(0, 3, 1, 2)
    pixels = [
        ("cat 70 %\ndog 30 %", "a.png", []),
        ("1 object", "b.png", [((1, 2, 3, 4), "dog")]),
        ("", "c.png", [], colours),
    ]
    parts = [(images[:2], pixels[:2]), (images[2:], pixels[2:])]
    plots.first_batch(
        iter(parts), 64, {"mean": mean, "std": std}, tmp_path / "run/pictures/first_batch.png"
    )
    *pictures, headline = cells
    under_mask = originals.copy()
    under_mask[2, 2:4] = originals[2, 2:4] // 2 + np.array([100, 50, 0])
    assert all((cell.pixels == of).all() for cell, of in zip(pictures, under_mask, strict=True))
    assert [(cell.caption, cell.footnote) for cell in pictures] == [
        (caption, name) for caption, name, *_ in pixels
    ]
    assert [(corners, name) for corners, name, _ in pictures[1].boxes] == [((1, 2, 3, 4), "dog")]
    assert headline.startswith("run: 3 of the first 64 samples as the model sees them (mean ")
    cells.clear()
    # Of a model that does not say how its images are normalised.
    plots.first_batch(parts, 64, {}, tmp_path)
    assert np.abs(cells[0].pixels.astype(int) - originals[0]).max() <= 1


def crop_photographs(count: int) -> list[np.ndarray]:
    """Squares of 224 pixels of scikit-learn's two photographs."""
    photographs = load_sample_images().images
    generator = np.random.default_rng(0)
    crops = []
    for index in range(count):
        photograph = Image.fromarray(photographs[index % 2])
        side = int(generator.integers(140, 420))
        left = int(generator.integers(photograph.width - side))
        top = int(generator.integers(photograph.height - side))
        crops.append(
            np.asarray(photograph.crop((left, top, left + side, top + side)).resize((224, 224)))
        )
    return crops


def draw_noise(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(256, size=(count, 224, 224, 3), dtype=np.uint8))


@pytest.mark.parametrize("draw", [crop_photographs, draw_noise])
def test_a_sheet_of_any_content_is_below_500_kb(draw, tmp_path: Path, monkeypatch) -> None:
    cells = [plots.Cell(pixels, "husky\n→ malamute", "a.jpg") for pixels in draw(24)]
    plots.draw_cells(cells, "24 mistakes", tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size < 500_000
    assert Image.open(tmp_path / "sheet.png").format == "PNG"
    reduced = read_picture(tmp_path / "sheet.png")
    assert reduced.shape[1] >= 1000

    monkeypatch.setattr(plots, "MAX_SHEET_BYTES", 10**9)
    plots.draw_cells(cells, "24 mistakes", tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 2_000_000
    # The mean over 8 x 8 pixels differs by less than 4 of 255 levels: texts and images are where
    # they were.
    sides = (reduced.shape[1] // 8, reduced.shape[0] // 8)
    means = [
        np.asarray(Image.fromarray(pixels).resize(sides, Image.Resampling.BOX), dtype=float)
        for pixels in (reduced, read_picture(tmp_path / "sheet.png"))
    ]
    assert np.abs(means[0] - means[1]).mean() < 4


def test_a_sheet_that_is_small_keeps_its_pixels(tmp_path: Path) -> None:
    cells = [
        plots.Cell(np.full((8, 8, 3), 10 * index, np.uint8), "7 → 1", "a.png")
        for index in range(24)
    ]
    plots.draw_cells(cells, "24 mistakes", tmp_path / "sheet.png")
    assert read_picture(tmp_path / "sheet.png").shape[1] > 1500


@pytest.mark.parametrize("classes", [1, 50, 1000])
def test_a_confusion_matrix_of_any_size_shows_its_mistake(
    tmp_path, monkeypatch, classes: int
) -> None:
    figures = []
    save = plots.save
    monkeypatch.setattr(
        plots, "save", lambda figure, path: (figures.append(figure), save(figure, path))
    )
    names = [f"$class_{{{index}}} 猫 & dog" for index in range(classes)]
    matrix = np.diag(np.full(classes + 1, 2))  # the last row and column are the background's
    matrix[0] = 0  # a class that does not occur
    matrix[-1, 0] = 3
    path = tmp_path / "pictures" / "confusion.png"
    plots.confusion(matrix, names, path, headline="nearly all is found")
    assert read_picture(path).shape[0] < 3000
    axes = figures[0].axes[0]
    assert axes.get_title().endswith("last evaluation: nearly all is found")
    if classes <= plots.NAMED_CLASSES:
        assert [label.get_text() for label in axes.get_yticklabels()][-1] == "background"
    if classes <= plots.NUMBERED_CLASSES:
        assert "3" in [text.get_text() for text in axes.texts]
    else:
        assert "background → $class_{0} 猫 & dog: 3" in figures[0].texts[0].get_text()


def test_a_shortened_name_keeps_its_distinctive_parts() -> None:
    assert plots.shorten_name("a  b\n", 5) == "a b"
    assert plots.shorten_name("defect_of_type_12", 9) == "defe…e_12"
    assert plots.shorten_name("/data/train/cat/0017.png", 16, path=True) == "…/cat/0017.png"
    assert plots.measure_breadth(plots.shorten_name("汽车和卡车的混合类别", 10)) <= 10
