"""A launched run that is interrupted in any way, at any step, ends as the same run after a restart."""

import os
import signal
import threading

import pytest

from common.distributed.collectives import rank
from common.run import Observer, ending
from tests.harness.interrupted import Interrupted
from tests.harness.outcomes import Outcome, read
from tests.harness.range_server import RangeServer
from tests.harness.resumed import assert_same_run, signal_at
from tests.harness.shards import draw_noise, write_tars
from tests.harness.waiting import Limit
from tests.recipes.copied import copy

STEPS = 28
WORDS = (
    f"--max_steps {STEPS} --log_every 1 --checkpoint_every 7 --eval_every 20 --augment "
    "rand-m9-mstd0.5 --random_erasing 0.3 --mixup 0.2 --drop_path 0.2 --drop 0.2 --ema_decay "
    "0.99 --clip 1.0 --label_smoothing 0.1 --max_micro_batch_size 8 --global_batch_size 28 "
    "--batch_norm group --norm_batch_size 4"
).split()
# What happens to a run, start after start, and the cause that its status then names.
INTERRUPTIONS = {
    1: {
        "TERM launcher": "the end of its launcher",
        "TERM rank 0": "SIGTERM",
        "INT group": "Ctrl-C",
        "KILL all": "",
    },
    2: {
        "KILL rank 1": "the loss of another process",
        "TERM launcher": "SIGTERM",
        "HUP group": "SIGHUP",
        "KILL launcher": "the end of its launcher",
    },
    3: {
        "KILL rank 0": "the loss of another process",
        "INT group": "Ctrl-C",
        "USR1 rank 1": "SIGUSR1",
        "KILL all": "",
    },
}


@pytest.mark.parametrize(
    "processes",
    [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)],
)
def test_interrupted_run_is_bit_equal_to_the_uninterrupted(
    launch, run_several, tmp_path, processes
) -> None:
    """Kills and signals leave no process behind, say how the run stands, and cost no step.

    The last start is a fork.
    """
    folder = tmp_path / "interrupted"
    config = "cpu" if processes == 1 else "multi_cpu"
    flags = [] if processes == 1 else ["--num_processes", processes]
    command = WORDS + ["--output_dir", tmp_path]
    for number, (interruption, cause) in enumerate(INTERRUPTIONS[processes].items()):
        args = command + ["--name", folder.name, "--workers", number % 2 * 2]
        started = launch.start(config, ["recipes/cls.py"] + args, flags=flags, process_group=0)
        code = Interrupted(started, folder).at_step(5 * number + 4).interrupt(interruption).gone()
        is_stopped = processes > 1 and "KILL" not in interruption
        assert code == 75 if is_stopped else code != 0, interruption
        assert not is_stopped or "Traceback" not in started.stderr.read_text(), (
            "it was asked to stop"
        )
        status = read(folder / "status.json")
        if cause:
            assert status["status"] == "resumable" and cause in status["cause"], (
                interruption,
                status,
            )
        else:
            assert status["status"] == "running", interruption  # with no process at work: killed
    ended = run_several(processes, {folder.name: command, "whole": command})
    assert [run.outcome for run in ended.values()] == ["ok", "ok"], ended
    assert_same_run(folder, tmp_path / "whole", STEPS)


def test_asking_one_rank_stops_all_within_two_steps(forks, tmp_path) -> None:
    observers = {1: signal_at(5, signal.SIGHUP, once_written=False)}
    ranks = forks.start_ranks(
        2, WORDS + ["--output_dir", tmp_path, "--name", "asked"], observers=observers
    )
    assert [fork.end().code for fork in ranks] == [75, 75]
    run = Outcome(folder=tmp_path / "asked")
    status = run.read("status.json")
    assert (status["status"], status["cause"]) == ("resumable", "SIGHUP")
    assert 5 <= status["step"] <= 7
    assert run.checkpoint.name == f"step_{status['step']:08d}"
    assert run.column("step").tolist() == list(range(1, status["step"] + 1))


# A data set of one's own whose samples of the sixth step never come, on the last rank.
STUCK = """
@@
+import os
+import threading
 from collections.abc import Sequence
@@
+class Stuck(TrainDataset):
+    def __getitems__(self, positions):
+        if positions[0] >= 5 * self.stream.global_batch_size and os.environ.get("RANK") != "0":
+            threading.Event().wait()
+        return super().__getitems__(positions)
+
+
 def main() -> None:
@@ main
-        train_set = TrainDataset.from_config(config, train_data, model, transforms)
+        train_set = Stuck.from_config(config, train_data, model, transforms)
"""
STOPPED = "--name stopped --max_steps 9 --eval_every 6 --checkpoint_every 9".split()


def be_impatient() -> None:
    ending.GRACE_S = 0.1


class StuckEvaluation(Observer):
    """SIGTERM to the run itself as it evaluates, which then does not end."""

    def on_prepare(self, model, train_set, compute_losses) -> None:
        model.register_forward_pre_hook(self.wait)

    def wait(self, model, inputs) -> None:
        if not model.training:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()


