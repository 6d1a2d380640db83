"""Records of a run: custom names can't replace its own, an exploding dry run is refused, plots
carry their step.
"""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.config.fields import RunConfig
from common.errors import Refused
from common.run.folder import RunFolder
from common.run.progress import Progress, direction_of
from common.run.records import Records, check_names
from common.run.step_reports import StepReport
from tests.harness.dashboard import Dashboard

NAN = float("nan")


@pytest.fixture
def records(tmp_path: Path):
    """`records(dry_run=True)`: those of a run of 30 steps, as they are after its start."""
    folders = []

    def begin(**options) -> Records:
        folders.append(RunFolder(tmp_path / f"{len(folders)}"))
        folders[-1].rewind(0)
        records = Records(RunConfig(log_every=2, **options), folders[-1].path, folders[-1])
        stream = SimpleNamespace(count_epochs=lambda step: step / 10)  # epochs of ten steps
        records.begin(stream, 30)
        records.share()
        records.log.open(Dashboard(), 0, 30)
        return records

    yield begin
    for folder in folders:
        folder.close()


def build_report(step: int, loss: float, **options) -> StepReport:
    return StepReport(step, loss, 1.0, 0.0, (), stop=False, skipped=False, **options)


def test_custom_numbers_cannot_replace_those_of_the_run(records) -> None:
    recorder = records()
    for step in (1, 2):
        recorder.record_step(
            build_report(step, 1.0, logged={"train/aux": 0.5 * step}), 0.1, is_evaluated=False
        )
    recorder.record_evaluation(2, {"top1": 0.5}, "top1")
    recorder.log.flush()
    (step, row), *later_rows = recorder.log._tracker.rows
    assert (step, row["train/aux"], row["eval/top1"], later_rows) == (2, 1.0, 0.5, [])
    custom_values = {
        "step",
        "train/loss_scale",
        "perf/gpu_memory_gb",
        "train/update_ratio",
        "train/lr_backbone",
    }
    for name in (row.keys() - {"train/aux"}) | custom_values:
        with pytest.raises(Refused, match=f"^run.log: '?{name}'? is "):
            check_names([name])
    for name in ("aux", "train/", "/aux", "train/a b", "train/\n", 5, ""):
        with pytest.raises(Refused, match=r"^run.log: .*take one such as train/aux$"):
            check_names([name])
    check_names(["train/aux", "train/loss_box", "gan/d.loss-1", "a/b/c"])


def test_rows_have_loss_scale_slowest_rank_and_gpu_memory(records, monkeypatch) -> None:
    recorder = records()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 2**31)
    for step, ready in ((2, (1.0, 4.0, 1.0)), (3, ()), (4, (1.0,)), (6, ())):
        report = StepReport(
            step, 1.0, 1.0, 0.0, (), stop=False, skipped=True, loss_scale=1 / step, ready=ready
        )
        recorder.record_step(
            dataclasses.replace(report, update={"weight_norm": 5.0, "lr_head": 0.1}),
            10.0,
            is_evaluated=False,
        )
    recorder.log.flush()
    first, second, third = (row for _, row in recorder.log._tracker.rows)
    assert (first["perf/slowest_rank"], first["perf/slowest_rank_lag"]) == (1, pytest.approx(0.2))
    assert (first["train/weight_norm"], first["train/lr_head"], first["perf/gpu_memory_gb"]) == (
        5.0,
        0.1,
        2.0,
    )
    assert [row["train/loss_scale"] for row in (first, second, third)] == [1 / 2, 1 / 4, 1 / 6]
    assert second["train/skipped_steps"] == 3, "the step without a row counts"
    for row in (second, third):
        assert not row.keys() & {"perf/slowest_rank", "perf/slowest_rank_lag"}


def test_the_best_evaluation_is_the_lowest_of_a_loss_and_finite(records) -> None:
    """A loss of 2.15 is no 215 %, and the model of the first evaluation, the worst, is not kept."""
    of = records(patience=2)
    losses = [NAN, 2.15, 0.5, 0.5, NAN]  # an equal one is kept, but it is no better
    recorders = [
        of.record_evaluation(step, {"loss": loss}, "loss", False)
        for step, loss in enumerate(losses)
    ]
    assert recorders == [True, True, True, True, False]
    assert of.progress.headline(of.progress.best) == "loss 0.5"
    assert of.summary()["leading"] == "eval/loss"
    of.log.summary(of.summary())
    assert {
        "best/step": 3,
        "best/eval/loss": 0.5,
        "last/step": 4,
    }.items() <= of.log._tracker.results.items()
    assert "no better loss since step 2" in of.progress.exhausted(RunConfig(patience=2))
    of.record_evaluation(5, {"top1": 0.25}, "top1", True)
    assert of.progress.headline(of.progress.last) == "top-1 25.00 %"


