"""A sweep reads the file of `wandb sweep`, stops bad trials, and goes on after a kill as if there had been none."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import optuna
import psutil
import pytest
import yaml
from wandb.sdk.launch.sweeps import utils as wandb_sweeps

from common.errors import Refused
from tests.harness.launching import ROOT, inherited
from tests.harness.runs import read as read_json
from tests.harness.runs import refusal, rows_of
from tests.harness.waiting import Limit
from tools.sweep import command_of, evaluations, main, read

# Stands for a recipe: evaluates at steps 1 to 6 with its rate as result, saves each step, and waits at step 3 if told to.
RECIPE = """
import json, os, signal, sys, time
from pathlib import Path
flags = dict(word.removeprefix("--").split("=") for word in sys.argv[1:] if "=" in word)
words = dict(zip(sys.argv[1:], sys.argv[2:]))
folder = Path(words["--output_dir"]) / words["--name"]
folder.mkdir(parents=True, exist_ok=True)
def status(what, cause=""):
    (folder / "status.json").write_text(json.dumps({"status": what, "step": step, "cause": cause, "time": time.time()}))
def leave(*_):
    status("resumable"), sys.exit(75)
signal.signal(signal.SIGTERM, leave)
rows = folder / "metrics.jsonl"
step, rate = len(rows.read_text().splitlines()) if rows.exists() else 0, float(flags["lr"])
with (folder / "starts").open("a") as starts:
    starts.write(f"{step} {words['--group']}\\n")
if "--wrong" in sys.argv:
    sys.exit("--wrong: no such flag")
status("running")
while step < 6:
    step += 1
    if words["--name"].endswith("003"):
        status("failed", "the loss is not finite"), sys.exit(2)
    with rows.open("a") as file:
        file.write(json.dumps({"step": step, "eval/top1": 1 - rate if step > 1 else None}) + "\\n")
    while step == 3 and os.path.exists(words["--hold"]) and words["--name"].endswith("001"):
        time.sleep(0.01)
status("finished")
"""


FILE = {
    "method": "bayes",
    "metric": {"name": "eval/top1", "goal": "maximize"},
    "parameters": {
        "lr": {"distribution": "uniform", "min": 0.0, "max": 1.0},
        "depth": {"min": 1, "max": 9},
        "opt": {"values": ["sgd", "adamw"]},
    },
    "command": ["${env}", "${interpreter}", "${program}", "${args}"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with mine.yaml, which searches for flags of the stand-in."""
    folder = tmp_path_factory.mktemp("sweeps")
    (folder / "recipe.py").write_text(RECIPE)
    write(folder / "mine.yaml", FILE | {"program": str(folder / "recipe.py")})
    return folder


def write(file: Path, content: dict) -> None:
    file.write_text(yaml.safe_dump(content, sort_keys=False))


def words_of(folder: Path, name: str, *words: object) -> list[str]:
    own = ["--output_dir", folder / name, "--unpruned", 2, "--sweep_seed", 1, "--hold", folder / "hold"]
    return [*map(str, [folder / "mine.yaml", *own, *words])]


def start(words: list[str]) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "tools.sweep", *words], cwd=ROOT, env=inherited(), **pipes)


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[str]:
    """What a sweep of six trials prints that nothing disturbs."""
    ended = start(words_of(folder, "whole", "--trials", 6))
    printed, errors = ended.communicate(timeout=300)
    assert (ended.returncode, errors) == (0, "")
    return printed.splitlines()


def trials(folder: Path, name: str) -> list[tuple]:
    """What the study in the folder has of each trial."""
    study = optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/{name}.db")
    return [
        (trial.state.name, trial.value, trial.params, {key: str(of) for key, of in trial.intermediate_values.items()})
        for trial in study.trials
    ]


def wait_for(what, process: subprocess.Popen) -> None:
    limit = Limit(120)
    while not what():
        assert limit.left() > 0 and process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize("signal", ["kill", "terminate"])
