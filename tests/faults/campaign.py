"""A run comes out the same, however often and whenever its processes are killed.

    python -m tests.faults [--kills 200] [--seed 0]

A campaign starts one run after the other. Every start is killed (SIGKILL) at a random moment, one of its ranks or all of them:
uniformly in time, or inside a file operation of the main process. The same command is started
again until the run has come to its end, which must be that of a run that nobody disturbed. After every start no process of it
is left, nothing in shared memory and no file but the run folder. The seed decides everything but the machine's own pace.
"""

import argparse
import contextlib
import functools
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

import numpy as np
import psutil
from safetensors.torch import load_file

from tests.harness.drawings import draw_scenes, draw_stripes
from tests.harness.forked import Fork, Forks
from tests.harness.launching import small
from tests.harness.outcomes import Outcome, distance
from tests.harness.resumed import assert_same_run, read

STEPS = 16
WORDS = (
    *("--workers", 1, "--tracker", "none", "--max_steps", STEPS, "--log_every", 1),
    *("--eval_every", 5, "--keep_checkpoints", 1, "--ema_decay", 0.9, "--clip", 1.0),
)
WORDS_OF = {
    "cls": (
        *("--image_size", 32, "--global_batch_size", 16, "--max_micro_batch_size", 8, "--mixup", 0.2, "--cache", 24),
        *("--batch_norm", "group", "--norm_batch_size", 4, "--hflip", 0.5, "--random_erasing", 0.2, "--drop_path", 0.2),
    ),
    "det": (
        *("--short_sides", "48,64", "--long_side", 96, "--group_window", 2, "--width", 32),
        *("--global_batch_size", 4, "--max_micro_batch_size", 2, "--batch_norm", "group", "--norm_batch_size", 2),
        *("--hflip", 0.3, "--photometric", 0.3, "--iou_crop", 0.3, "--zoom_out", 0.3, "--mosaic", 0.3, "--mixup", 0.3),
    ),
}
OPERATIONS = 90  # file operations of a start that a kill is drawn from: about what an undisturbed run has
GONE_S = 30.0  # what the ranks that were not killed have to end in
GONE_WITH_S = 5.0  # what data workers have to end in, once their process has; it takes them some 0.1 s
# Folders that torch leaves where temporary files are, killed or not; and a few kilobytes of a process
# that is killed while timm reads what the run would export.
IN_TMP = ("torchinductor_", "export_check_")
FOREIGN = (
    "sem.loky-"  # of joblib's pools in other programs of the machine, which may be out of sight here; no recipe has one
)
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
FAR = 1e-8  # on other layouts, in float64


