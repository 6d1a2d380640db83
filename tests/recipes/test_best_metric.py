"""--best_metric decides which model is the best, and by what --patience counts."""

import pytest

from common.run.progress import Progress

FLAGS = ["--max_steps", 4, "--eval_every", 2]


def test_the_flag_decides_which_model_is_best(run_several, tmp_path) -> None:
    where = FLAGS + ["--output_dir", tmp_path]
    runs = run_several(
        2,
        {
            "f1": where + ["--name", "f1", "--best_metric", "f1_macro", "--ema_decay", 0.9],
            "typo": where + ["--best_metric", "f1_marco"],
            "of boxes": where + ["--best_metric", "AP"],
        },
    )
    f1 = runs["f1"]
    summary = f1.read("summary.json")
    assert summary["leading"] == "eval/ema_f1_macro"
    assert summary["best"]["eval/ema_f1_macro"] == max(f1.column("eval/ema_f1_macro"))
    assert "best      macro F1 (EMA) " in f1.stdout
    assert runs["typo"].text.startswith(
        "--best_metric f1_marco: whether a larger one is better is not known; take "
    )
    assert runs["of boxes"].text.startswith(
        "run.evaluate: best_metric='AP' is no result; there are top1, top5, "
    )


def test_equal_results_go_to_the_lower_loss_then_the_later_step() -> None:
    progress = Progress()
    evaluations = [(0.5, 2.0), (0.5, 3.0), (0.5, 1.0), (0.5, 1.0), (0.4, 0.1)]
    is_best = []
    for step, (top1, loss) in enumerate(evaluations, start=1):
        is_best.append(
            progress.record_evaluation(step, {"eval/top1": top1, "eval/loss": loss}, "eval/top1")
        )
    assert is_best == [True, False, True, True, False]
    assert progress.best["step"] == 4
    assert (progress.improved_step, progress.since_best) == (1, 4), (
        "--patience counts by the result alone"
    )
    assert progress.record_evaluation(6, {"eval/top1": 0.6, "eval/loss": 9.0}, "eval/top1")
    assert (progress.improved_step, progress.since_best) == (6, 0)


def test_a_loss_as_the_metric_is_better_if_it_is_lower() -> None:
    progress = Progress()
    losses = [float("nan"), 2.0, 1.0, 3.0]
    is_best = [
        progress.record_evaluation(step, {"eval/loss": loss}, "eval/loss", larger_is_better=False)
        for step, loss in enumerate(losses, start=1)
    ]
    assert is_best == [True, True, True, False]
    assert progress.best == {"step": 3, "eval/loss": pytest.approx(1.0)}