def test_a_signal_ends_the_reading_of_an_index_of_shards(forks, tmp_path) -> None:
    write_tars(
        draw_noise(tmp_path / "files", (30, 30), side=8), tmp_path / "tars", "train", counts=(60,)
    )
    with RangeServer() as server:
        server.files["/train-000.tar"] = (tmp_path / "tars/train-000.tar").read_bytes()
        server.faults["/train-000.tar"] = ["", "silent"]
        argv = ["--output_dir", tmp_path] + STOPPED
        argv += ["--data", f"{server.url}/train-000.tar", "--image_size", 32]
        run = forks.start(argv, before=be_impatient)
        for _ in Limit(60).turns():
            if not server.faults["/train-000.tar"]:  # it waits for an answer
                break
        os.kill(run.process.pid, signal.SIGTERM)
        ended = run.end()
    assert ended.code == 75 and "Traceback" not in ended.stderr, ended.stderr
    assert "stopped by SIGTERM before the first step" in ended.stdout
    assert not (tmp_path / "stopped").exists()


@pytest.mark.parametrize(
    "stuck, step, evaluated", [("data", 5, [6, 9]), ("an evaluation", 6, [7, 9])]
)
def test_a_signal_ends_a_wait_that_does_not_end(forks, tmp_path, stuck, step, evaluated) -> None:
    """Steps that were made are saved, and an evaluation that was ended is made after the next step."""
    args = ["--output_dir", tmp_path] + STOPPED
    if stuck == "data":
        options = {
            "recipe": copy(tmp_path / "stuck.py", STUCK),
            "observer": signal_at(5, signal.SIGTERM),
        }
    else:
        options = {"observer": StuckEvaluation()}
    ended = forks(args, before=be_impatient, **options)
    assert ended.code == 75 and "Traceback" not in ended.stderr, ended.stderr
    assert f"stopped by SIGTERM at step {step}" in ended.stdout
    run = Outcome(folder=tmp_path / "stopped")
    assert run.checkpoint.name == f"step_{step:08d}"
    assert run.read("status.json")["status"] == "resumable"
    assert forks(args + ["--allow_changed_source"]).code == 0
    assert [row["step"] for row in run.rows if "eval/top1" in row] == evaluated


def test_the_main_process_saves_although_another_hangs(forks, tmp_path) -> None:
    """The second rank waits for data for ever after the fifth step, and the first for it; both get
    SIGTERM.
    """
    recipe = copy(tmp_path / "stuck.py", STUCK)
    observer = signal_at(5, signal.SIGTERM)
    args = ["--output_dir", tmp_path] + STOPPED
    ranks = forks.start_ranks(
        2, args, recipe=recipe, observers={0: observer, 1: observer}, before=be_impatient
    )
    assert [fork.end().code for fork in ranks][1] == 75
    run = Outcome(folder=tmp_path / "stopped")
    assert run.checkpoint.name == "step_00000005"
    assert run.read("status.json")["status"] == "resumable"


class LostEvaluation(Observer):
    """In the first evaluation, the second rank is killed, and the first gets the launcher's SIGTERM."""

    def on_prepare(self, model, train_set, compute_losses) -> None:
        self.is_over = False
        model.register_forward_pre_hook(self.signal)

    def signal(self, model, inputs) -> None:
        if not model.training and not self.is_over:
            self.is_over = True
            os.kill(os.getpid(), signal.SIGKILL if rank() else signal.SIGTERM)


def test_a_rank_that_is_killed_in_an_evaluation_does_not_move_it(forks, tmp_path) -> None:
    """The run resumes from the checkpoint before, though the main process was asked to stop and
    could save.
    """
    args = [
        "--output_dir",
        tmp_path,
    ] + "--max_steps 9 --eval_every 6 --log_every 1 --checkpoint_every 3".split()
    killed = forks.start_ranks(
        2, args + ["--name", "killed"], observers={0: LostEvaluation(), 1: LostEvaluation()}
    )
    assert [fork.end().code != 0 for fork in killed] == [True, True]
    run = Outcome(folder=tmp_path / "killed")
    assert (
        run.checkpoint.name == "step_00000003" and run.read("status.json")["status"] == "resumable"
    )
    for name in ("killed", "whole"):
        assert [fork.end().code for fork in forks.start_ranks(2, args + ["--name", name])] == [0, 0]
    assert_same_run(tmp_path / "killed", tmp_path / "whole", 9)


def test_steps_are_saved_although_another_evaluation_hangs(forks, tmp_path) -> None:
    """The second rank leaves alone, and says so: the evaluation is made after the next step."""
    args = ["--output_dir", tmp_path] + STOPPED
    observers = {0: LostEvaluation(), 1: StuckEvaluation()}
    ranks = forks.start_ranks(2, args, observers=observers, before=be_impatient)
    assert [fork.end().code for fork in ranks][1] == 75
    run = Outcome(folder=tmp_path / "stopped")
    assert (
        run.checkpoint.name == "step_00000006" and run.read("status.json")["status"] == "resumable"
    )
