"""A restarted run resumes exactly from its newest good checkpoint, and refuses a checkpoint that is
not its own.

One process; what happens to several, and to launchers, is in test_cls_signals.py. Damaged
checkpoints are in tests/faults/test_checkpoint_files.py, dashboards in test_dashboards.py and
tests/faults/test_tracker_faults.py.
"""

import contextlib
import re
import shutil
import signal
from pathlib import Path

import pytest

from common.checkpoints.store import Damaged, verify
from tests.harness.drawings import draw_stripes
from tests.harness.forked import Ended
from tests.harness.outcomes import Outcome, has_best, identical, read
from tests.harness.resumed import STEPS, assert_same_run, signal_at

SMALL = (
    "--image_size 16 --global_batch_size 8 --max_micro_batch_size 4 "
    f"--max_steps {STEPS} --log_every 1 --checkpoint_every 4 --eval_every 5 --warmup_epochs 0.5"
).split()
EVERYTHING = (
    "--augment rand-m9-mstd0.5 --color_jitter 0.2 --random_erasing 0.3 --hflip 0.5 --mixup 0.2 "
    "--cutmix 1.0 --repeats 2 --sampling sqrt --class_weights balanced --drop 0.2 --drop_path "
    "0.2 --ema_decay 0.9 --clip 1.0 --label_smoothing 0.1 --freeze_stages all --unfreeze_epochs "
    f"1,2 --head_lr_factor 2.0 --batch_norm group --norm_batch_size 4 --keep_checkpoints {STEPS}"
).split()
# First and last step, one before an evaluation, two before a checkpoint, one that nothing follows.
KINDS = (1, 4, 5, 6, 8, STEPS)

# In a file operation.
FILE = re.compile(r"[.\w]+\.(jsonl?|yaml|py|txt|csv|html|safetensors)(\.tmp)?")


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """27 images to train on and 9 to evaluate, in 3 classes: an epoch is no whole number of batches."""
    folder = tmp_path_factory.mktemp("data")
    draw_stripes(folder / "train", (9, 9, 9))
    draw_stripes(folder / "val", (3, 3, 3), seed=1)
    return folder


@pytest.fixture(scope="module")
def whole(forks, images, tmp_path_factory) -> Path:
    """The folder of the undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    argv = ["--data", images, "--output_dir", folder, "--name", "whole"] + SMALL + EVERYTHING
    assert forks(argv).code == 0
    return folder / "whole"


@pytest.fixture
def train(forks, images, tmp_path):
    """`train("name", flags)` runs the recipe in the run folder tmp_path/name, with a row per step."""

    def run(name: str, flags: list, **options) -> Ended:
        argv = ["--data", images, "--output_dir", tmp_path, "--name", name] + SMALL
        return forks(argv + flags, **options)

    return run


def list_checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def read_files(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` with its bytes, but those that each start writes."""
    ignored = ("log.txt", ".lock", "status.json", "report.html")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ignored]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- killed


EACH = pytest.param(range(1, STEPS + 1), marks=pytest.mark.long, id="each")


