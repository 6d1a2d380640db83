"""cluster/skypilot/train.yaml has the keys of a task, and its commands train on two machines and resume."""

import re
import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.two_machines import WORDS, assert_same_losses
from tests.harness.launching import ROOT, Started
from tests.harness.machines import Node, Watched
from tests.harness.paced import PACED

FILE = ROOT / "cluster/skypilot/train.yaml"


def test_the_task_has_what_managed_jobs_need():
    """Of the keys that this test knows, without SkyPilot."""
    task = yaml.safe_load(FILE.read_text())
    assert task.keys() == {"name", "num_nodes", "resources", "workdir", "volumes", "envs", "setup", "run"}
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert [path for path in task["volumes"] if f"--output_dir {path} " in task["run"]]
    assert set(re.findall(r"\$\(?\(?([A-Z_]+)", task["run"])) >= {"CONFIG", "FLAGS", "SKYPILOT_NODE_IPS"}


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
