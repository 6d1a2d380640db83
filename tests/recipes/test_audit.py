"""A run finds changed labels, accuses nobody where all labels are right, and says the same on any layout."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.classification import sources

SHARE = 0.05  # of the labels
RARE = 15  # zeros that are called otherwise
DIGITS = ["--config", "recipes/presets/digits.yaml", "--tracker", "none", "--workers", 1]
EXACT = (
    "--model test_vit --dtype float64 --max_steps 24 --schedule constant --lr 2e-3 "
    "--global_batch_size 48 --val_share 0.8 --eval_every 24"
)


def save(folder: Path, images: list[Image.Image], true: list[str], given: list[str]) -> Path:
    """A CSV file of the images with the given labels; the true ones are in truth.json, by the file's number."""
    (folder / "images").mkdir(parents=True)
    lines = ["path,label"]
    for number, (image, name) in enumerate(zip(images, given, strict=True)):
        image.save(folder / f"images/{number}.png")
        lines.append(f"images/{number}.png,{name}")
    (folder / "data.csv").write_text("\n".join(lines))
    (folder / "truth.json").write_text(json.dumps(true))
    return folder / "data.csv"


def changed(true: list[str], share: float) -> list[str]:
    """Labels of which `share` are another class: each other class as often."""
    random, given, names = np.random.default_rng(0), list(true), sorted(set(true))
    for number in random.permutation(len(true))[: round(share * len(true))].tolist():
        given[number] = names[(names.index(true[number]) + random.integers(1, len(names))) % len(names)]
    return given


@pytest.fixture(scope="module")
def digits() -> tuple[list[Image.Image], list[str]]:
    """The handwritten digits and their names."""
    parts = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    images = [source.image(index) for source in parts for index in range(len(source))]
    return images, [source.classes[label] for source in parts for label in source.labels.tolist()]


@pytest.fixture(scope="module")
def spoilt(digits, tmp_path_factory) -> Path:
    """Digits with some labels changed. Some zeros have a class of their own, too rare to be learnt."""
    images, true = digits
    zeros = [number for number, name in enumerate(true) if name == "0"][:RARE]
    named = ["rare" if number in zeros else name for number, name in enumerate(true)]
    given = [named[number] if number in zeros else name for number, name in enumerate(changed(true, SHARE))]
    return save(tmp_path_factory.mktemp("spoilt"), images, named, given)


def suspicious(folder: Path) -> list[dict]:
    with (folder / "suspicious.csv").open() as lines:
        return list(csv.DictReader(lines))


def judged(folder: Path, data: Path) -> tuple[float, float, float]:
    """Precision and recall of the rows that are likely wrong, and how many of the right ones suggest the true label."""
    truth = json.loads((data.parent / "truth.json").read_text())
    train, _ = sources.load(sources.Spec(str(data), seed=0, val_share=0.2))
    true = [truth[int(Path(train.name(index)).stem)] for index in range(len(train))]
    wrong = sum(train.classes[label] != name for label, name in zip(train.labels, true, strict=True))
    rows = [row for row in suspicious(folder) if row["verdict"] == "likely wrong"]
    of_rows = [(row, truth[int(Path(row["image"]).stem)]) for row in rows]
    hits = [row["suggested"] == name for row, name in of_rows if row["label"] != name]
    return len(hits) / max(1, len(rows)), len(hits) / wrong, float(np.mean(hits))


def test_changed_labels_are_found(run_several, spoilt) -> None:
    """Else a user would mend what is right. A class that is too rare to be learnt gets one line for all its images."""
    run = run_several(2, {"spoilt": ["--data", spoilt, *DIGITS]}, pictures=True, timeout=600)["spoilt"]
    assert run.outcome == "ok", run.text
    precision, recall, suggested = judged(run.folder, spoilt)
    assert precision >= 0.9 and recall >= 0.7 and suggested > 0.8, (precision, recall, suggested)
    assert (run.folder / "pictures/suspicious.png").stat().st_size > 10_000
    rows = suspicious(run.folder)
    (of_class,) = [row for row in rows if row["label"] == "rare"]
    assert (of_class["verdict"], of_class["suggested"]) == ("class", "0")


@pytest.mark.long
def test_right_labels_are_not_accused(run_several, digits, tmp_path) -> None:
    images, true = digits
    data = save(tmp_path / "data", images, true, true)
    run = run_several(2, {"clean": ["--data", data, *DIGITS]}, timeout=600)["clean"]
    assert run.outcome == "ok", run.text
    accused = [row for row in suspicious(run.folder) if row["verdict"] == "likely wrong"]
    assert len(accused) <= 2, "of 1,438 images"


def test_the_verdicts_are_the_same_on_any_layout(run_several, spoilt, tmp_path) -> None:
    words = ["--data", spoilt, *EXACT.split(), "--output_dir", tmp_path, "--tracker", "none"]
    runs = run_several(1, {"one": words})
    runs |= run_several(2, {"two": [*words, "--max_micro_batch_size", 6, "--workers", 1]})
    assert {run.outcome for run in runs.values()} == {"ok"}
    one, two = (suspicious(run.folder) for run in runs.values())
    assert len(one) >= 20
    for key in ("rank", "verdict", "image", "label", "suggested"):
        assert [row[key] for row in two] == [row[key] for row in one], key
    numbers = [[float(row["probability"] or 0) for row in rows] for rows in (one, two)]
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-6)
