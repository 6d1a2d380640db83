"""A replay shows what a step saw and gives the losses that the run has logged, without touching the
run folder.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from common.errors import Refused
from tests.harness.runs import read, read_rows, start_tool
from tools.replay.replay import replay

EXACT = (
    "--dtype float64 --schedule constant --log_every 1 --eval_every 1000 --global_batch_size 30 "
    "--max_steps 9 --model test_resnet --batch_norm group --norm_batch_size 2 --mixup 0.2 "
    "--cutmix 0.5 --random_erasing 0.25 --checkpoint_every 6 --max_micro_batch_size 6"
)


def read_files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        + str(path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def get_logged(run: Path, step: int) -> dict:
    return next(row for row in read_rows(run / "metrics.jsonl") if row["step"] == step)


def test_a_step_of_two_processes_is_replayed_on_one_and_on_two(
    trained_classifier, run_tool, tmp_path
) -> None:
    before = read_files(trained_classifier)
    argv = [trained_classifier, "--step", 100, "--workers", 1, "-o", tmp_path / "out"]
    run_tool(1, "replay", argv)
    numbers = read(tmp_path / "out/step.json")["numbers"]
    # One process sums them in another order.
    for key in ("train/loss", "train/grad_norm", "train/lr"):
        assert numbers[key]["logged"] == get_logged(trained_classifier, 100)[key]
        assert numbers[key]["replayed"] == pytest.approx(numbers[key]["logged"], rel=1e-6), key
    samples = read_rows(tmp_path / "out/samples.jsonl")
    assert [sample["position"] for sample in samples] == list(range(99 * 64, 100 * 64))
    assert np.mean([sample["loss"] for sample in samples]) == pytest.approx(
        numbers["train/loss"]["logged"], rel=1e-6
    )
    right = [sample["loss"] for sample in samples if sample["predicted"] == sample["label"]]
    assert len(right) > 50 and np.mean(right) < numbers["train/loss"]["logged"]
    assert (tmp_path / "out/sheet.png").stat().st_size > 20_000
    argv = [trained_classifier, "--step", 100, "--workers", 0, "-o", tmp_path / "two"]
    assert "the same bits" in run_tool(2, "replay", argv)[0].stdout
    assert read_rows(tmp_path / "two/samples.jsonl") == samples
    with pytest.raises(Refused, match="out exists: name another"):
        replay(trained_classifier, 100, tmp_path / "out", [], False)
    assert read_files(trained_classifier) == before
    assert {path.name for path in tmp_path.iterdir()} == {"out", "two"}


def test_a_step_of_a_detector_is_replayed_from_the_first_one(
    trained_detector, run_tool, tmp_path
) -> None:
    argv = [trained_detector, "--step", 10, "--from_start", "--workers", 0, "-o", tmp_path / "out"]
    run_tool(1, "replay", argv)
    numbers = read(tmp_path / "out/step.json")["numbers"]
    row = get_logged(trained_detector, 10)
    for key in ("train/loss", "train/loss_class", "train/loss_box", "train/grad_norm"):
        assert numbers[key]["replayed"] == pytest.approx(row[key], rel=1e-6), key
    assert numbers["train/loss"]["replayed"] == row["train/loss"]
    samples = read_rows(tmp_path / "out/samples.jsonl")
    assert all(
        sample["boxes"] and sample["boxes"][0]["label"] in "0123456789" for sample in samples
    )


def test_a_step_of_another_layout_agrees_in_float64(run_several, run_tool, tmp_path) -> None:
    (run,) = run_several(3, {"three": EXACT.split() + ["--output_dir", tmp_path]}).values()
    run_tool(1, "replay", [run.folder, "--step", 9, "-o", tmp_path / "out"])
    assert abs(read(tmp_path / "out/step.json")["numbers"]["train/loss"]["difference"]) < 1e-8


def test_what_can_not_be_replayed_is_refused_in_one_line(
    trained_classifier, forks, tmp_path
) -> None:
    for run, step, message in (
        (Path("nowhere"), 1, "^nowhere: is no run folder, it has no config.yaml$"),
        (trained_classifier, 100_000, "^--step 100000: .* has made the steps 1 to [0-9]+$"),
        (
            trained_classifier,
            5,
            "^--step 5: needs a checkpoint from before it, .*--from_start .*--keep_checkpoints",
        ),
    ):
        with pytest.raises(Refused, match=message):
            replay(run, step, tmp_path / "out", [], False)
    for flags in (["--name", "x"], ["--name=x"], ["--log_every", "5"]):
        with pytest.raises(Refused, match=r"^--\w+: a replay sets it itself; leave it out$"):
            replay(trained_classifier, 100, tmp_path / "out", flags, False)
    argv = (trained_classifier, "--step", 100, "-o", tmp_path / "out", "--wrokers", 1)
    done = start_tool(forks, 1, "replay", argv)[0].end()
    assert done.code == 2 and done.stderr.startswith(
        "replay: unknown flag --wrokers; did you mean workers"
    )
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
