"""A run comes out the same, however often and whenever its processes are killed.

A campaign starts one run after the other. Every start is killed (SIGKILL) at a random moment, one
of its ranks or all of them: uniformly in time, or before a file operation of the main process. The
same command is started again until the run has come to its end, which must be the end of an
undisturbed run. After every start no process of it is left, nothing in shared memory and no file
but the run folder. The seed decides everything but the machine's own pace.

`make chaos TIMES=30 SEED=7` kills 30 times as often.
"""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import psutil
import pytest

from tests.harness.forked import Fork, Forks
from tests.harness.launching import add_small_defaults
from tests.harness.outcomes import Outcome, assert_same_training, read
from tests.harness.resumed import assert_same_run
from tests.recipes.test_layout import FSDP

STEPS = 12
WORDS = (
    f"--workers 1 --tracker none --max_steps {STEPS} --log_every 1 --eval_every 5 "
    "--keep_checkpoints 1 --ema_decay 0.9 --clip 1.0"
).split()
WORDS_OF = {
    "cls": (
        "--image_size 32 --global_batch_size 16 --max_micro_batch_size 8 --mixup 0.2 --cache 24 "
        "--batch_norm group --norm_batch_size 4 --hflip 0.5 --random_erasing 0.2 --drop_path 0.2"
    ).split(),
    "det": (
        "--short_sides 48,64 --long_side 96 --group_window 2 --width 32 --global_batch_size 4 "
        "--max_micro_batch_size 2 --batch_norm group --norm_batch_size 2 --hflip 0.3 "
        "--photometric 0.3 --iou_crop 0.3 --zoom_out 0.3 --mosaic 0.3 --mixup 0.3"
    ).split(),
    "seg": (
        "--crop_size 64 --global_batch_size 4 --max_micro_batch_size 2 --batch_norm group "
        "--norm_batch_size 2 --hflip 0.3 --photometric 0.3 --drop_path 0.2 --class_weights sqrt"
    ).split(),
}
# File operations of a start that a kill is drawn from: about as many as an undisturbed run has.
OPERATIONS = 70
GONE_S = 30.0  # the ranks that were not killed end within this time
GONE_WITH_S = 5.0  # data workers end within this time after their process; it takes them some 0.1 s
# Left by kills in the folder for temporary files, see docs/faults.md.
IN_TMP = ("torchinductor_", "export_check_")


TIMES = int(os.environ.get("TIMES", 1))
SEED = int(os.environ.get("SEED", 0))


