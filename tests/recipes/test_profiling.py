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


def test_gaps_between_steps_and_within_them_are_told_apart(tmp_path: Path) -> None:
    phases = [("waiting for data", 0, 2), ("training", 2, 10), ("waiting for data", 10.5, 13), ("training", 13, 20)]
    work = [(2, 5), (3, 4), (8, 9.5), (14, 19.9)]  # one within another
    trace = write(
        tmp_path,
        *marks(phases, (0, 10), (10, 20)),
        *(event("cpu_op", "aten::add", *span) for span in work),
        event("cpu_op", "aten::set_", 11, 11.5),  # of the batch
        event("cpu_op", "aten::add", 9.5, 14, thread=2),  # of another thread
    )
    idle = idle_time_of(trace)
    assert (idle.steps, idle.step_ms, idle.phase) == ((7, 8), 10, "waiting for data")
    assert idle.between_ms == pytest.approx([4.5]) and idle.within_ms == pytest.approx(3)
    assert str(idle) == (
        "10.0 ms a step; between steps no work for 4.50 ms (45.00 % of a step), for at most 4.50 ms (45.00 % of a step), "
        "most of that waiting for data; within a step for at most 3.00 ms (30.00 % of a step)"
    )


def test_on_a_gpu_its_kernels_count_by_the_step_that_launched_them(tmp_path: Path) -> None:
    launched, ran = [1, 2, 11], [(3, 9), (9, 14), (14.25, 19)]  # the second still runs while the host is a step ahead
    trace = write(
        tmp_path,
        *marks([("training", 0, 20)], (0, 10), (10, 20)),
        event("cpu_op", "aten::add", 0, 1),
        *(
            event("cuda_runtime", "cudaLaunchKernel", at, at + 0.1, correlation=number)
            for number, at in enumerate(launched)
        ),
        *(event("kernel", "gemm", *span, thread=7, correlation=number) for number, span in enumerate(ran)),
        event("kernel", "gemm", 0, 1, thread=7, correlation=99),  # launched before
    )
    idle = idle_time_of(trace)
    assert idle.between_ms == pytest.approx([0.25]) and idle.within_ms == 0


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
        # Between steps 4 and 5 there is an evaluation.
        assert idle.steps == (3, 4, 5, 6) and len(idle.between_ms) == 2 and 0 < max(idle.between_ms) < 10_000
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
    assert re.search(
        r"^profile: [0-9.]+ ms a step; within a step .*/steps_1-1_rank0", outcomes["one"].stdout, re.MULTILINE
    )
    assert "--profile 1-2: 2 steps were made before this start; name later ones\n" in outcomes["later"].stdout
