"""`make gpu`: each check can fail, and any end of a process becomes a row with its cause.

The checks get canned runs: good ones, and ones that are wrong in one thing. tests/pretended_gpu/test_command.py shows on
pretended GPUs that they pass on real runs.
"""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.gpu import checks
from tests.gpu.checks import CHECKS, Check
from tests.gpu.machine import Failed, Machine, Trained, cause_of, finish, place_of, private
from tests.gpu.report import make

FACTS = {"gpus": ["one", "other"], "precisions": ["fp32", "bf16", "fp16"]}
SEEN = {"waits": [], "graphs": 1, "first_step_s": 9, "held_gib": [0.1, 0.2], "trial_gib": 2.0, "steps_gib": 1.9}
FALLING = tuple(2.3 * 0.9**step for step in range(20))
RESUMED = {"stdout": "resuming from step 5 of 16"}
SCALED = {"rows": {"loss_scale": 2.0**16, "skipped_steps": 8}}
PIXELS = {"most": 70, "most allowed": 80, "mean": 2, "mean allowed": 2.5}


def speeds(*ratios: float) -> dict:
    rows = [
        {"what": "resnet50: JPEG, worker", "ratio": ratio, "goal": goal}
        for ratio, goal in zip(ratios, (0.98, 2.0), strict=True)
    ]
    return {"rows": rows, "sessions": [{"model": "resnet50"}]}


@dataclass
class Canned:
    """The files and numbers of a run that was never made."""

    folder: Path
    loss: tuple[float, ...] = FALLING
    weight: float = 1.0
    result: float = 0.99
    rows: dict | None = None
    stdout: str = "out of memory"
    seen: dict | None = None

    def end(self) -> Trained:
        checkpoint = self.folder / "checkpoints" / "step_1"
        checkpoint.mkdir(parents=True)
        for file in ("model", "ema", "optimizer"):
            save_file(
                {"weight": torch.full((3,), self.weight, dtype=torch.float64)}, checkpoint / f"{file}.safetensors"
            )
        others = {f"train/{key}": value for key, value in (self.rows or {}).items()}
        rows = [{"step": step, "train/loss": loss, **others} for step, loss in enumerate(self.loss, 1)]
        rows.append({"eval/top1": self.result, "eval/AP50": self.result})
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Trained("ok", "", self.stdout, 0.0, self.folder, SEEN | (self.seen or {}))


class CannedMachine(Machine):
    """A machine whose runs are canned: run number n is as `wrong[n]` says, all others as `right`."""

    def __init__(self, scratch: Path, right: dict, wrong: dict, printed: object = None, **facts):
        super().__init__(scratch, time.monotonic() + 60)
        self.right, self.wrong, self.printed, self.runs, self.facts = right, wrong, printed, 0, FACTS | facts

    def start(self, *words, **_) -> Canned:
        self.runs += 1
        return Canned(self.scratch / f"run{self.runs}", **self.right | self.wrong.get(self.runs, {}))

    def python(self, script, *words, **_) -> str:
        if "--output" in words:
            words[-1].write_text(json.dumps(self.printed))
        return "--deterministic" if "--help" in words else json.dumps(self.printed)


NOT_FINITE, OFF = (
    {"loss": (*FALLING[:9], float("nan"), *FALLING[10:])},
    {"loss": (*FALLING[:19], FALLING[19] * (1 + 1e-7))},
)
GOOD = {"resume": RESUMED, "fp16 overflow": SCALED}
PRINTED = {"pixels": PIXELS, "speed": speeds(0.99, 2.1)}
# Words in the name of the check, number of the run that is wrong, what is wrong with it, expected text of the row.
WRONG = [
    ("demo", 1, NOT_FINITE, "losses are not finite from row 10 on"),
    ("demo", 1, {"result": 0.85}, "0.8500, expected 0.9"),
    *(("layout", number, OFF, "losses 1.0e-07 apart, at most 1e-08") for number in (2, 3, 4)),
    ("layout", 4, {"weight": 1.001}, "weights 1.0e-03 apart, at most 1e-08"),
    ("nccl", 2, OFF, "losses 1.0e-07 apart"),
    *(("nccl", number, NOT_FINITE, "not finite") for number in (3, 4, 5, 6)),
    ("resume", 3, {"stdout": ""}, "did not resume from its checkpoint"),
    ("resume", 3, {"loss": FALLING[:15]}, "20 and 15 steps"),
    ("resume", 3, {"weight": 1.2}, "weights 2.0e-01"),
    ("--deterministic", 3, {"weight": 1 + 1e-15}, "not the same bits: losses 0e+00, weights 1e-15 apart"),
    ("--deterministic", 3, OFF, "not the same bits: losses 1e-07"),
    ("host waits", 1, {"seen": {"waits": 10 * ["health.py:80"]}}, "2 per step: health.py:80; expected 0"),
    ("device: training", 1, {"result": 0.9}, "top1 0.9000, decoded by workers 0.9900"),
    ("device: training", 1, {"loss": (3.0, *FALLING)}, "the first losses are 23% apart"),
    ("overflow", 1, NOT_FINITE, "not finite"),
    ("overflow", 1, {"rows": {"loss_scale": 2.0**24, "skipped_steps": 0}}, "0 steps skipped"),
    ("overflow", 1, {"rows": {"loss_scale": 2.0**4, "skipped_steps": 20}}, "20 steps skipped"),
    ("overflow", 1, {"loss": 20 * (2.3,)}, "loss 2.30 to 2.30"),
    ("memory at", 1, {"seen": {"steps_gib": 2.1}}, "2.100 GiB at the peak, 2.000 in the trial"),
    ("out of memory", 2, {"stdout": ""}, "it was never out of memory"),
    ("out of memory", 2, OFF, "losses 1.0e-07 apart"),
    ("--compile", 2, {"seen": {"graphs": 0}}, "nothing was compiled"),
    ("--compile", 2, {"loss": (*FALLING[:19], FALLING[19] * 1.01)}, "losses 1.0e-02 apart, at most 1e-06"),
    ("pixels", 0, PIXELS | {"most": 81}, "most 81 of 255, at most 80; mean 2 of 255"),
    ("pixels", 0, PIXELS | {"mean": 2.6}, "mean 2.6 of 255, at most 2.5"),
    ("speed", 0, speeds(0.97, 2.1), "0.97 (goal 0.98)"),
    ("speed", 0, speeds(0.99, 1.9), "1.90 (goal 2.00)"),
]


