"""A replay shows what a step saw and gives the losses that the run has logged, without touching the run folder."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.harness.launching import ROOT, inherited

EXACT = "--dtype float64 --schedule constant --log_every 1 --eval_every 1000 --global_batch_size 30 --max_steps 9"
VARIED = "--model test_resnet --batch_norm group --norm_batch_size 2 --mixup 0.2 --cutmix 0.5 --random_erasing 0.25"


def replay(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {**inherited(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tools.replay", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def content(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() + str(path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def logged(run: Path, step: int) -> dict:
    return next(row for row in rows(run / "metrics.jsonl") if row["step"] == step)


def test_a_step_of_two_processes_is_replayed_on_one_and_on_two_to_the_bit(trained_classifier, launch, tmp_path) -> None:
    before = content(trained_classifier)
    done = replay(trained_classifier, "--step", 100, "-o", tmp_path / "out", "--workers", 1)
    assert done.returncode == 0 and "the same bits" in done.stdout, done.stderr
    numbers = json.loads((tmp_path / "out/step.json").read_text())["numbers"]
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        assert numbers[key]["replayed"] == numbers[key]["logged"] == logged(trained_classifier, 100)[key], key
    samples = rows(tmp_path / "out/samples.jsonl")
    assert [sample["position"] for sample in samples] == [*range(99 * 64, 100 * 64)]
    assert np.mean([sample["loss"] for sample in samples]) == pytest.approx(numbers["train/loss"]["logged"], rel=1e-6)
    assert all((sample["predicted"] == sample["label"]) == (sample["margin"] > 0) for sample in samples)
    assert (tmp_path / "out/sheet.png").stat().st_size > 20_000
    two = launch("multi_cpu", "-m", "tools.replay", trained_classifier, "--step", 100, "-o", tmp_path / "two")
    assert two.returncode == 0 and "the same bits" in two.stdout, two.stdout + two.stderr
    assert rows(tmp_path / "two/samples.jsonl") == samples
    assert content(trained_classifier) == before and not [*tmp_path.glob(".*")]
    again = replay(trained_classifier, "--step", 100, "-o", tmp_path / "out")
    assert again.returncode == 2 and "--overwrite" in again.stderr
    early = replay(trained_classifier, "--step", 5, cwd=tmp_path)
    assert (
        early.returncode == 2 and early.stderr.count("\n") == 1 and "needs a checkpoint from before it" in early.stderr
    )
    assert "--from_start makes all steps again" in early.stderr and "--keep_checkpoints" in early.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"out", "two"}


def test_a_step_of_a_detector_is_replayed_from_the_first_one(trained_detector, tmp_path) -> None:
    done = replay(trained_detector, "--step", 10, "--from_start", "-o", tmp_path / "out", "--workers", 0)
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "out/step.json").read_text())["numbers"]
    row = logged(trained_detector, 10)
    for key in ("train/loss", "train/loss_class", "train/loss_box", "train/grad_norm"):
        assert numbers[key]["replayed"] == pytest.approx(row[key], rel=1e-6), key
    assert numbers["train/loss"]["replayed"] == row["train/loss"]
    samples = rows(tmp_path / "out/samples.jsonl")
    assert all(sample["boxes"] and sample["boxes"][0]["label"] in "0123456789" for sample in samples)


def test_steps_of_other_layouts_agree_in_float64(run_several, tmp_path) -> None:
    words = [
        *EXACT.split(),
        *VARIED.split(),
        "--output_dir",
        tmp_path,
        "--checkpoint_every",
        6,
        "--max_micro_batch_size",
        6,
    ]
    (run,) = run_several(3, {"three": words}).values()
    done = replay(run.folder, "--step", 9, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "out/step.json").read_text())["numbers"]
    assert abs(numbers["train/loss"]["difference"]) < 1e-8
    mixed = [sample["target"] for sample in rows(tmp_path / "out/samples.jsonl") if len(sample["target"]) > 1]
    assert len(mixed) > 10 and all(sum(target.values()) == pytest.approx(1, abs=1e-5) for target in mixed)


@pytest.mark.parametrize(
    "words, told",
    [
        (["nowhere", "--step", 1], "nowhere: is no run folder, it has no config.yaml"),
        (["RUN", "--step", 100_000], "--step 100000: .* has made the steps 1 to [0-9]+"),
        (["RUN", "--step", 100, "--most", 0], "--most 0: must be at least 1"),
        (["RUN", "--step", 100, "--wrokers", 1], "unknown flag --wrokers; did you mean workers.*"),
    ],
)
def test_what_can_not_be_replayed_is_refused_in_one_line(trained_classifier, tmp_path, words, told) -> None:
    done = replay(*(trained_classifier if word == "RUN" else word for word in words), cwd=tmp_path)
    assert done.returncode == 2 and re.fullmatch(f"replay: {told}\n", done.stderr), done.stderr
    assert not [*tmp_path.iterdir()]