@dataclass
class Campaign:
    """Kills of runs on `layouts`, numbers of processes of which each start takes one: several move a run from one to another.

    The processes are forks, which start sooner than launched ones. With `shards` (FSDP2), two of three starts of several
    processes have them, or all if the run stays on its layout.
    """

    forks: Forks
    scratch: Path
    layouts: tuple[int, ...]
    seed: int = 0
    recipe: str = "cls"
    shards: bool = False
    say: Callable[[str], None] = print
    kills: int = 0
    starts: int = 0
    runs: int = 0  # that came to their end, and were the same

    def __post_init__(self):
        self.random = random.Random(f"{self.seed} {self.recipe} {self.layouts}")
        self.scratch.mkdir(exist_ok=True)
        for name in ("tmp", "cache"):
            (self.scratch / name).mkdir()
        self.shared_memory = {*os.listdir("/dev/shm")}
        self.data = self.scratch / "data"
        if self.recipe == "cls":
            draw_stripes(self.data / "train", (12, 9, 6))
            draw_stripes(self.data / "val", (3, 3, 3), seed=1)
        else:
            self.data.mkdir()
            draw_scenes(self.data)
        self.words = (*small([*WORDS, *WORDS_OF[self.recipe], "--data", self.data], self.recipe),)
        self.words += ("--dtype", "float64") if self.moves else ()
        self.forks("--help")  # the server starts
        began = time.monotonic()
        self._finish("whole", self.layouts[0], "--keep_checkpoints", STEPS, "--checkpoint_every", 2)
        self.seconds = time.monotonic() - began
        self.whole = self._outcome("whole")

    @property
    def _script(self) -> str:
        return f"recipes/{self.recipe}.py"

    @property
    def moves(self) -> bool:
        return len(self.layouts) > 1

    def run(self, kills: int) -> "Campaign":
        """Go on until so many have been."""
        while self.kills < kills:
            name = f"run_{self.runs}"
            while (killed := self._is_killed(name)) and self.kills < kills:
                pass
            if killed:
                self._finish(name, self.random.choice(self.layouts))
            self.compare(self._outcome(name))
            shutil.rmtree(self.scratch / name)
            self.runs += 1
        return self

    def compare(self, one: Outcome) -> None:
        """Every step is there once; losses, evaluations, weights and all other state are those of the undisturbed run."""
        if self.moves:
            for key in ("train/loss", "train/grad_norm", "eval/loss"):
                np.testing.assert_allclose(one.column(key), self.whole.column(key), rtol=FAR)
            for file in ("model", "ema", "optimizer"):
                early = load_file(self.scratch / f"whole/checkpoints/step_00000002/{file}.safetensors")
                assert distance(self.whole.tensors(file), one.tensors(file), early) < FAR, file
        else:
            assert_same_run(one.folder, self.whole.folder, STEPS)
            mine, theirs = (read(outcome.folder, "summary.json") for outcome in (one, self.whole))
            for key in theirs.keys() - {"train_seconds", "images_per_second"}:
                assert mine[key] == theirs[key], (key, mine[key], theirs[key])
        assert [row["step"] for row in one.rows] == [*range(1, STEPS + 1)], "a step is missing or there twice"
        status = read(one.folder, "status.json")
        assert (status["status"], status["step"]) == ("finished", STEPS), status
        mine, theirs = (_files(outcome.folder) for outcome in (one, self.whole))
        assert mine == theirs, f"left behind: {mine - theirs}, missing: {theirs - mine}"
        # One more where the last kill came before it was removed: a longer run would do that.
        assert len([*(one.folder / "checkpoints").iterdir()]) <= 2

    def assert_nothing_is_left(self) -> None:
        """Of a start that has ended: no process, with it no socket, no shared memory, no file but the run folder."""
        until = time.monotonic() + GONE_WITH_S
        while left := self._processes() + self._shared_memory():
            assert time.monotonic() < until, f"left behind: {left}"
            time.sleep(0.01)
        left = [path for name in ("tmp", "cache") for path in (self.scratch / name).iterdir()]
        left = [path for path in left if not path.name.startswith(IN_TMP)]
        assert not left, f"left behind: {left}"

    def _processes(self) -> list[psutil.Process]:
        """All that still run: by their environment, or a file below `scratch` that they have open."""
        mark, found = str(self.scratch).encode(), []
        for process in psutil.process_iter():
            folder = Path(f"/proc/{process.pid}")
            with contextlib.suppress(OSError):
                files = [os.readlink(file).encode() for file in (folder / "fd").iterdir()]
                if process.pid != os.getpid() and mark in b"\0".join([(folder / "environ").read_bytes(), *files]):
                    found.append(process)
        return found

    def _shared_memory(self) -> list[str]:
        """What is new in /dev/shm and of no process that runs, such as of another test."""
        new = {name for name in os.listdir("/dev/shm") if not name.startswith(FOREIGN)} - self.shared_memory
        return [name for name in new if not any(f"/dev/shm/{name}" in maps for maps in _read_of_processes("maps"))]

    def _outcome(self, name: str) -> Outcome:
        return Outcome("ok", "", "", 0.0, self.scratch / name)

    def _finish(self, name: str, processes: int, *words: object) -> None:
        """Start, and let it come to its end."""
        for fork in self._fork(name, processes, None, *words):
            ended = fork.end()
            assert ended.code == 0, (name, ended)
        self.assert_nothing_is_left()

    def _is_killed(self, name: str) -> bool:
        """Start, and kill at a random moment; False where the run had come to its end before."""
        processes = self.random.choice(self.layouts)
        victim = self.random.choice([*range(processes), "all"] if processes > 1 else [0])
        moment = self.random.uniform(0, self.seconds)
        operation = self.random.randint(1, OPERATIONS)
        if self.random.random() < 0.5:
            operation = 0
        elif victim != "all":
            victim = 0  # it alone has to do with files
        where = self._kill_forks(name, processes, victim, moment, operation)
        self.assert_nothing_is_left()
        if where:
            who = "all ranks" if victim == "all" else f"rank {victim}"
            self.kills += 1
            self.say(f"{self.kills:4}  {name}, of {processes}: {who} killed {where}")
        return bool(where)

    def _kill_forks(self, name: str, processes: int, victim: int | str, moment: float, operation: int) -> str:
        forks = self._fork(name, processes, operation or None)
        if not operation:
            time.sleep(moment)
            for fork in forks if victim == "all" else [forks[victim]]:
                fork.process.kill()
        while alive := [fork.process.sentinel for fork in forks if fork.process.exitcode is None]:
            connection.wait(alive, 120)
            if any(fork.process.exitcode for fork in forks):  # what the launcher's agent does, too, when it misses one
                for fork in forks:
                    fork.process.kill() if victim == "all" else fork.process.terminate()
                break
        ends = [fork.end(GONE_S) for fork in forks]
        killed = [end for end in ends if end.code == -signal.SIGKILL]
        if not killed:
            assert all(end.code == 0 for end in ends), ends
            return ""
        done = next((end.died_before for end in ends if end.died_before), "")
        return f"before {re.sub(' [0-9]+$', '', done)}" if done else "at a moment"

    def _command(self, name: str, *words: object) -> tuple:
        cadence = ("--checkpoint_every", self.random.randint(1, 3))
        cache = ("--cache_folder", self.scratch / "cache") * (self.recipe == "cls" and self.random.random() < 0.5)
        return (*self.words, "--output_dir", self.scratch, "--name", name, *cadence, *cache, *words)

    def _fork(self, name: str, processes: int, operation: int | None, *words: object) -> list[Fork]:
        """A fork for each rank; rank 0 dies before its file operation of that number, if one is given."""
        watch = self.scratch / name if operation else None
        self.starts += 1
        has_shards = self.shards and processes > 1 and (not self.moves or self.starts % 3 > 0)
        words = self._command(name, *words)
        return self.forks.start_ranks(
            processes,
            *words,
            recipe=self.recipe,
            before=functools.partial(begin, self.scratch / "tmp", FSDP if has_shards else {}),
            watch=watch,
            spared=_AllBefore(operation or 0),
        )


