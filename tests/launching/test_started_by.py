"""The real recipe gives the same bits under every launcher, ends with its exit code, and resumes under another launcher."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from tests.harness.debian import require_package
from tests.harness.interrupted import Interrupted
from tests.harness.launching import ROOT, Launcher, Started, free_port, small

CLS = "recipes/cls.py"
LENGTH = ("--max_steps", 6, "--log_every", 1, "--eval_every", 6, "--global_batch_size", 32, "--tracker", "none")
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

    def __call__(self, processes: int, *words: object, env=None) -> Started:
        mpirun = Launcher(self.home, [*self.before, "-n", str(processes)])
        # Open MPI's starts share a session folder by default: one that ends removes it while another makes it.
        session = {"OMPI_MCA_orte_tmpdir_base": tempfile.mkdtemp(dir=self.home)}
        return mpirun.start_python(*words, env=session | (env or {}))


@pytest.fixture(scope="module")
def mpi(tmp_path_factory) -> dict[str, Mpi]:
    require_package("openmpi-bin")
    require_package("mpich")
    home = tmp_path_factory.mktemp("mpi")
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return {
        "Open MPI": Mpi(home, ["mpirun.openmpi", *as_root, "--oversubscribe"]),
        "MPICH": Mpi(home, ["mpirun.mpich"]),
    }


def words_of(folder: Path, *more: object) -> list[object]:
    return small([*LENGTH, "--output_dir", folder.parent, "--name", folder.name, *more])


def result(folder: Path) -> tuple[list[float], bytes]:
    """The losses and the last checkpoint's model."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = max((folder / "checkpoints").glob("step_*")) / "model.safetensors"
    return [row["train/loss"] for row in rows if "train/loss" in row], weights.read_bytes()


def test_every_launcher_gives_the_same_bits_and_a_refusal_is_one_line(launch, mpi, tmp_path) -> None:
    """Two jobs run at a time, and don't meet each other. Those that get no GPU say what they use."""

    def recipe(name: str) -> list[object]:
        return [CLS, *words_of(tmp_path / name)]

    pet = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_RDZV_BACKEND": "machines", "CUDA_VISIBLE_DEVICES": ""}
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ""}
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    notebook = [script, *recipe("notebook_launcher")[1:]]

    def exported() -> list[Started]:
        ranks = [{**world, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
        return [launch.start_python(*recipe("exported variables"), env=rank) for rank in ranks]

    done = launch("multi_cpu", *recipe("accelerated"))
    assert "fp32, started by accelerate launch\n" in done.stdout, done.stderr
    accelerated = result(tmp_path / "accelerated")
    torchrun = ["-m", "torch.distributed.run"]
    pairs = [
        {name: lambda name=name: [mpi[name](2, *recipe(name))] for name in ("Open MPI", "MPICH")},
        {
            "torchrun": lambda: [launch.start_python(*torchrun, *recipe("torchrun"), env=pet)],
            "exported variables": exported,
        },
        {"notebook_launcher": lambda: [launch.start_python(*notebook, env={"ACCELERATE_USE_CPU": "1"})]},
    ]
    refused = mpi["MPICH"](2, CLS, *words_of(tmp_path / "x", "--lr", "x"))
    for pair in pairs:
        for name, launcher in {name: start() for name, start in pair.items()}.items():
            done = [each.finish(180) for each in launcher]
            assert [each.returncode for each in done] == [0] * len(done), f"{name}: {done}"
            text = "".join(each.stdout for each in done)
            assert f"2 processes on 1 node, cpu (gloo), fp32, started by {name}\n" in text, text
            is_said = "this machine shows no GPU: the run trains on the CPU\n" in text
            assert is_said == (name in ("torchrun", "exported variables")), text
            assert len(result(tmp_path / name)[0]) == 6 and result(tmp_path / name) == accelerated, name

    done = refused.finish()
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("cls.py: "))
    assert done.returncode == 2 and "--lr x: must be a number" in said and not (tmp_path / "x").exists()


def test_a_run_under_mpirun_stops_on_request_survives_a_kill_and_resumes_under_other_launchers(
    mpi, forks, tmp_path
) -> None:
    steps = ("--max_steps", 60, "--checkpoint_every", 20, "--batch_norm", "group", "--norm_batch_size", 4)
    steps = (*steps, "--eval_every", 60, "--workers", 1)
    folder = tmp_path / "interrupted"

    def start(name: str) -> Interrupted:
        return Interrupted(mpi[name](2, CLS, *words_of(folder, *steps)), folder)

    assert start("Open MPI").at_step(10).interrupt("USR1 launcher").gone() == 75
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["cause"]) == ("resumable", "SIGUSR1")
    assert start("MPICH").at_step(30).interrupt("KILL rank 1").gone() != 0
    for path in (folder, tmp_path / "whole"):
        ends = [rank.end() for rank in forks.start_ranks(2, *words_of(path, *steps))]
        assert [end.code for end in ends] == [0, 0], ends
        assert ("resuming from step" in ends[0].stdout) == (path == folder)
    assert result(folder)[1] == result(tmp_path / "whole")[1]


@pytest.mark.long
def test_the_configurations_of_vs_code_run_under_its_debugger(launch, tmp_path) -> None:
    """As VS Code runs them: under debugpy, which follows the processes of the launcher."""
    pytest.importorskip("debugpy")
    runs = json.loads((ROOT / ".vscode" / "launch.json").read_text())["configurations"]
    started = []
    for number, run in enumerate(runs):
        target = ["-m", run["module"]] if "module" in run else [run["program"]]
        words = [word.replace("${file}", CLS) for word in [*target, *run["args"]]]
        more = [*LENGTH, "--output_dir", tmp_path, "--name", f"vs{number}"]
        started.append(launch.start_python("-m", "debugpy", "--listen", f"127.0.0.1:{free_port()}", *words, *more))
    done = [each.finish(240) for each in started]
    assert [each.returncode for each in done] == [0, 0], done
    assert "1 process, cpu" in done[0].stdout and "2 processes on 1 node, cpu (gloo)" in done[1].stdout
