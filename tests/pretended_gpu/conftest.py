"""Fixtures that run recipes on pretended GPUs."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.harness.launching import ROOT, Launcher, Started
from tests.pretended_gpu.build import build, why_not


class Gpus:
    """Starts scripts on machines with pretended GPUs."""

    def __init__(self, launch: Launcher, environment: dict[str, str]):
        self.launch, self.environment = launch, environment

    def start(
        self, config: str, script: str | Path, *words: object, devices: int = 1, gib: object = 16, env=None, **options
    ) -> Started:
        """Starts `script` with `accelerate launch` on `devices` GPUs of `gib` GiB each ("16,0.35": the first; all others)."""
        flags = [*options.pop("flags", ()), *(("--num_processes", devices) if devices > 1 else ())]
        env = self.environment | {"PRETENDED_GPUS": str(devices), "PRETENDED_GIB": str(gib)} | (env or {})
        run = ROOT / "tests" / "pretended_gpu" / "run.py"
        return self.launch.start(config, run, script, *words, flags=flags, env=env, **options)

    def __call__(self, *arguments: object, timeout: float = 300, **options) -> str:
        """Starts a script, waits for its end and expects success; returns its output."""
        done = self.start(*arguments, **options).finish(timeout)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert "no kernel" not in done.stderr and "in the pretended runtime" not in done.stderr, done.stderr
        assert "could not be drawn" not in done.stdout, done.stdout
        return done.stdout

    def python(self, text: str, folder: Path) -> CompletedProcess[str]:
        """Runs the program `text` in one process on one GPU; writes it to `folder`."""
        script = folder / "script.py"
        script.write_text(text)
        return self.launch.start_python(ROOT / "tests/pretended_gpu/run.py", script, env=self.environment).finish()


@pytest.fixture(scope="session")
def gpus(launch: Launcher) -> Gpus:
    """`gpus("multi_gpu", "recipes/cls.py", *words, devices=2)` runs a recipe on pretended GPUs and expects success."""
    if reason := why_not():
        pytest.skip(reason)
    return Gpus(launch, build())


@pytest.fixture(scope="session")
def run_on_gpus(run_several, gpus: Gpus):
    """`run_several(devices, cases)` of tests/conftest.py, on as many pretended GPUs."""

    def run(devices: int, cases, *, config: str = "", **options):
        def launch(*arguments, timeout):
            file = config or ("multi_gpu" if devices > 1 else "single_gpu")
            done = gpus.start(file, *arguments, devices=devices).finish(timeout)
            assert "no kernel" not in done.stderr, done.stderr
            return done

        return run_several(devices, cases, launch=launch, **options)

    return run
