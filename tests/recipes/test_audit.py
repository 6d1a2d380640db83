"""A run finds changed labels, accuses nobody where all labels are right, and says the same on any layout."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.classification import sources
from tests.harness import fashion_mnist

SHARE = 0.05  # of the labels
RARE = 15  # zeros that are called otherwise
DIGITS = ["--config", "recipes/presets/digits.yaml", "--tracker", "none", "--workers", 1]
EXACT = "--model test_vit --dtype float64 --max_steps 24 --schedule constant --lr 2e-3 --global_batch_size 48 --val_share 0.8"


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
    images, true = digits
    return save(tmp_path_factory.mktemp("spoilt"), images, true, changed(true, SHARE))


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


def test_changed_labels_are_found_and_right_ones_are_not_accused(run_several, spoilt, digits, tmp_path) -> None:
    """Else a user would mend what is right. A class that is too rare to be learnt gets one line for all its images."""
    images, true = digits
    zeros = [number for number, name in enumerate(true) if name == "0"]
    given = ["rare" if number in zeros[:RARE] else name for number, name in enumerate(true)]
    data = save(tmp_path / "data", images, true, given)
    cases = {"spoilt": ["--data", spoilt, *DIGITS], "clean": ["--data", data, *DIGITS]}
    runs = run_several(2, cases, pictures=True, timeout=600)
    assert {run.outcome for run in runs.values()} == {"ok"}

    precision, recall, suggested = judged(runs["spoilt"].folder, spoilt)
    assert precision >= 0.9 and recall >= 0.7 and suggested > 0.8, (precision, recall, suggested)
    assert (runs["spoilt"].folder / "pictures/suspicious.png").stat().st_size > 10_000

    first, *others = suspicious(runs["clean"].folder)
    assert (first["verdict"], first["label"], first["suggested"]) == ("class", "rare", "0")
    assert not any(row["label"] == "rare" for row in others)
    assert sum(row["verdict"] == "likely wrong" for row in others) <= 2, "of 1,438 images"


def test_the_verdicts_are_the_same_on_any_layout(run_several, spoilt, tmp_path) -> None:
    words = ["--data", spoilt, *EXACT.split(), "--output_dir", tmp_path, "--tracker", "none"]
    runs = run_several(1, {"one": words})
    runs |= run_several(3, {"three": [*words, "--max_micro_batch_size", 6, "--workers", 1]})
    assert {run.outcome for run in runs.values()} == {"ok"}
    one, three = (suspicious(runs[name].folder) for name in ("one", "three"))
    assert len(one) >= 20
    for key in ("rank", "verdict", "image", "label", "suggested"):
        assert [row[key] for row in three] == [row[key] for row in one], key
    numbers = [[float(row["probability"] or 0) for row in rows] for rows in (one, three)]
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-6)


@pytest.mark.long
def test_changed_labels_of_fashion_mnist_are_found(launch, tmp_path) -> None:
    if not fashion_mnist.FILES.is_dir():
        pytest.skip(f"needs Debian's package {fashion_mnist.PACKAGE}")
    import datasets

    fashion_mnist.save_fashion_mnist(tmp_path / "all", 5_000)
    train = datasets.load_from_disk(str(tmp_path / "all"))["train"]
    names = train.features["label"].names
    true = [names[label] for label in train["label"]]
    words = [*DIGITS, "--crop_scale", 0.8, "--lr", 2e-3, "--output_dir", tmp_path]
    for name, given in (("clean", true), ("spoilt", changed(true, SHARE))):
        data = save(tmp_path / f"{name}_data", list(train["image"]), true, given)
        done = launch("multi_cpu", "recipes/cls.py", "--data", data, *words, "--name", name, timeout=1200)
        assert done.returncode == 0, done.stderr
    assert sum(row["verdict"] == "likely wrong" for row in suspicious(tmp_path / "clean")) <= 0.002 * 4_000
    precision, recall, _ = judged(tmp_path / "spoilt", tmp_path / "spoilt_data/data.csv")
    assert precision > 0.8 and recall > 0.75, (precision, recall)
