"""Fixtures that run recipes on this machine's GPUs, or on pretended ones where there are none."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from tests.harness.drawings import draw_scenes, draw_stripes
from tests.harness.forked import Forks
from tests.harness.launching import ROOT, Launcher, Started
from tests.pretended_gpu.build import build, get_skip_reason
from tests.pretended_gpu.run import run_in_fork


class Gpus:
    """Starts scripts on GPUs: launched, or as forks of a process that has imported the recipes."""

    def __init__(self, launch: Launcher, real: int, environment: dict[str, str], scratch: Path):
        self.launch = launch
        self.real = real
        self.environment = environment
        self.forks = functools.cache(lambda: Forks(scratch, environment))

    def at_most(self, devices: int) -> int:
        """That many, or as many as this machine really has."""
        return min(devices, self.real) if self.real else devices

    def start(
        self, config: str, argv: list, *, devices: int = 1, env: Mapping[str, str] | None = None
    ) -> Started:
        """Starts a script with `accelerate launch` on a machine with so many GPUs, a process on each."""
        flags = []
        if self.real:  # a file counts those that are pretended
            flags = ["--num_processes", devices]
        else:
            argv = [ROOT / "tests/pretended_gpu/run.py"] + argv
        env = self.environment | self._get_variables(devices, 16) | (env or {})
        return self.launch.start(config, argv, flags=flags, env=env)

    def run_main(
        self,
        devices: int,
        main: Callable[[], None],
        env: Mapping[str, str | None] | None = None,
        *,
        gib: object = 16,
        precision: str = "",
        timeout: float = 300,
    ) -> CompletedProcess[str]:
        """Runs `main` to its end in forks, one per GPU of `gib` GiB ("16,0.35": the first; all others)."""
        variables = self._get_variables(devices, gib)
        variables |= {"ACCELERATE_MIXED_PRECISION": precision if precision else "no"}
        if env is not None:
            variables |= env
        variables |= {"CUDA_VISIBLE_DEVICES": None, "ACCELERATE_USE_CPU": None}
        run = functools.partial(run_in_fork, main)
        done = self.forks().run_main(devices, run, variables, timeout=timeout)
        assert "no kernel" not in done.stderr, done.stderr
        assert "in the pretended runtime" not in done.stderr, done.stderr
        return done

    def _get_variables(self, devices: int, gib: object) -> dict[str, str]:
        if self.at_most(devices) < devices:
            pytest.skip(f"needs {devices} GPUs")
        if not self.real:
            return {"PRETENDED_GPUS": str(devices), "PRETENDED_GIB": str(gib)}
        # Of a real GPU, only a part may be taken.
        min_gib = float(str(gib).split(",")[-1])
        share = min(1.0, min_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
        if min_gib >= 16:
            return {}
        return {"PYTORCH_ALLOC_CONF": f"per_process_memory_fraction:{share}"}


@pytest.fixture(scope="session")
def gpus(launch: Launcher, tmp_path_factory) -> Gpus:
    """`gpus.start("multi_gpu", ["recipes/cls.py", "--lr", 1], devices=2)` launches a recipe."""
    scratch = tmp_path_factory.mktemp("gpus")
    if torch.cuda.is_available():
        return Gpus(launch, torch.cuda.device_count(), {"PYTHONPATH": str(ROOT)}, scratch)
    reason = get_skip_reason()
    if reason:
        pytest.skip(reason)
    return Gpus(launch, 0, build(), scratch)


@pytest.fixture(autouse=True)
def _pretended(request: pytest.FixtureRequest) -> None:
    """Tests without the marker `gpu` are of pretended GPUs themselves."""
    if torch.cuda.is_available() and not request.node.get_closest_marker("gpu"):
        pytest.skip("there is a real GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A new folder with small data sets: cls/, det/."""
    folder = tmp_path_factory.mktemp("data")
    draw_stripes(folder / "cls" / "train", (6, 5, 4))
    draw_stripes(folder / "cls" / "val", (2, 2, 2), seed=1)
    (folder / "det").mkdir()
    draw_scenes(folder / "det")
    return folder


@pytest.fixture(scope="session")
def run_on_gpus(run_several, gpus: Gpus):
    """`run_several(devices, cases)` of tests/conftest.py, on as many GPUs."""

    def run(devices: int, cases, *, precision: str = "", gib: object = 16, **options):
        run_main = functools.partial(gpus.run_main, gib=gib, precision=precision)
        return run_several(devices, cases, run_main=run_main, **options)

    return run
