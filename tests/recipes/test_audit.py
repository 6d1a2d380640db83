"""A run finds wrong labels, and missing, moved and relabelled boxes; the same ones on any layout."""

import csv
from pathlib import Path

import numpy as np
import pytest

from common.classification import sources

SHARE = 0.05  # of the labels
DIGITS = "--config recipes/presets/digits.yaml"
EXACT = (
    f"{DIGITS} --model test_vit --dtype float64 --max_steps 24 --schedule constant --lr 2e-3 "
    "--global_batch_size 48 --val_share 0.8 --eval_every 24"
)
REMOVED, MOVED, RELABELLED = 4, 10, 16  # scenes, of each of which the largest box is changed


def suspicious(folder: Path) -> list[dict]:
    return list(csv.DictReader((folder / "suspicious.csv").read_text().splitlines()))


@pytest.fixture(scope="module")
def runs(run_several, tmp_path_factory) -> dict[str, Path]:
    """Runs of digits, some with a wrong label; the name of each file begins with the right one."""
    folder, random = tmp_path_factory.mktemp("spoilt"), np.random.default_rng(0)
    parts = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    images = [(source.image(index), source.labels[index]) for source in parts for index in range(len(source))]
    changed, table = {*random.permutation(len(images))[: round(SHARE * len(images))].tolist()}, ["path,label"]
    for number, (image, label) in enumerate(images):
        image.save(folder / f"{label}_{number}.png")
        table.append(f"{label}_{number}.png,{(label + random.integers(1, 10) * (number in changed)) % 10}")
    (folder / "data.csv").write_text("\n".join(table))
    words = ["--data", folder / "data.csv", "--output_dir", folder / "runs"]
    cases = {
        "preset": [*DIGITS.split(), *words, "--epochs", 6],
        "two": [*EXACT.split(), *words, "--max_micro_batch_size", 6],
    }
    runs = run_several(2, cases, pictures=True, timeout=600) | run_several(1, {"one": [*EXACT.split(), *words]})
    assert not {name: run.text for name, run in runs.items() if run.outcome != "ok"}
    return {name: run.folder for name, run in runs.items()}


def test_changed_labels_are_found(runs) -> None:
    """Else a user would mend what is right."""
    rows = [row for row in suspicious(runs["preset"]) if row["verdict"] == "likely wrong"]
    true = [Path(row["image"]).stem.partition("_")[0] for row in rows]
    hits = [row["suggested"] == name for row, name in zip(rows, true, strict=True) if row["label"] != name]
    changed = 0.8 * SHARE * 1797  # four fifths are trained on
    assert len(hits) >= 0.9 * len(rows) and len(hits) >= 0.7 * changed and np.mean(hits) > 0.8, (len(rows), hits)
    assert (runs["preset"] / "pictures/suspicious.png").stat().st_size > 10_000


def test_the_verdicts_are_the_same_on_any_layout(runs) -> None:
    one, two = (suspicious(runs[name]) for name in ("one", "two"))
    assert len(one) >= 20
    for key in ("rank", "verdict", "image", "label", "suggested"):
        assert [row[key] for row in two] == [row[key] for row in one], key
    numbers = [[float(row["probability"] or 0) for row in rows] for rows in (one, two)]
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-6)
