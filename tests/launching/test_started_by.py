"""The real recipe gives the same bits under every launcher, ends with its exit code, and resumes
under another launcher.
"""

import json
import os
import tempfile
from pathlib import Path

import pytest

from tests.harness.debian import require_package
from tests.harness.interrupted import Interrupted
from tests.harness.launching import ROOT, Launcher, Started, add_small_defaults, find_free_port
from tests.harness.outcomes import Outcome

CLS = "recipes/cls.py"
LENGTH = (
    "--max_steps 6 --log_every 1 --eval_every 6 --global_batch_size 32 --tracker none"
).split()
# With the default data workers.
NOTEBOOK = """
import os, sys
sys.path.insert(0, os.getcwd())
from accelerate import notebook_launcher
from recipes import cls
notebook_launcher(cls.main, num_processes=2)
"""


class Mpi(Launcher):
    """mpirun of Open MPI or MPICH; `before` is the command up to the number of processes."""

    def __call__(self, processes: int, argv: list, env=None) -> Started:
        mpirun = Launcher(self.home, self.before + ["-n", str(processes)])
        # Open MPI's starts share a session folder by default: one that ends removes it while
        # another makes it.
        session = {"OMPI_MCA_orte_tmpdir_base": tempfile.mkdtemp(dir=self.home)}
        return mpirun.start_python(argv, env=session | (env or {}))


@pytest.fixture(scope="module")
def mpi(tmp_path_factory) -> dict[str, Mpi]:
    require_package("openmpi-bin")
    require_package("mpich")
    home = tmp_path_factory.mktemp("mpi")
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return {
        "Open MPI": Mpi(home, ["mpirun.openmpi"] + as_root + ["--oversubscribe"]),
        "MPICH": Mpi(home, ["mpirun.mpich"]),
    }


def build_argv(folder: Path, flags: str = "") -> list:
    run = ["--output_dir", folder.parent, "--name", folder.name]
    return [CLS] + add_small_defaults(LENGTH + run + flags.split())


def read_result(folder: Path) -> tuple[list[float], bytes]:
    """The losses and the last checkpoint's model."""
    run = Outcome(folder=folder)
    return run.column("train/loss").tolist(), (run.checkpoint / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def accelerated(launch, tmp_path_factory) -> tuple[list[float], bytes]:
    """What accelerate launch gives."""
    folder = tmp_path_factory.mktemp("accelerated") / "run"
    done = launch("multi_cpu", build_argv(folder))
    assert "fp32, started by accelerate launch\n" in done.stdout, done.stderr
    return read_result(folder)


def start(name: str, request, folder: Path) -> list[Started]:
    """Start two processes by the launcher of this name; torchrun and exported variables are shown no GPU."""
    argv = build_argv(folder)
    if name in ("Open MPI", "MPICH"):
        return [request.getfixturevalue("mpi")[name](2, argv)]
    python = request.getfixturevalue("launch").start_python
    if name == "torchrun":
        pet = {
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": "2",
            "PET_RDZV_BACKEND": "machines",
            "CUDA_VISIBLE_DEVICES": "",
        }
        return [python(["-m", "torch.distributed.run"] + argv, env=pet)]
    if name == "notebook_launcher":
        script = folder.with_suffix(".py")
        script.write_text(NOTEBOOK)
        return [python([script] + argv[1:], env={"ACCELERATE_USE_CPU": "1"})]
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return [python(argv, env=world | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]


@pytest.mark.parametrize(
    "names",
    [("Open MPI", "MPICH"), ("torchrun", "exported variables"), ("notebook_launcher",)],
    ids=", ".join,
)
def test_a_launcher_gives_the_bits_of_accelerate_launch(
    names, accelerated, request, tmp_path
) -> None:
    """Two jobs run at a time, and don't meet each other. Those that get no GPU say what they use."""
    jobs = {name: start(name, request, tmp_path / name) for name in names}
    for name, started in jobs.items():
        done = [each.finish(180) for each in started]
        assert [each.returncode for each in done] == [0] * len(done), f"{name}: {done}"
        text = "".join(each.stdout for each in done)
        assert f"2 processes on 1 node, cpu (gloo), fp32, started by {name}\n" in text, text
        is_told = "this machine shows no GPU: the run trains on the CPU\n" in text
        assert is_told == ("torchrun" in names), text
        assert len(accelerated[0]) == 6 and read_result(tmp_path / name) == accelerated, name


def test_a_refusal_under_mpirun_is_one_line(mpi, tmp_path) -> None:
    done = mpi["MPICH"](2, build_argv(tmp_path / "x", "--lr x")).finish()
    [line] = [line for line in done.stderr.splitlines() if line.startswith("cls.py: ")]
    assert done.returncode == 2 and "--lr x: must be a number" in line
    assert not (tmp_path / "x").exists()


def test_a_run_under_mpirun_resumes_under_other_launchers(mpi, forks, tmp_path) -> None:
    """It has stopped on request, and was killed."""
    flags = (
        "--max_steps 60 --checkpoint_every 20 --eval_every 60 --workers 1 "
        "--batch_norm group --norm_batch_size 4"
    )
    folder = tmp_path / "interrupted"

    def start(name: str) -> Interrupted:
        return Interrupted(mpi[name](2, build_argv(folder, flags)), folder)

    assert start("Open MPI").at_step(10).interrupt("USR1 launcher").gone() == 75
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["cause"]) == ("resumable", "SIGUSR1")
    assert start("MPICH").at_step(30).interrupt("KILL rank 1").gone() != 0
    for path in (folder, tmp_path / "whole"):
        ends = [rank.end() for rank in forks.start_ranks(2, build_argv(path, flags)[1:])]
        assert [end.code for end in ends] == [0, 0], ends
        assert ("resuming from step" in ends[0].stdout) == (path == folder)
    assert read_result(folder)[1] == read_result(tmp_path / "whole")[1]


@pytest.mark.long
def test_the_configurations_of_vs_code_run_under_its_debugger(launch, tmp_path) -> None:
    """As VS Code runs them: under debugpy, which follows the processes of the launcher."""
    pytest.importorskip("debugpy")
    runs = json.loads((ROOT / ".vscode" / "launch.json").read_text())["configurations"]
    started = []
    for number, run in enumerate(runs):
        target = ["-m", run["module"]] if "module" in run else [run["program"]]
        debugpy = ["-m", "debugpy", "--listen", f"127.0.0.1:{find_free_port()}"]
        argv = debugpy + [arg.replace("${file}", CLS) for arg in target + run["args"]]
        argv += LENGTH + ["--output_dir", tmp_path, "--name", f"vs{number}"]
        started.append(launch.start_python(argv))
    done = [each.finish(240) for each in started]
    assert [each.returncode for each in done] == [0, 0], done
    assert (
        "1 process, cpu" in done[0].stdout and "2 processes on 1 node, cpu (gloo)" in done[1].stdout
    )
