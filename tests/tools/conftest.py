"""Finished runs that tests of tools look at: made once per session, as a user makes them. Copy what a test changes."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.launching import Launcher


@pytest.fixture(scope="session")
def shared_run(launch: Launcher, tmp_path_factory) -> Callable[..., Path]:
    """`shared_run("cls", [flags], name="cls")` -> the run folder; one of the parallel test processes trains it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "runs_for_tools"
    folder.mkdir(exist_ok=True)

    def run(recipe: str, flags: list, name: str = "") -> Path:
        name = name or recipe
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / f"{name}.done").exists():
                words = [*flags, "--name", name, "--output_dir", folder]
                done = launch("multi_cpu", f"recipes/{recipe}.py", *words, timeout=300)
                assert done.returncode == 0, done.stderr
                (folder / f"{name}.done").touch()
        return folder / name

    return run


@pytest.fixture(scope="session")
def trained_classifier(shared_run) -> Path:
    """The run folder of the digits preset, 5 epochs, on two processes with data workers and W&B offline: top-1 about 98 %."""
    return shared_run("cls", ["--config", "recipes/presets/digits.yaml", "--epochs", 5])


@pytest.fixture(scope="session")
def trained_detector(shared_run) -> Path:
    """The run folder of the det_digits preset, 80 steps, on two processes with data workers and W&B offline."""
    return shared_run("det", ["--config", "recipes/presets/det_digits.yaml", "--max_steps", 80])


@pytest.fixture(scope="session")
def mmdetection_configs(tmp_path_factory) -> list[Path]:
    """The 869 Python configs in MMDetection's package, which is downloaded."""
    folder = tmp_path_factory.mktemp("mmdet")
    words = ["pip", "download", "--quiet", "--no-deps", "-d", str(folder), "mmdet==3.3.0"]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, timeout=300)
    if done.returncode:
        pytest.skip(f"MMDetection's package can't be downloaded: {done.stderr.decode()[-200:]}")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", next(folder.glob("*.whl")), folder], check=True)
    files = sorted((folder / "mmdet" / ".mim" / "configs").rglob("*.py"))
    assert len(files) == 869
    return files