def test_a_killed_sweep_goes_on_as_if_it_had_not_been(folder: Path, whole: list[str], signal: str) -> None:
    (folder / "hold").touch()
    words = words_of(folder, signal, "--trials", 6)
    killed, rows = start(words), folder / signal / "mine-001/metrics.jsonl"
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") == 3, killed)
    (child,) = psutil.Process(killed.pid).children()
    getattr(killed, signal)()
    assert killed.wait(60) == {"kill": -9, "terminate": 75}[signal]
    psutil.wait_procs([child], 60)
    assert read_json(rows.parent / "status.json")["status"] == "resumable", "its run was asked to save"
    (folder / "hold").unlink()
    resumed = start(words)
    again, errors = resumed.communicate(timeout=300)
    assert (resumed.returncode, errors) == (0, "")
    assert (rows.parent / "starts").read_text() == "0 mine\n3 mine\n", "the unfinished run continues"
    expected = trials(folder / "whole", "mine")
    assert trials(folder / signal, "mine") == expected and len(expected) == 6
    assert again.splitlines()[:-1] == whole[2:-1], "the same words, but for the trial before and the study's file"

    states = [state for state, *_ in expected]
    assert {"COMPLETE", "PRUNED"} <= {*states} and states[3] == "FAIL", "the seed has one of each"
    for state, value, params, reported in expected:
        if state == "COMPLETE":
            assert value == 1 - params["lr"] and [*reported] == [2, 3, 4, 5, 6]
    best = min((params for state, _, params, _ in expected if state == "COMPLETE"), key=lambda params: params["lr"])
    assert whole[-2].startswith("best: mine-00") and f"  eval/top1 {1 - best['lr']:.4f}  " in whole[-2]
    assert whole[-2].endswith(f"--lr={best['lr']} --depth={best['depth']} --opt={best['opt']}")
    assert "mine-003: failed: the loss is not finite" in whole and any(": stopped at step" in line for line in whole)
    command = [sys.executable, "-c", "from optuna.cli import main; main()", *shlex.split(whole[-1])[3:]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert whole[-1].startswith("all trials: optuna trials ") and done.stdout.count("COMPLETE") >= 2


def test_what_cannot_be_searched_is_refused_in_one_line(folder: Path, tmp_path: Path, monkeypatch) -> None:
    words = words_of(folder, "wrong")
    wrong = start([*words, "--wrong", "1"])
    assert wrong.communicate(timeout=120)[1] == "mine-000 did not start: --wrong: no such flag\n"
    assert wrong.returncode == 2
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert "was begun with another flags of the recipe" in refusal(main, *words, "--trials", 1)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert refusal(main, "a.yaml") == "tools.sweep needs Optuna: pip install optuna"
    monkeypatch.undo()

    file, rows = tmp_path / "mine.yaml", tmp_path / "metrics.jsonl"
    for change, told in (
        ({"method": "magic"}, "method magic: must be one of random, bayes"),
        ({"command": ["python"]}, "command must have ${args}"),
        ({"parameters": {"lr": {"distribution": "beta"}}}, 'parameter lr is {"distribution": "beta"}; give value'),
    ):
        write(file, FILE | {"program": "recipe.py"} | change)
        with pytest.raises(Refused, match=re.escape(told)):
            read(file)
    rows.write_text('{"step": 1, "eval/ema_top1": 0.1, "eval/top1": 0.9}\n')
    assert [*evaluations(rows, "eval/ema_top1")] == [(1, 0.1)]
    with pytest.raises(Refused, match="the average is exported; search for eval/ema_top1"):
        [*evaluations(rows, "eval/top1")]


PRESETS = sorted((ROOT / "recipes" / "presets").glob("sweep_*.yaml"))


def rendered(path: Path, values: dict) -> list[str]:
    """The command of a trial as the agent of `wandb sweep` makes it."""
    content = yaml.safe_load(path.read_text())
    parts = wandb_sweeps.create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})
    parts |= {"env": ["/usr/bin/env"], "program": [content["program"]]}
    words = wandb_sweeps.create_sweep_command(content["command"])
    return [part for word in words for part in (parts[word[2:-1]] if word.startswith("${") else [word])]


def test_the_sweeps_of_the_presets_are_started_as_wandb_starts_them_and_find_their_metric(run_several) -> None:
    cases, files = {}, {path.stem: read(path) for path in PRESETS}
    for path in PRESETS:
        file = files[path.stem]
        values = {name: of.choices[0] if hasattr(of, "choices") else of.low for name, of in file["parameters"].items()}
        command = rendered(path, values)
        ours = command_of(file, values)
        assert ours[0] == sys.executable and ours[ours.index("launch") :] == command[command.index("launch") :]
        cases[path.stem] = [*command[command.index(file["program"]) :], "--max_steps", 1]
        assert "tools.sweep" in path.read_text() and "wandb sweep" in path.read_text()
    for name, ended in run_several(2, cases).items():
        (row,) = rows_of(ended.folder / "metrics.jsonl")
        assert ended.outcome == "ok" and files[name]["metric"]["name"] in row, ended
