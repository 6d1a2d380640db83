"""Fixtures that run recipes on this machine's GPUs, or on pretended ones where there are none."""

from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from tests.harness.launching import ROOT, Launcher, Started
from tests.pretended_gpu.build import build, why_not


class Gpus:
    """Starts scripts on machines with GPUs."""

    def __init__(self, launch: Launcher, real: int, environment: dict[str, str]):
        self.launch, self.real, self.environment = launch, real, environment

    def at_most(self, devices: int) -> int:
        """That many, or as many as this machine really has."""
        return min(devices, self.real or devices)

    def start(
        self, config: str, script: str | Path, *words: object, devices: int = 1, gib: object = 16, env=None, **options
    ) -> Started:
        """Starts `script` with `accelerate launch` on `devices` GPUs of `gib` GiB each ("16,0.35": the first; all others)."""
        if self.at_most(devices) < devices:
            pytest.skip(f"needs {devices} GPUs")
        flags = [*options.pop("flags", ()), *(("--num_processes", devices) if devices > 1 else ())]
        least = float(str(gib).split(",")[-1])
        if not self.real:
            script, words = ROOT / "tests/pretended_gpu/run.py", (script, *words)
            own = {"PRETENDED_GPUS": str(devices), "PRETENDED_GIB": str(gib)}
        else:  # of a real GPU, only a part may be taken
            share = min(1.0, least * 2**30 / torch.cuda.get_device_properties(0).total_memory)
            own = {"PYTORCH_ALLOC_CONF": f"per_process_memory_fraction:{share}"} if least < 16 else {}
        return self.launch.start(
            config, script, *words, flags=flags, env=self.environment | own | (env or {}), **options
        )

    def __call__(self, *arguments: object, timeout: float = 300, **options) -> str:
        """Starts a script, waits for its end and expects success; returns its output."""
        done = self.start(*arguments, **options).finish(timeout)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert "no kernel" not in done.stderr and "in the pretended runtime" not in done.stderr, done.stderr
        assert "could not be drawn" not in done.stdout, done.stdout
        return done.stdout

    def python(self, text: str, folder: Path) -> CompletedProcess[str]:
        """Runs the program `text` in one process on one pretended GPU; writes it to `folder`."""
        script = folder / "script.py"
        script.write_text(text)
        return self.launch.start_python(ROOT / "tests/pretended_gpu/run.py", script, env=self.environment).finish()


@pytest.fixture(scope="session")
def gpus(launch: Launcher) -> Gpus:
    """`gpus("multi_gpu", "recipes/cls.py", *words, devices=2)` runs a recipe on GPUs and expects success."""
    if torch.cuda.is_available():
        return Gpus(launch, torch.cuda.device_count(), {"PYTHONPATH": str(ROOT)})
    if reason := why_not():
        pytest.skip(reason)
    return Gpus(launch, 0, build())


@pytest.fixture(autouse=True)
def _pretended(request: pytest.FixtureRequest) -> None:
    """Tests without the marker `gpu` are of pretended GPUs themselves."""
    if torch.cuda.is_available() and not request.node.get_closest_marker("gpu"):
        pytest.skip("there is a real GPU")


@pytest.fixture(scope="session")
def run_on_gpus(run_several, gpus: Gpus):
    """`run_several(devices, cases)` of tests/conftest.py, on as many GPUs; `script` takes the place of several.py."""

    def run(devices: int, cases, *, precision: str = "", gib: object = 16, script: tuple = (), **options):
        def launch(several, *arguments, timeout):
            file = ("multi_gpu" if devices > 1 else "single_gpu") + precision
            done = gpus.start(file, *(script or (several,)), *arguments, devices=devices, gib=gib).finish(timeout)
            assert "no kernel" not in done.stderr, done.stderr
            return done

        return run_several(devices, cases, launch=launch, **options)

    return run