@pytest.mark.parametrize("steps", [KINDS, EACH])
def test_run_killed_at_every_kind_of_step_is_bit_equal(train, whole, tmp_path, steps):
    folder = tmp_path / "killed"
    for step in steps:
        died = train("killed", EVERYTHING, observer=signal_at(step, once_written=False))
        assert died.code == -signal.SIGKILL, died.stderr
        with (folder / "metrics.jsonl").open("a") as rows:
            rows.write('{"step": 13, "train/lo')  # as a machine that dies tears it
    assert read(folder / "status.json")["status"] == "running"  # with no process at work: killed
    assert train("killed", EVERYTHING).code == 0
    assert_same_run(folder, whole)
    assert read(folder / "summary.json")["best"] == read(whole / "summary.json")["best"]


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.long)])
def test_run_killed_before_each_file_operation_is_bit_equal(train, tmp_path, each):
    """One start after the other dies, each before a kind of operation that none has died at.

    Also when it mends what a kill left. In the long test each file's name makes a kind, four times.
    """
    flags = (
        "--max_steps 24 --checkpoint_every 1 --keep_checkpoints 1 --eval_every 1 --ema_decay 0.9 "
        "--opt lion --layer_decay 0.9"
    ).split()
    assert train("whole", flags).code == 0
    rows = Outcome(folder=tmp_path / "whole").rows
    assert rows[0]["eval/ema_loss"] == rows[0]["eval/loss"], (
        "the moving average begins with the weights of the first step"
    )
    assert rows[-1]["eval/ema_loss"] != rows[-1]["eval/loss"]
    died_before = _Spared(set(), each)
    previous = set()
    ended = train("killed", flags, watch=tmp_path / "killed", spared=died_before)
    while ended.code:
        assert ended.code == -signal.SIGKILL, ended.stderr
        died_before.add(died_before.normalize(ended.died_before))
        complete = _list_complete(tmp_path / "killed")
        assert previous <= complete, (
            f"{previous - complete} is not whole any more after dying before {ended.died_before}"
        )
        previous = complete
        ended = train("killed", flags, watch=tmp_path / "killed", spared=died_before)
    assert_same_run(tmp_path / "killed", tmp_path / "whole", steps=24)
    drafts = [path.name for path in (tmp_path / "killed").rglob(".*") if path.name != ".lock"]
    assert not drafts, "left behind"
    assert {
        "os.rename /checkpoints/.step_0.tmp",  # a new checkpoint
        "os.rename /checkpoints/step_0",  # an old one, which goes
        "os.remove /checkpoints/.step_0.tmp/FILE",
        "os.rename /best",
        "os.rename /.best.new",
        "os.rename /.best.tmp",
        "os.rename /FILE",
    } < {FILE.sub("FILE", operation).rsplit(" ", 1)[0] for operation in died_before}


def _list_complete(folder: Path) -> set[str]:
    """What is complete of "checkpoint" and "best", the best model, which may be aside for a moment."""
    checkpoints = []
    for path in folder.glob("checkpoints/step_*"):
        with contextlib.suppress(Damaged):
            checkpoints.append(verify(path).path)
    if not checkpoints:
        return set()
    if has_best(folder, verify(max(checkpoints)).record):
        return {"checkpoint", "best"}
    return {"checkpoint"}


class _Spared(set):
    """What a process does not die at: what others died at, and what comes too often.

    Nor before it reads, syncs or begins to remove a folder: dying before the next change leaves the same.
    """

    def __init__(self, kinds: set[str], each: bool) -> None:
        super().__init__(kinds)
        self.each = each

    def normalize(self, operation: str) -> str:
        return operation if self.each else FILE.sub("FILE", operation)

    def __contains__(self, operation: str) -> bool:
        changes_nothing = operation.startswith(("read ", "os.fsync ", "shutil.rmtree "))
        count = int(operation.rsplit(" ", 1)[1])
        if changes_nothing or count > (4 if self.each else 1):
            return True
        return super().__contains__(self.normalize(operation))

    def __reduce__(self):
        return _Spared, (set(self), self.each)


def test_ctrl_c_saves_within_two_steps_and_twice_ends_at_once(train, whole, tmp_path):
    folder = tmp_path / "stopped"
    interrupt = signal_at(6, signal.SIGINT, once_written=False)
    stopped = train("stopped", EVERYTHING, observer=interrupt)
    assert stopped.code == 75 and "stopped by Ctrl-C" in stopped.stdout
    status = read(folder / "status.json")
    assert (status["status"], status["cause"]) == ("resumable", "Ctrl-C")
    assert (
        6 <= status["step"] <= 8 and max(list_checkpoints(folder)) == f"step_{status['step']:08d}"
    )
    twice = signal_at(status["step"] + 1, signal.SIGINT, times=2, once_written=False)
    assert train("stopped", EVERYTHING, observer=twice).code != 0
    assert read(folder / "status.json")["step"] == status["step"] + 1
    assert max(list_checkpoints(folder)) == f"step_{status['step']:08d}", "nothing was saved"
    assert train("stopped", EVERYTHING).code == 0
    assert_same_run(folder, whole)