class _AllBefore:
    """The file operations before that of a number, counted in the order in which they come."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __contains__(self, operation: str) -> bool:
        self.number -= 1
        return self.number > 0


def begin(temporary: Path, environment: dict[str, str], rank: int) -> None:
    """In a fork: a folder for temporary files, and variables."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    os.environ.update(environment)


def _read_of_processes(name: str) -> Iterator[str]:
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            yield Path(f"/proc/{process.pid}/{name}").read_text(errors="replace")


def _files(folder: Path) -> set[Path]:
    """Of a run, without those of its checkpoints, and without pictures, which only launched runs draw."""
    paths = {path.relative_to(folder) for path in folder.rglob("*")}
    return {path for path in paths if path.parts[0] not in ("checkpoints", "pictures")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # On one process to four; moving between them, also with shards; of detection. What share of the kills each gets.
    shares = {
        ("cls", (1,), False): 0.3,
        ("cls", (2,), False): 0.15,
        ("cls", (3,), False): 0.1,
        ("cls", (4,), False): 0.08,
        ("cls", (1, 2, 3, 4), False): 0.13,
        ("cls", (1, 2, 3), True): 0.1,
        ("det", (1,), False): 0.08,
        ("det", (2,), False): 0.06,
    }
    scratch, began = Path(tempfile.mkdtemp()), time.monotonic()
    for name in ("forks", "machines"):
        (scratch / name).mkdir()
    forks, seed, done = Forks(scratch / "forks"), arguments.seed, []
    try:
        for number, ((recipe, layouts, shards), share) in enumerate(shares.items()):
            campaign = Campaign(forks, scratch / str(number), layouts, seed, recipe, shards=shards)
            done.append(campaign.run(round(share * arguments.kills)))
    finally:
        shutil.rmtree(scratch)
    kills, runs = sum(campaign.kills for campaign in done), sum(campaign.runs for campaign in done)
    minutes = (time.monotonic() - began) / 60
    print(
        f"seed {arguments.seed}: {kills} kills of {runs} runs, every run the same as undisturbed; {minutes:.1f} minutes"
    )
