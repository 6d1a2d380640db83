"""Whatever the standard streams and the home of a process are, it does its work and ends as it would have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
import sys, warnings
import common
for number in range(int(sys.argv[1])):
    print("café", number)
sys.stdout.writelines(["written\\n"])
print("to stderr", file=sys.stderr)
warnings.warn("warned")
opened = open(sys.argv[2], "w")
assert opened.fileno() > 2
opened.write("done")
sys.exit(3)
"""
HOMELESS = """
import os, pwd
pwd.getpwuid = lambda uid: {}["no entry"]
import common, getpass
print(getpass.getuser(), os.environ["HOME"])
assert os.path.isdir(os.path.expanduser("~"))
"""
LOST = (
    "standard output can't be written, the rest of it is lost: [Errno 28] No space left on device\n"
)


@pytest.mark.parametrize(
    "redirect, count, encoding, stdout, on_stderr",
    [
        ("", 1, "ascii", "caf\\xe9 0\nwritten\n", "to stderr\n"),
        (">&-", 1, "utf-8", "", "to stderr\n"),
        ("2>&-", 1, "utf-8", "café 0\nwritten\n", ""),
        ("<&- >&- 2>&-", 1, "utf-8", "", ""),
        ("| head -1", 30_000, "utf-8", "café 0\n", "to stderr\n"),
        (">/dev/full", 1, "utf-8", "", LOST),
        (">/dev/full", 30_000, "utf-8", "", LOST),
        ("2>/dev/full", 1, "utf-8", "café 0\nwritten\n", ""),
    ],
)
def test_no_stream_ends_a_process(tmp_path, redirect, count, encoding, stdout, on_stderr) -> None:
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    command = f'"{sys.executable}" "{script}" {count} "{tmp_path}/done" {redirect}; exit ${{PIPESTATUS[0]}}'
    environ = os.environ | {
        "PYTHONIOENCODING": encoding,
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    ended = subprocess.run(
        ["bash", "-c", command], env=environ, capture_output=True, encoding="utf-8"
    )
    assert (ended.returncode, ended.stdout) == (3, stdout), ended
    assert (
        on_stderr in ended.stderr
        and "Traceback" not in ended.stderr
        and "ignored" not in ended.stderr
    ), ended
    assert on_stderr or not ended.stderr
    assert (tmp_path / "done").read_text() == "done"


def test_without_a_home_there_is_one(tmp_path) -> None:
    """Else libraries write into a folder `~`, and torch's compiler fails where a user has no name."""
    environ = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    ended = subprocess.run(
        [sys.executable, "-c", HOMELESS], env=environ, capture_output=True, text=True
    )
    user, home = ended.stdout.split()
    assert user == f"uid{os.getuid()}" and home.startswith(f"{tmp_path}/home-"), ended
    assert not list(tmp_path.iterdir()), "it is left behind"
