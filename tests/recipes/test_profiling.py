"""--profile leaves traces of the steps that were asked for."""

import gzip
import json
import re
from pathlib import Path

import pytest

from common.config.fields import RunConfig
from common.config.parsing import parse
from common.errors import Refused


@pytest.mark.parametrize("text", ["x", "9-3", "0-3", "3-4-5", "1-101"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(
        Refused, match=rf"^--profile {text}: .*(must be FIRST-LAST|more than 100 steps)"
    ):
        parse(RunConfig, [f"--profile={text}"])


def test_every_rank_leaves_a_trace(forks, tmp_path) -> None:
    flags = [
        "--max_steps",
        7,
        "--eval_every",
        4,
        "--profile",
        "3-6",
        "--output_dir",
        tmp_path,
        "--name",
        "a",
    ]
    done, second = (rank.end() for rank in forks.start_ranks(2, flags))
    assert done.code == second.code == 0, done.stderr
    assert "gpuGetDeviceCount" not in done.stderr and "profiler_start" not in done.stderr
    folder = tmp_path / "a" / "profile"
    assert {path.name for path in folder.iterdir()} == {
        "steps_3-6_rank0.json.gz",
        "steps_3-6_rank1.json.gz",
    }
    for path in folder.iterdir():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {event["name"] for event in events}
        assert {name for name in names if name.startswith("Profiler")} == {
            f"ProfilerStep#{n}" for n in range(3, 7)
        }
        assert "aten::convolution" in names
    summary = (
        f"profile: {folder}/steps_3-6_rank*.json.gz opens in ui.perfetto.dev or chrome://tracing\n"
    )
    assert summary in done.stdout and summary in (tmp_path / "a" / "log.txt").read_text()


def test_steps_beyond_the_end_are_refused(run_several, tmp_path: Path) -> None:
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
    stdout = outcomes["obstructed"].stdout
    assert re.search(r"^the profile could not be written: FileExistsError: ", stdout, re.MULTILINE)
    assert outcomes["beyond"].outcome == "refused" and not outcomes["beyond"].folder.exists()
    assert (
        outcomes["beyond"].text
        == "--profile 5-13: the run ends with step 12; name steps up to that one"
    )
    assert re.search(r"^profile: .*/steps_1-1_rank0", outcomes["one"].stdout, re.MULTILINE)
    assert (
        "--profile 1-2: 2 steps were made before this start; name later ones\n"
        in outcomes["later"].stdout
    )