@dataclass
class Campaign:
    """Kills of runs on `layouts`, numbers of processes of which each start takes one: several move
    a run from one to another.

    The processes are forks, which start sooner than launched ones. With `shards` (FSDP2), two of
    three starts of several processes have them, or all if the run stays on its layout.
    """

    forks: Forks
    scratch: Path
    data: Path
    layouts: tuple[int, ...]
    recipe: str = "cls"
    shards: bool = False
    seed: int = SEED
    kills: int = 0
    starts: int = 0

    def __post_init__(self):
        self.random = random.Random(f"{self.seed} {self.recipe} {self.layouts}")
        for name in ("tmp", "cache"):
            (self.scratch / name).mkdir(parents=True)
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.moves = len(self.layouts) > 1
        argv = WORDS + WORDS_OF[self.recipe] + ["--data", self.data]
        self.argv = add_small_defaults(argv + ["--output_dir", self.scratch], self.recipe)
        if self.moves:
            self.argv += ["--dtype", "float64"]
        self.forks(["--help"])  # the server starts
        began = time.monotonic()
        self.whole = self._finish("whole")
        self.seconds = time.monotonic() - began

    def run(self, kills: int) -> None:
        """Start runs, and kill them until so many kills have been; each run comes to its end."""
        while self.kills < kills:
            name = f"run_{self.starts}"
            is_killed = True
            while is_killed and self.kills < kills:
                is_killed = self._kill(name)
            if is_killed:
                self._finish(name)
            run = Outcome(folder=self.scratch / name)
            self.assert_undisturbed(run)
            shutil.rmtree(run.folder)

    def assert_undisturbed(self, run: Outcome) -> None:
        """Every step is there once; losses, evaluations, weights and all other state are as in the
        undisturbed run.
        """
        if self.moves:
            assert_same_training(self.whole, run)
        else:
            assert_same_run(run.folder, self.whole.folder, STEPS)
            actual = read(run.folder / "summary.json")
            expected = read(self.whole.folder / "summary.json")
            for key in expected.keys() - {"train_seconds", "images_per_second"}:
                assert actual[key] == expected[key], (key, actual[key], expected[key])
        assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1)), (
            "a step is missing or there twice"
        )
        status = read(run.folder / "status.json")
        assert (status["status"], status["step"]) == ("finished", STEPS), status
        actual = _list_files(run.folder)
        expected = _list_files(self.whole.folder)
        assert actual == expected, f"left behind: {actual - expected}, missing: {expected - actual}"
        # One more where the last kill came before it was removed: a longer run would do that.
        assert len(list((run.folder / "checkpoints").iterdir())) <= 2

    def assert_nothing_is_left(self) -> None:
        """Of a start that has ended: no process, with it no socket, no shared memory, no file but
        the run folder.
        """
        until = time.monotonic() + GONE_WITH_S
        left = self._list_processes() + self._list_shared_memory()
        while left:
            assert time.monotonic() < until, f"left behind: {left}"
            time.sleep(0.01)
            left = self._list_processes() + self._list_shared_memory()
        files = list((self.scratch / "tmp").iterdir()) + list((self.scratch / "cache").iterdir())
        left = [path for path in files if not path.name.startswith(IN_TMP)]
        assert not left, f"left behind: {left}"

    def _list_processes(self) -> list[int]:
        """Processes of the campaign that still run: `scratch` is in their environment, or they have
        a file below it open.
        """
        mark = str(self.scratch).encode()
        processes = []
        for process in set(psutil.pids()) - {os.getpid()}:
            folder = Path(f"/proc/{process}")
            with contextlib.suppress(OSError):
                files = [os.readlink(file).encode() for file in (folder / "fd").iterdir()]
                if mark in b"\0".join([(folder / "environ").read_bytes()] + files):
                    processes.append(process)
        return processes

    def _list_shared_memory(self) -> list[str]:
        """New files in /dev/shm that no running process has mapped, such as another test's;
        joblib's are of other programs.
        """
        names = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.loky-")}
        names -= self.shared_memory
        if not names:
            return []
        maps = ""
        for process in psutil.pids():
            with contextlib.suppress(OSError):
                maps += Path(f"/proc/{process}/maps").read_text(errors="replace")
        return [name for name in names if f"/dev/shm/{name}" not in maps]

    def _finish(self, name: str) -> Outcome:
        """Start, and let it come to its end."""
        for fork in self._start(name, self.random.choice(self.layouts)):
            ended = fork.end()
            assert ended.code == 0, (name, ended)
        self.assert_nothing_is_left()
        return Outcome(folder=self.scratch / name)

    def _kill(self, name: str) -> bool:
        """Start, and kill at a random moment; False if the run had come to its end before."""
        processes = self.random.choice(self.layouts)
        victims = list(range(processes))
        if processes > 1:
            victims.append("all")
        victim = self.random.choice(victims)
        moment = self.random.uniform(0, self.seconds)
        operation = self.random.randint(1, OPERATIONS)
        if self.random.random() < 0.5:
            operation = 0
        elif victim != "all":
            victim = 0  # it alone has to do with files
        forks = self._start(name, processes, operation)
        if not operation:
            time.sleep(moment)
            for rank, fork in enumerate(forks):
                if victim in ("all", rank):
                    fork.process.kill()
        self._await_end(forks, kills_all=victim == "all")
        ends = [fork.end(GONE_S) for fork in forks]
        self.assert_nothing_is_left()
        if all(end.code != -signal.SIGKILL for end in ends):
            assert all(end.code == 0 for end in ends), ends
            return False
        self.kills += 1
        when = "at a moment"
        for end in ends:
            if end.died_before:
                when = f"before {re.sub(' [0-9]+$', '', end.died_before)}"
        print(f"{self.kills:4}  {name}, of {processes}: rank {victim} killed {when}")
        return True

    @staticmethod
    def _await_end(forks: list[Fork], kills_all: bool) -> None:
        """Wait until all have ended; once one has failed, end the others, as the launcher does."""
        while not any(fork.process.exitcode for fork in forks):
            alive = [fork.process.sentinel for fork in forks if fork.process.exitcode is None]
            if not alive:
                return
            connection.wait(alive, 120)
        for fork in forks:
            if kills_all:
                fork.process.kill()
            else:
                fork.process.terminate()

    def _start(self, name: str, processes: int, operation: int = 0) -> list[Fork]:
        """A fork for each rank; rank 0 dies before its file operation of that number, if one is given."""
        argv = self.argv + ["--name", name, "--checkpoint_every", self.random.randint(1, 3)]
        if self.recipe == "cls" and self.random.random() < 0.5:
            argv += ["--cache_folder", self.scratch / "cache"]
        self.starts += 1
        has_shards = self.shards and processes > 1 and (not self.moves or self.starts % 3 > 0)
        return self.forks.start_ranks(
            processes,
            argv,
            recipe=self.recipe,
            before=functools.partial(set_up, self.scratch / "tmp", FSDP if has_shards else {}),
            watch=self.scratch / name if operation else None,
            spared=_AllBefore(operation),
        )


class _AllBefore:
    """The file operations before the one with this number, counted in the order in which they come."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __contains__(self, operation: str) -> bool:
        self.number -= 1
        return self.number > 0


def set_up(temporary: Path, environment: dict[str, str]) -> None:
    """In a fork: a folder for temporary files, and variables."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    os.environ.update(environment)


def _list_files(folder: Path) -> set[Path]:
    """Of a run, without its checkpoints' files, and without pictures, which only launched runs draw."""
    paths = {path.relative_to(folder) for path in folder.rglob("*")}
    return {path for path in paths if path.parts[0] not in ("checkpoints", "pictures")}


@pytest.mark.parametrize(
    "processes, kills, options",
    [
        (1, 7, {}),
        (2, 4, {}),
        (2, 2, {"shards": True}),
        (1, 2, {"recipe": "det"}),
        (2, 2, {"recipe": "seg"}),
        pytest.param(4, 2, {}, marks=pytest.mark.long),
    ],
)
def test_runs_killed_at_random_are_bit_equal_to_the_undisturbed(
    forks, data, scenes, regions, tmp_path, processes, kills, options
):
    images = {"det": scenes, "seg": regions}.get(options.get("recipe"), data)
    Campaign(forks, tmp_path / "campaign", images, (processes,), **options).run(kills * TIMES)


LONG = [pytest.param(40, {"shards": True, "seed": seed}, marks=pytest.mark.long) for seed in (0, 1)]


@pytest.mark.parametrize("kills, options", [(3, {}), (4, {"shards": True})] + LONG)
def test_runs_killed_and_moved_are_the_undisturbed_in_float64(
    forks, data, tmp_path, kills, options
):
    """Between one process and several; with shards also between shards and data parallelism."""
    layouts = (1, 2, 3) if options else (1, 2, 3, 4)
    Campaign(forks, tmp_path / "campaign", data, layouts, **options).run(kills * TIMES)
