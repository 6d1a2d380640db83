"""--profile leaves traces of the steps that were asked for, and notices when nothing was computed."""

import gzip
import json
import re
from pathlib import Path

import pytest

from common.config.fields import RunConfig
from common.config.parsing import parse
from common.errors import Refused
from common.run.profiling import idle_time_of

FLAGS = ["--tracker", "none", "--workers", 0]


def event(category: str, name: str, begin: float, end: float, thread: int = 1, **arguments) -> dict:
    """One of a trace, in milliseconds; the trace has microseconds."""
    times = {"ts": 1e3 * begin, "dur": 1e3 * (end - begin)}
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "args": arguments} | times


def write(folder: Path, *events: dict) -> Path:
    path = folder / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}, file)
    return path


def marks(phases: list[tuple[str, float, float]], *steps: tuple[float, float], first: int = 7) -> list[dict]:
    named = [event("user_annotation", f"step {first + number}", *span) for number, span in enumerate(steps)]
    return named + [event("user_annotation", f"phase: {name}", begin, end) for name, begin, end in phases]


def test_idle_time_is_the_share_of_the_steps_without_work_on_the_training_thread(tmp_path: Path) -> None:
    phases = [("waiting for data", 0, 2), ("training", 2, 10), ("waiting for data", 10.5, 13), ("training", 13, 20)]
    work = [(0, 1), (2, 5), (3, 4), (8, 9.5), (14, 20)]  # the first loads data, the third is part of the second
    trace = write(
        tmp_path,
        *marks(phases, (0, 10), (10, 20)),
        *(event("cpu_op", "aten::add", *span) for span in work),
        event("cpu_op", "aten::add", 9.5, 14, thread=2),  # of another thread
    )
    idle = idle_time_of(trace)
    assert (idle.steps, idle.step_ms, idle.phase) == ((7, 8), 10, "waiting for data")
    assert idle.longest_ms == pytest.approx(4.5) and idle.share == pytest.approx((2 + 3 + 4.5) / 20)
    said = "10.0 ms a step, idle for 47.50 % of it, for at most 4.50 ms, most of that waiting for data"
    assert str(idle) == said


def test_what_is_between_two_steps_is_not_idle_and_on_a_gpu_its_kernels_count(tmp_path: Path) -> None:
    spans = [(0, 9), (9.5, 30), (101, 109.5), (110, 120)]  # an evaluation goes on to 30, then the host writes
    trace = write(
        tmp_path,
        *marks([("training", 0, 120)], (0, 10), (100, 109.5), (109.5, 120)),
        *(event("kernel", "gemm", *span, thread=7) for span in spans),
        event("cpu_op", "aten::add", 0, 120),
    )
    idle = idle_time_of(trace)
    assert idle.longest_ms == pytest.approx(1) and idle.phase == "training"
    assert idle.share == pytest.approx((0.5 + 1 + 0.5) / 30)


@pytest.mark.parametrize("text", ["x", "9-3", "0-3", "3-4-5", "1-101"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    limit = "more than 100 steps" if text == "1-101" else "must be FIRST-LAST"
    with pytest.raises(Refused, match=rf"^--profile {re.escape(text)}: .*{limit}"):
        parse(RunConfig, [f"--profile={text}"])


def test_every_rank_leaves_a_trace_and_the_main_process_says_what_it_shows(forks, tmp_path) -> None:
    flags = [*FLAGS, "--max_steps", 7, "--eval_every", 4, "--profile", "3-6", "--output_dir", tmp_path, "--name", "a"]
    done, other = (rank.end() for rank in forks.start_ranks(2, *flags))
    assert done.code == other.code == 0, done.stderr
    assert "gpuGetDeviceCount" not in done.stderr and "profiler_start" not in done.stderr
    folder = tmp_path / "a" / "profile"
    assert {path.name for path in folder.iterdir()} == {"steps_3-6_rank0.json.gz", "steps_3-6_rank1.json.gz"}
    for path in folder.iterdir():
        idle = idle_time_of(path)
        assert idle.steps == (3, 4, 5, 6) and 0 < idle.share < 1 and idle.phase
        names = {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {"phase: waiting for data", "phase: evaluating", "phase: training", "aten::convolution"} <= names
    said = re.findall(r"^profile: (.*); (.*) opens in ui.perfetto.dev or chrome://tracing$", done.stdout, re.MULTILINE)
    assert said == [(str(idle_time_of(folder / "steps_3-6_rank0.json.gz")), str(folder / "steps_3-6_rank*.json.gz"))]
    assert said[0][0] in (tmp_path / "a" / "log.txt").read_text()


def test_steps_beyond_the_end_are_refused_and_those_made_before_are_told(run_several, tmp_path: Path) -> None:
    """And a profile that can't be written ends no run."""
    (tmp_path / "obstructed").mkdir()
    (tmp_path / "obstructed/profile").write_text("in the way")
    cases = {
        "beyond": ["--max_steps", 12, "--profile", "5-13"],
        "one": ["--max_steps", 2, "--profile", 1],
        "later": ["--max_steps", 3, "--profile", "1-2", "--name", "one", "--resume", "auto"],
        "obstructed": ["--max_steps", 3, "--profile", "2-3", "--output_dir", tmp_path],
    }
    outcomes = run_several(1, cases)
    assert outcomes["obstructed"].outcome == "ok"
    said = outcomes["obstructed"].stdout
    assert re.search(r"^the profile is incomplete: rank 0: FileExistsError: ", said, re.MULTILINE)
    assert outcomes["beyond"].outcome == "refused" and not outcomes["beyond"].folder.exists()
    assert outcomes["beyond"].text == "--profile 5-13: the run ends with step 12; name steps up to that one"
    assert re.search(r"^profile: [0-9.]+ ms a step, idle for .*/steps_1-1_rank0", outcomes["one"].stdout, re.MULTILINE)
    assert "--profile 1-2: 2 steps were made before this start; name later ones\n" in outcomes["later"].stdout