def test_the_direction_of_usual_results_is_known() -> None:
    directions = {
        "loss": False,
        "ece": False,
        "top1": True,
        "f1_macro": True,
        "AP50": True,
        "my": None,
    }
    for name, direction in directions.items():
        assert direction_of(name) is direction_of(f"eval/ema_{name}") is direction


def test_a_dry_run_refuses_what_explodes_or_is_not_finite(records, capsys) -> None:
    for first, second, message in (
        (2.3, 5e7, "5e[+]07"),
        (1e-9, 1e3 + 1, "1e[+]03"),
        (2.3, 700.0, ""),
    ):
        for dry_run in (True, False):  # a run sees for itself
            recorder = records(dry_run=dry_run)
            recorder.record_step(build_report(1, first), 0.1, is_evaluated=False)
            pattern = (
                f"^step 2: the loss rose to {message}, more than 1,000 times the first; lower --lr"
            )
            with (
                pytest.raises(Refused, match=pattern)
                if message and dry_run
                else contextlib.nullcontext()
            ):
                recorder.record_step(build_report(2, second), 0.1, is_evaluated=True)
    message = "step 2: eval/loss is not finite; lower --lr, set --clip 1 or --warmup_epochs"
    with pytest.raises(Refused, match=message):
        records(dry_run=True).record_evaluation(2, {"loss": NAN, "top1": 0.1}, "top1")
    recorder = records()
    recorder.record_evaluation(2, {"loss": NAN, "top1": 0.1, "top5": None, "count": 3}, "top1")
    assert capsys.readouterr().out == message + "\n" and recorder.progress.best["step"] == 2


def test_pictures_carry_their_step_and_take_little_time(records) -> None:
    recorder = records()
    due = []
    for seconds in (40.0, 60.0, 61.0, 1e6):
        recorder.progress.seconds = seconds
        due.append(recorder.has_time_to_draw())
        if due[-1]:
            recorder._drawing += 1.0  # as `draw` counts
    assert due == [False, True, False, True]
    recorder.progress.step = 12
    recorder.draw("a", lambda path: None)
    (path,) = recorder.log._tracker.pictures[12].values()
    assert path.name == "a.png"
    recorder.draw("b", lambda path: path.no_such_attribute)
    assert list(recorder.log._tracker.pictures[12]) == ["a"], (
        "a picture that could not be drawn is not sent"
    )
    recorder.share()  # a start that resumes has drawn nothing and trained nothing
    assert not recorder.has_time_to_draw()


def test_too_many_broken_images_in_a_window_stop_the_run() -> None:
    """And a new window starts from zero."""
    # 16 steps; 20 images may be broken.
    progress = Progress()
    config = RunConfig(global_batch_size=64)
    for step, images in ((1, 10), (16, 10), (17, 20), (33, 20)):
        progress.count_broken(step, [f"{step}/{image}" for image in range(images)], config, print)
    resumed = Progress(**dataclasses.asdict(progress))
    for each in (progress, resumed):
        with pytest.raises(Refused) as raised:
            each.count_broken(48, ["the-last.png: torn"], config, print)
        assert str(raised.value) == (
            "step 48: 21 of the last 1,024 images could not be read (the last: the-last.png: "
            "torn), more than --max_broken_share 0.02 of each 1,024: mend the data, or raise the "
            "limit"
        )
    assert progress.broken == 61 and progress.broken_files == 61
    messages: list[str] = []
    for names in (["a", "a"], ["b", "a"]):
        resumed.count_broken(49, names, config, messages.append)
    assert [line.split()[-1] for line in messages] == ["a", "b"], "each is named once"
    assert (resumed.broken, resumed.broken_files) == (65, 63)
    with pytest.raises(Refused, match="step 2: 1 of the last 4,000 "):
        Progress().count_broken(
            2, ["x"], RunConfig(global_batch_size=4000, max_broken_share=0.0), print
        )
