"""The audit finds wrong labels of a trained run, the same ones on any layout; a detector's kept
checkpoint is taken.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from common.classification import sources
from tests.harness.runs import catch_refusal
from tools.audit.__main__ import main, write_table

SHARE = 0.05  # of the labels
DIGITS = "--config recipes/presets/digits.yaml"
EXACT = (
    f"{DIGITS} --model test_vit --dtype float64 --max_steps 24 --schedule constant --lr 2e-3 "
    "--global_batch_size 48 --val_share 0.8 --eval_every 24"
)


def read_suspicious(folder: Path) -> list[dict]:
    return list(csv.DictReader((folder / "suspicious.csv").read_text().splitlines()))


@pytest.fixture(scope="module")
def runs(run_several, tmp_path_factory) -> dict[str, Path]:
    """Runs of digits, some with a wrong label; the name of each file begins with the right one."""
    folder = tmp_path_factory.mktemp("spoilt")
    random = np.random.default_rng(0)
    parts = sources.load(sources.Spec("digits", seed=0, val_share=0.2))
    images = [
        (source.load_image(index), source.labels[index])
        for source in parts
        for index in range(len(source))
    ]
    changed = set(random.permutation(len(images))[: round(SHARE * len(images))].tolist())
    table = ["path,label"]
    for number, (image, label) in enumerate(images):
        image.save(folder / f"{label}_{number}.png")
        table.append(
            f"{label}_{number}.png,{(label + random.integers(1, 10) * (number in changed)) % 10}"
        )
    (folder / "data.csv").write_text("\n".join(table))
    argv = ["--data", folder / "data.csv", "--output_dir", folder / "runs"]
    cases = {"preset": DIGITS.split() + argv + ["--epochs", 6], "exact": EXACT.split() + argv}
    runs = run_several(2, cases, timeout=600)
    assert not {name: run.text for name, run in runs.items() if run.outcome != "ok"}
    return {name: run.folder for name, run in runs.items()}


def test_changed_labels_are_found(runs, run_tool) -> None:
    """Else a user would mend what is right."""
    main_rank, other_rank = run_tool(2, "audit", [runs["preset"], "--workers", 0])
    assert "labels are likely wrong" in main_rank.stdout and not other_rank.stdout
    rows = [row for row in read_suspicious(runs["preset"]) if row["verdict"] == "likely wrong"]
    true = [Path(row["image"]).stem.partition("_")[0] for row in rows]
    hits = [
        row["suggested"] == name
        for row, name in zip(rows, true, strict=True)
        if row["label"] != name
    ]
    changed = 0.8 * SHARE * 1797  # four fifths are trained on
    assert len(hits) >= 0.9 * len(rows) and len(hits) >= 0.7 * changed and np.mean(hits) > 0.8, (
        len(rows),
        hits,
    )
    assert (runs["preset"] / "pictures/suspicious.png").stat().st_size > 10_000


def test_the_verdicts_are_the_same_on_any_layout(runs, run_tool, tmp_path) -> None:
    checkpoint = runs["exact"] / "checkpoints/step_00000024"
    argv = [checkpoint, "--workers", 0, "-o"]
    run_tool(1, "audit", argv + [tmp_path / "one"])
    run_tool(2, "audit", argv + [tmp_path / "two", "--max_micro_batch_size", 6])
    one, two = (read_suspicious(tmp_path / name) for name in ("one", "two"))
    assert len(one) >= 20 and not (runs["exact"] / "suspicious.csv").exists()
    for key in ("rank", "verdict", "image", "label", "suggested"):
        assert [row[key] for row in two] == [row[key] for row in one], key
    numbers = [[float(row["probability"] or 0) for row in rows] for rows in (one, two)]
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-6)


def test_a_detector_is_audited_at_a_quarter_of_its_run(
    run_several, scenes, run_tool, tmp_path
) -> None:
    argv = ["--data", scenes, "--output_dir", tmp_path]
    argv += "--max_steps 8 --checkpoint_every 2 --keep_for_audit".split()
    run = run_several(2, {"boxes": argv}, recipe="recipes/det.py")["boxes"]
    assert run.outcome == "ok", run.text
    assert [path.name for path in (run.folder / "audit").iterdir()] == ["step_00000002"]
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == [
        "step_00000006",
        "step_00000008",
    ]
    (ended,) = run_tool(1, "audit", [run.folder, "--workers", 0])
    assert "audit/step_00000002: " in ended.stdout and "are worth a look, in " in ended.stdout
    assert (
        read_suspicious(run.folder) is not None
        and (run.folder / "pictures/suspicious.png").exists()
    )


def test_what_can_not_be_audited_is_refused_in_one_line(runs, tmp_path) -> None:
    assert "no checkpoint in its checkpoints/" in catch_refusal(main, [tmp_path])


def test_a_table_has_no_formulas(tmp_path) -> None:
    cells = ["=cmd|' /C calc'!A0", "+1+cmd|x", "@x", "-2.5", "a", -2.5, "\t=1"]
    text = write_table(tmp_path / "new" / "mine.csv", [cells]).read_text()
    assert next(csv.reader([text])) == [
        "'=cmd|' /C calc'!A0",
        "'+1+cmd|x",
        "'@x",
        "-2.5",
        "a",
        "-2.5",
        "'\t=1",
    ]