@pytest.fixture(autouse=True)
def _nothing_to_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "kill", lambda *_: None)


def of(name: str, choices: dict) -> object:
    return next((value for words, value in choices.items() if words in name), {})


def with_words(words: str) -> Check:
    return next(check for check in CHECKS if words in check.name)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_of_good_runs_passes(check: Check, tmp_path: Path) -> None:
    machine = CannedMachine(tmp_path / "gpu", of(check.name, GOOD), {}, of(check.name, PRINTED))
    row = make(check, machine)
    assert row["state"] == "ok" and row["told"], row


@pytest.mark.parametrize("words, number, wrong, told", WRONG)
def test_a_check_of_a_run_with_one_thing_wrong_fails(
    words: str, number: int, wrong: dict, told: str, tmp_path: Path
) -> None:
    check = with_words(words)
    printed = wrong if number == 0 else of(check.name, PRINTED)
    row = make(check, CannedMachine(tmp_path / "gpu", of(check.name, GOOD), {number: wrong} if number else {}, printed))
    assert row["state"] == "FAILED" and told in row["told"], row


def test_every_check_is_among_those_that_can_fail() -> None:
    assert [check.name for check in CHECKS if not any(words in check.name for words, *_ in WRONG)] == []


def test_what_a_machine_lacks_is_no_failure(tmp_path: Path) -> None:
    lacking = {"precisions": ["fp32", "fp16"], "gpus": ["one"]}
    rows = [
        make(with_words(words), CannedMachine(tmp_path / words, {}, {}, **lacking))
        for words in ("cls demo bf16", "nccl")
    ]
    assert [(row["state"], row["told"]) for row in rows] == [("not run", "the GPU has no bf16"), ("not run", "one GPU")]


def test_whatever_goes_wrong_in_a_check_is_a_row(tmp_path: Path) -> None:
    def without_rows(machine: Machine) -> str:
        return (tmp_path / "metrics.jsonl").read_text()

    machine = CannedMachine(tmp_path / "gpu", {}, {})
    row = make(Check("broken", without_rows, 9), machine)
    assert row["state"] == "FAILED" and "FileNotFoundError: " in row["told"] and str(tmp_path.parent) not in row["told"]
    machine.until = time.monotonic()
    assert make(CHECKS[0], machine)["told"] == "not started: the time limit of everything has passed"


@pytest.mark.parametrize(
    "program, told",
    [
        (
            "raise RuntimeError('CUDA error: an illegal memory access')",
            "RuntimeError: CUDA error: an illegal memory access",
        ),
        ("import os; os.kill(os.getpid(), 11)", "Fatal Python error: Segmentation fault"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import sys; sys.exit('cls.py: --opt x: unknown')", "cls.py: --opt x: unknown"),
        ("import sys; sys.exit(7)", "exit code 7"),
        ("import time; time.sleep(1000)", "no end within 2 s"),
    ],
)
def test_a_process_that_ends_badly_or_not_at_all_says_why_in_a_line(program: str, told: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "gpu", 0.0)
    started = machine.launcher.start_python("-c", program)
    with pytest.raises(Failed) as failure:
        finish(started, time.monotonic() + (2 if "sleep" in program else 60))
    assert str(failure.value) == told
    assert "Error" not in told or "Traceback" in failure.value.evidence


def test_of_several_ranks_the_one_that_failed_by_itself_has_the_word() -> None:
    errors = """
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
cls.py: rank 0 (here) lost another process: see its message
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
recipes/cls.py FAILED
"""
    assert cause_of(errors, 1) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_a_run_that_hangs_says_where_it_was_not_where_its_data_workers_were() -> None:
    launched = '  File "/x/recipes/cls.py", line 318 in main\n  File "/x/common/launching/launch.py", line 110 in run'
    worker = '  File "/x/worker.py", line 335 in _worker_loop\n  File "/x/common/data/workers.py", line 46 in run'
    inner = '  File "/x/torch/autograd.py", line 1 in backward\n  File "/x/common/training/exactness.py", line 53 in describe'
    stacks = (
        f"Thread 1\n{worker}\n{launched}",
        "Thread 2\n  File threading.py",
        f"Current thread 3\n{inner}\n{launched}",
    )
    assert place_of("\n\n".join(stacks)) == "common/training/exactness.py:53"


def test_a_report_names_no_folder_and_nobody() -> None:
    said = private(f'File "{__file__}", line 3; at {Path.home()}/data/x.jpg and tests/gpu/checks.py, 3/4')
    assert said == 'File "test_checks.py", line 3; at x.jpg and tests/gpu/checks.py, 3/4'


def test_the_documentation_explains_every_row() -> None:
    rows = re.findall(r"^\| `(.*?)`", Path("docs/gpu_checks.md").read_text(), re.MULTILINE)
    assert [
        check.name for check in CHECKS if not any(re.fullmatch(row.replace("...", ".*"), check.name) for row in rows)
    ] == []
