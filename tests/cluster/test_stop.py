"""A container that is stopped saves: its first process is the image's, or the launcher of a pod."""

import json
import signal

import psutil
import pytest

from tests.harness.launching import Launcher
from tests.harness.machines import Watched, require_namespaces

FIRST = "cluster/docker/first.sh"
WORDS = (
    "--image_size 16 --global_batch_size 24 --workers 1 --tracker none --max_steps 100000 "
    "--eval_every 100000 --checkpoint_every 100000 --log_every 1"
).split()
# How the container is started: its command, its exit code, and the cause that the run names.
STARTS = {
    "image": ([FIRST, "accelerate", "launch"], "cpu", 143, "the end of its launcher"),
    "pod": (["bash", "-c", 'exec accelerate launch "$@"', "bash"], "multi_cpu", 75, "SIGTERM"),
}


@pytest.mark.parametrize("start", ["image", pytest.param("pod", marks=pytest.mark.long)])
def test_a_stopped_container_has_saved(start, launch, tmp_path) -> None:
    """SIGTERM goes to process 1 alone, in a process namespace of its own, as `docker stop` and
    Kubernetes send it.
    """
    require_namespaces(tmp_path)
    command, config, code, cause = STARTS[start]
    inside = Launcher(launch.home, ["unshare", "--fork", "--pid", "--mount-proc", "--kill-child"])
    argv = ["--config_file", f"accelerate_configs/{config}.yaml", "recipes/cls.py"] + WORDS
    started = inside.start_command(command + argv + ["--output_dir", tmp_path, "--name", "run"])
    run = Watched(tmp_path / "run", [started])
    run.until(lambda: run.step() >= 4, "it trains")
    [first] = psutil.Process(started.process.pid).children()
    first.send_signal(signal.SIGTERM)
    done = started.finish()
    assert done.returncode == code and "Traceback" not in done.stderr, done
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["status"], status["cause"]) == ("resumable", cause)
    assert (tmp_path / f"run/checkpoints/step_{status['step']:08d}").is_dir()
