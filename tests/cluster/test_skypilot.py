"""cluster/skypilot/train.yaml is a task that SkyPilot reads, and its commands train on two machines and resume."""

import json
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from tests.cluster.two_machines import WORDS, assert_same_losses
from tests.harness.launching import ROOT, Started
from tests.harness.machines import Node, Watched
from tests.harness.paced import PACED

FILE = ROOT / "cluster/skypilot/train.yaml"
SKYPILOT = "skypilot==0.14.1"  # 459 MB with what it needs, so it gets an environment of its own
READ = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
[resources] = task.resources
print(json.dumps([task.num_nodes, resources.accelerators, resources.job_recovery, task.volumes, task.envs, task.run]))
"""


def test_the_task_has_what_managed_jobs_need():
    """Of the keys that this test knows, without SkyPilot: the next test asks SkyPilot itself."""
    task = yaml.safe_load(FILE.read_text())
    assert task.keys() == {"name", "num_nodes", "resources", "workdir", "volumes", "envs", "setup", "run"}
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert [path for path in task["volumes"] if f"--output_dir {path} " in task["run"]]
    assert set(re.findall(r"\$\(?\(?([A-Z_]+)", task["run"])) >= {"CONFIG", "FLAGS", "SKYPILOT_NODE_IPS"}


@pytest.mark.long
def test_skypilot_reads_the_task(tmp_path):
    venv.create(tmp_path / "sky", with_pip=True)
    python = tmp_path / "sky/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", SKYPILOT]
    if (done := subprocess.run(install, capture_output=True, text=True)).returncode:
        pytest.skip(f"{SKYPILOT} can't be installed: {done.stderr[-200:]}")
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words = [python, "-c", READ, FILE]
    read = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    nodes, accelerators, recovery, volumes, envs, run = json.loads(read.splitlines()[-1])
    assert (nodes, accelerators) == (2, {"H100": 8})
    assert recovery["recover_on_exit_codes"] == [75] and recovery["max_restarts_on_errors"] == 3
    assert volumes == {"/runs": "runs"}
    task = yaml.safe_load(FILE.read_text())
    assert (envs, run) == (task["envs"], task["run"])


def start(machines: list[Node], folder: Path) -> list[Started]:
    """The `run` section on each machine, with the variables that SkyPilot sets."""
    task = yaml.safe_load(FILE.read_text())
    text = task["run"].replace("/runs", str(folder)).replace("recipes/cls.py", str(folder / "cls_paced.py"))
    text = text.replace(". .venv/bin/activate", f". {Path(sys.executable).parent}/activate")
    sky = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_IPS": "\n".join(machine.address for machine in machines),
    }
    assert task["envs"].keys() == {"CONFIG", "FLAGS"}
    envs = {"CONFIG": "2node_cpu", "FLAGS": " ".join(map(str, WORDS))}
    return [
        machine.start_command("bash", "-c", text, env=sky | envs | {"SKYPILOT_NODE_RANK": str(rank)})
        for rank, machine in enumerate(machines)
    ]


@pytest.mark.long
def test_its_commands_train_on_two_machines_and_resume(nodes, alone, tmp_path):
    """The machines are taken away in the middle; on new ones, of other addresses, the run ends with one process's losses."""
    (tmp_path / "cls_paced.py").write_text(PACED)
    machines = nodes(2)
    run = Watched(tmp_path / "train", start(machines, tmp_path))
    run.until(lambda: run.step() >= 2, "both train")
    machines[1].kill()  # the second first: SkyPilot then ends the first, too
    run.started[0].process.send_signal(signal.SIGTERM)
    for each in run.started:
        each.finish()
    done = [each.finish() for each in start(machines[::-1], tmp_path)]
    assert [each.returncode for each in done] == [0, 0], done
    assert "2 processes on 2 nodes" in done[0].stdout
    assert_same_losses(tmp_path / "train", alone)