# --- finished


def test_finished_run_started_again_says_so_and_changes_nothing(train, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    before = read_files(tmp_path / "run")
    changed = "--tracker wandb --checkpoint_every 2 --log_every 5 --keep_checkpoints 1".split()
    restarted = train("run", EVERYTHING + changed)
    assert restarted.code == 0, restarted.stderr
    assert "finished" in restarted.stdout and "--max_steps" in restarted.stdout
    assert read_files(tmp_path / "run") == before
    status = read(tmp_path / "run" / "status.json")
    assert (status["status"], status["step"]) == ("finished", STEPS)


# --- which checkpoint


def test_an_older_checkpoint_branches_off(train, whole, images, tmp_path):
    """In the same folder, a checkpoint that the run has left behind and changed data are refused."""
    shutil.copytree(whole, tmp_path / "run")
    before = read_files(tmp_path / "run")
    longer = EVERYTHING + ["--max_steps", 18]
    newest = tmp_path / "run/checkpoints/step_00000012"
    older = tmp_path / "run/checkpoints/step_00000008"
    moved = shutil.copytree(images, tmp_path / "moved")
    changed = shutil.copytree(images, tmp_path / "changed")
    (changed / "train/stuff_0/0.png").unlink()
    for flag, value, message in (
        ("--resume", older, f"has continued to {newest.name}"),
        ("--data", changed, "belongs to another run: data "),
    ):
        refused = train("run", longer + [flag, value])
        assert refused.code == 2 and message in refused.stderr, refused.stderr
    assert read_files(tmp_path / "run") == before, "a refused start has changed something"

    ended = train("branch", EVERYTHING + ["--resume", older])
    assert ended.code == 0, ended.stderr
    branch = Outcome(folder=tmp_path / "branch")
    run = Outcome(folder=tmp_path / "run")
    assert [row["step"] for row in branch.rows] == [9, 10, 11, 12]
    assert identical(branch.tensors(), run.tensors())
    assert identical(branch.tensors("optimizer"), run.tensors("optimizer"))
    # The same command goes on, as after a kill.
    resumed = train("branch", longer + ["--resume", older])
    assert resumed.code == 0 and "resuming from step 12 of 18" in resumed.stdout, resumed.stderr
    assert train("run", longer + ["--resume", newest, "--data", moved]).code == 0
    assert read(tmp_path / "run" / "status.json")["step"] == 18


def test_same_command_resumes_elsewhere_but_not_by_another_seed(
    forks, images, tmp_path, tmp_path_factory
):
    """Without a --name: with another layout and cadence, and data at another place, as a requeued job's."""
    command = ["--data", images, "--output_dir", tmp_path] + SMALL
    assert forks(command, observer=signal_at(6)).code == -signal.SIGKILL
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("cls-")
    changed = "--max_micro_batch_size 8 --workers 2 --tracker tensorboard --epochs 1 --max_steps 10".split()
    changed += "--checkpoint_every 3 --eval_every 2 --log_every 2 --keep_checkpoints 3".split()
    scratch = shutil.copytree(images, tmp_path_factory.mktemp("scratch") / "images")
    second = forks(command + changed + ["--data", scratch])
    assert second.code == 0 and "resuming from step 4 of 10" in second.stdout, second.stderr
    assert (
        f"the data are the same, and lie at {scratch} now; the run began with {images}\n"
        in second.stdout
    )
    assert list_checkpoints(folder) == ["step_00000006", "step_00000009", "step_00000010"]
    assert [row["step"] for row in Outcome(folder=folder).rows] == [1, 2, 3, 4, 6, 8, 10]
    assert forks(command + ["--seed", 1]).code == 0
    assert len(list(tmp_path.iterdir())) == 2
