"""Validation images that can't be read are named, each once, by a run and by --eval_only."""

import pytest

from tests.harness.drawings import draw_scenes, draw_stripes


@pytest.mark.parametrize("recipe", ["cls", "det"])
def test_a_broken_validation_image_is_named_once(run_several, tmp_path, recipe) -> None:
    data = tmp_path / "data"
    data.mkdir()
    if recipe == "cls":
        draw_stripes(data / "train", (12, 12))
        draw_stripes(data / "val", (6, 6), seed=1)
    else:
        draw_scenes(data)
    torn = sorted((data / "val").rglob("*.png"))[3]
    torn.write_bytes(torn.read_bytes()[:100])
    flags = [
        "--data",
        data,
        "--max_steps",
        4,
        "--eval_every",
        2,
        "--ema_decay",
        0.5,
        "--workers",
        2,
    ]
    training = flags + ["--output_dir", tmp_path, "--name", "run"]
    evaluation = ["--data", data, "--eval_only", tmp_path / "run/best", "--workers", 2]
    cases = {"run": training, "evaluation": evaluation}
    outcomes = run_several(2, cases, recipe=f"recipes/{recipe}.py")
    for name, outcome in outcomes.items():
        assert outcome.outcome == "ok", outcome.text
        named = [line for line in outcome.stdout.splitlines() if "can't be read" in line]
        assert len(named) == 1, f"{name}: {outcome.stdout}"
        assert "can't be read, counts as wrong: " in named[0] and torn.name in named[0]
