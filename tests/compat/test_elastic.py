"""An elastic script of Horovod continues from its last commit when a process is killed, also with another number of them."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.harness.launching import Launcher

SCRIPT = Path(__file__).with_name("elastic_script.py")
SAMPLES, EPOCHS, STEPS = 50, 3, 21  # 7 steps of at most 8 samples in an epoch


@pytest.fixture(scope="module")
def undisturbed(launch: Launcher, tmp_path_factory) -> list[torch.Tensor]:
    """The weights of one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = launch.start_python(SCRIPT, folder, env={"HOROVOD_ELASTIC_COMMITS": str(folder / "commits")}).finish()
    assert done.returncode == 0, done.stderr
    assert not (folder / "commits").exists() or not [*(folder / "commits").iterdir()]  # it has ended, so none is left
    return weights(folder)


def weights(folder: Path) -> list[torch.Tensor]:
    assert (folder / "steps").read_text() == str(STEPS)
    return torch.load(folder / "weights.pt")


def samples(folder: Path) -> Counter:
    """How often each (epoch, sample) was in a committed step."""
    rows = [json.loads(line) for path in folder.glob("samples *") for line in path.read_text().splitlines()]
    return Counter((epoch, number) for epoch, _, number in rows)


def test_killed_rank_changes_nothing(launch: Launcher, undisturbed, tmp_path) -> None:
    """Rank 1 of 2 is killed in mid-epoch, then rank 0: the launcher replaces both, and the weights are the undisturbed ones."""
    done = launch(
        "multi_cpu",
        SCRIPT,
        tmp_path,
        "1:4",
        "0:11",
        flags=["--max_restarts", 3],
        env={"HOROVOD_ELASTIC_COMMITS": str(tmp_path / "commits")},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("killed*")} == {"killed 1 1:4", "killed 0 0:11"}
    assert "resuming from commit 1 in" in done.stderr and "resuming from commit 4 in" in done.stderr
    torch.testing.assert_close(weights(tmp_path), undisturbed, rtol=0, atol=1e-12)
    seen = samples(tmp_path)
    assert set(seen) == {(epoch, number) for epoch in range(EPOCHS) for number in range(SAMPLES)}
    assert set(seen.values()) == {1}  # a step that was lost was not committed, and no sample is repeated: 50 is even


@pytest.mark.long
def test_other_number_of_processes_continues(launch: Launcher, undisturbed, tmp_path) -> None:
    """Two processes die, one continues and dies, two end: same weights, each sample once per epoch."""
    env = {"HOROVOD_ELASTIC_COMMITS": str(tmp_path / "commits")}
    kills = ("-1:5", "0:13")
    first = launch("multi_cpu", SCRIPT, tmp_path, *kills, env=env, timeout=200)
    assert first.returncode != 0 and len([*tmp_path.glob("killed*")]) > 0
    second = launch.start_python(SCRIPT, tmp_path, *kills, env=env).finish()
    assert second.returncode == -9 and "resuming from commit 1 in" in second.stderr
    third = launch("multi_cpu", SCRIPT, tmp_path, *kills, env=env, timeout=200)
    assert third.returncode == 0, third.stderr
    torch.testing.assert_close(weights(tmp_path), undisturbed, rtol=0, atol=1e-12)
    assert set(samples(tmp_path).values()) == {1}
