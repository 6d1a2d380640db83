"""An elastic script of Horovod continues from its last commit when a process is killed, also with
another number of them.
"""

import json
from collections import Counter
from pathlib import Path

import torch

from tests.harness.launching import Launcher

SCRIPT = Path(__file__).with_name("elastic_script.py")
SAMPLES = 50
EPOCHS = 3
STEPS = 21  # 7 steps of at most 8 samples in an epoch


def read_weights(folder: Path) -> list[torch.Tensor]:
    assert (folder / "steps").read_text() == str(STEPS)
    return torch.load(folder / "weights.pt")


def test_kills_and_another_number_of_processes_change_nothing(launch: Launcher, tmp_path) -> None:
    """Rank 1 of 2 is killed in mid-epoch, and the launcher replaces both. After rank 0's death one
    process continues.
    """
    alone = tmp_path / "alone"
    killed = tmp_path / "killed"
    alone.mkdir()
    killed.mkdir()
    undisturbed = launch.start_python(
        [SCRIPT, alone], env={"HOROVOD_ELASTIC_COMMITS": str(alone / "commits")}
    )
    env = {"HOROVOD_ELASTIC_COMMITS": str(killed / "commits")}
    kills = ["1:4", "0:11"]
    first = launch(
        "multi_cpu", [SCRIPT, killed] + kills, flags=["--max_restarts", 1], env=env, timeout=200
    )
    assert first.returncode != 0 and {path.name for path in killed.glob("killed*")} == {
        "killed 1:4",
        "killed 0:11",
    }
    assert "resuming from commit 1 in" in first.stderr
    second = launch.start_python([SCRIPT, killed] + kills, env=env).finish()
    assert second.returncode == 0 and "resuming from commit 4 in" in second.stderr
    done = undisturbed.finish()
    assert done.returncode == 0, done.stderr
    assert not (alone / "commits").exists()  # it has ended, so none is left
    torch.testing.assert_close(read_weights(killed), read_weights(alone), rtol=0, atol=1e-12)
    rows = [
        json.loads(line)
        for path in killed.glob("samples *")
        for line in path.read_text().splitlines()
    ]
    assert Counter(map(tuple, rows)) == {
        (epoch, number): 1 for epoch in range(EPOCHS) for number in range(SAMPLES)
    }
