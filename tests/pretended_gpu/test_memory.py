"""GPUs with too little memory: before the first step, later in the run, and on one of several."""

import re
import subprocess

import pytest
import torch

from tests.harness.drawings import draw_stripes
from tests.harness.outcomes import Outcome

IS_REAL = torch.cuda.is_available()
WORDS = "--tracker none --log_every 1 --eval_every 100".split()
SEGMENTS = """
from common.launching.launch import use_expandable_segments
environ = {}
use_expandable_segments(environ)
print(environ)
"""


def assert_predicted(run: Outcome, min_share: float = 0.9) -> tuple[float, float]:
    """The start table predicted the peak memory of a step with all states; both, in GiB."""
    predicted, room = map(
        float, re.search("memory +(.+) of (.+) GiB at the peak of a step", run.stdout).groups()
    )
    peak = run.column("perf/gpu_memory_gb")[0]  # before the evaluation
    assert min_share * predicted < peak < (1.02 if IS_REAL else 1.01) * predicted < room
    return predicted, peak


@pytest.fixture(scope="module")
def runs(run_on_gpus, tmp_path_factory) -> dict[str, Outcome]:
    """Runs on two GPUs, of which the second has little memory."""
    data = tmp_path_factory.mktemp("data")
    draw_stripes(data, (80, 30))
    argv = WORDS + ["--data", data, "--image_size", 64, "--max_micro_batch_size", 64]
    argv += ["--max_steps", 2]
    cases = {
        "global": argv + ["--batch_norm", "global", "--image_size", 128],
        "local": argv + ["--ema_decay", 0.9, "--mixup", 0.2, "--random_erasing", 0.5],
        # A frozen backbone keeps no activations, so that mixing and erasing take most of the
        # memory.
        "frozen": argv
        + "--freeze_stages all --mixup 0.2 --cutmix 0.2 --random_erasing 0.5".split(),
    }
    return run_on_gpus(2, cases, precision="fp16", gib="16,0.06")


@pytest.mark.gpu
@pytest.mark.parametrize("name, min_share", [("local", 0.9), ("frozen", 0.5)])
def test_training_takes_the_memory_that_was_foreseen(runs, name: str, min_share: float) -> None:
    assert_predicted(runs[name], min_share)


@pytest.mark.gpu
def test_a_micro_batch_without_room_on_one_gpu_shrinks_on_both(runs) -> None:
    assert (
        "micro-batches of 32 do not fit into memory: 64 = 2 processes x 2 " in runs["local"].stdout
    )
    assert " of 0.06 GiB at the peak of a step" in runs["local"].stdout


@pytest.mark.gpu
def test_a_micro_batch_that_can_not_shrink_is_refused_on_both(runs) -> None:
    """Neither waits for the other's statistics."""
    run = runs["global"]
    message = "the 32 samples that --batch_norm global needs at once do not fit into memory: take"
    assert run.outcome == "refused" and run.text.startswith(message)
    assert "; CUDA out of memory. Tried to allocate " in run.text


@pytest.mark.gpu
@pytest.mark.long
def test_a_detector_takes_the_memory_that_was_foreseen(run_on_gpus, scenes):
    argv = ["--data", scenes, "--global_batch_size", 8, "--max_micro_batch_size", 4] + WORDS
    cases = {"det": argv + ["--ema_decay", 0.9, "--max_steps", 2, "--clip", 1]}
    assert_predicted(run_on_gpus(1, cases, recipe="recipes/det.py")["det"])


def test_memory_grows_in_segments_where_driver_and_nvml_can(gpus, tmp_path):
    """Else canvases of varying sizes leave holes, and a detector runs out of memory."""
    subprocess.run(
        ["gcc", "-shared", "-x", "c", "/dev/null", "-o", tmp_path / "libnvidia-ml.so.1"], check=True
    )
    for more, message in (
        ({}, "{}"),
        ({"LD_LIBRARY_PATH": str(tmp_path)}, "{'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}"),
    ):
        done = gpus.launch.start_python(["-c", SEGMENTS], env=gpus.environment | more).finish()
        assert done.stdout == f"{message}\n", done
