"""GPUs with too little memory: before the first step, later in the run, and on one of several."""

import contextlib
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.harness.drawings import draw_stripes
from tests.harness.launching import ROOT
from tests.harness.outcomes import Outcome

IS_REAL = torch.cuda.is_available()
WORDS = ("--tracker", "none", "--log_every", 1, "--eval_every", 100)
STEPS = 6
# A recipe whose device is filled up before the fifth step, on the rank FULL, if its micro-batches have more than 8 samples.
# Each process notes child processes and open files at its start.
FILLED = """
import json, os, runpy, sys
import psutil, torch
from common.data import loader as loading
me = psutil.Process()
here = {"process": me.pid, "children": len(me.children()), "files": me.num_fds(), "rank": os.environ.get("RANK")}
with open(os.environ["STARTS"], "a") as file:
    file.write(json.dumps(here) + "\\n")
take, taken = loading.Prefetcher.__next__, []
def fill(feed):
    batch = take(feed)
    taken.append(batch.positions)
    if len(taken) == 7 and len(batch.positions) > 8 and os.environ.get("RANK", "0") == os.environ["FULL"]:
        torch.cuda.empty_cache()
        feed.others = torch.empty(torch.cuda.mem_get_info()[0] - 2**20, dtype=torch.uint8, device="cuda")
    return batch
loading.Prefetcher.__next__ = fill
sys.argv[0] = "recipes/cls.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""

# Feature maps of canvases of varying sizes, allocated in expandable segments and in fixed ones.
CANVASES = """
import json
import torch
from common.launching import launch

device, found = launch.start().device, []
settings = lambda: bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
for text in ("", "expandable_segments:False"):
    if text:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings(text)
    torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        height, width = (32 * torch.randint(8, 21, (2,), generator=generator)).tolist()
        held = [torch.empty(2, 64 << level, height >> level + 1, width >> level + 1, device=device)
                for level in range(4) for _ in range(5)]
        del held
    of = torch.cuda.memory_stats()
    found.append([settings(), of["reserved_bytes.all.peak"] / of["allocated_bytes.all.peak"]])
print("FOUND", json.dumps(found))
"""
# Functions of NVML that torch calls before it maps memory: no device is part of a fabric.
NVML = "".join(
    f"int nvml{name}() {{ return {code}; }}\n"
    for name, code in {
        "Init_v2": 0,
        "DeviceGetHandleByPciBusId_v2": 0,
        "DeviceGetGpuFabricInfoV": 0,
        "DeviceGetComputeRunningProcesses": 3,
        "DeviceGetNvLinkRemoteDeviceType": 3,
        "DeviceGetNvLinkRemotePciInfo_v2": 3,
        "SystemGetCudaDriverVersion_v2": 3,
    }.items()
)


def assert_predicted(run: Outcome) -> None:
    """Peak memory of training, with optimizer, gradients and moving average, is what the start table predicted."""
    predicted, room = map(float, re.search("memory +(.+) of (.+) GiB at the peak of a step", run.stdout).groups())
    peak = run.column("perf/gpu_memory_gb")[0]  # before the evaluation
    assert 0.9 * predicted < peak < (1.02 if IS_REAL else 1.01) * predicted < room


@pytest.mark.gpu
def test_a_micro_batch_that_one_of_two_gpus_has_no_room_for_is_made_smaller_on_both(run_on_gpus, tmp_path):
    """Neither waits for the other's statistics; one that can't shrink is refused; training takes the predicted memory."""
    draw_stripes(tmp_path / "data", (80, 30))
    words = ["--data", tmp_path / "data", "--image_size", 64, "--max_micro_batch_size", 64, *WORDS, "--max_steps", 2]
    cases = {
        "global": [*words, "--batch_norm", "global", "--image_size", 128],
        "local": [*words, "--ema_decay", 0.9, "--mixup", 0.2, "--random_erasing", 0.5],
    }
    done = run_on_gpus(2, cases, precision="_fp16", gib="16,0.06")
    assert done["global"].outcome == "refused"
    assert done["global"].text.startswith(
        "the 32 samples that --batch_norm global needs at once do not fit into memory: take"
    )
    assert "; CUDA out of memory. Tried to allocate " in done["global"].text
    assert "micro-batches of 32 do not fit into memory: 64 = 2 processes x 2 " in done["local"].stdout
    assert " of 0.06 GiB at the peak of a step" in done["local"].stdout
    assert_predicted(done["local"])


@pytest.mark.gpu
@pytest.mark.long
def test_a_detector_takes_the_memory_that_was_foreseen(run_on_gpus, scenes):
    words = ["--data", scenes, "--global_batch_size", 8, "--max_micro_batch_size", 4, *WORDS]
    cases = {"det": [*words, "--ema_decay", 0.9, "--max_steps", 2, "--clip", 1]}
    assert_predicted(run_on_gpus(1, cases, recipe="recipes/det.py")["det"])


def test_canvases_that_vary_leave_no_holes_in_memory(gpus, tmp_path):
    """torch's allocator reserves hardly more memory than it hands out."""
    if "cuMemCreate" not in (ROOT / "tests/pretended_gpu/runtime.c").read_text():
        pytest.skip("this runtime maps no memory")
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    (tmp_path / "canvases.py").write_text(CANVASES)
    printed = gpus("single_gpu", tmp_path / "canvases.py", env={"LD_LIBRARY_PATH": str(tmp_path)})
    [(grows, share), (still_grows, share_of_fixed)] = json.loads(re.search("^FOUND (.*)", printed, re.MULTILINE)[1])
    assert grows and not still_grows
    assert share < 1.1 < 1.3 < share_of_fixed


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_a_gpu_that_is_full_later_makes_the_same_run_in_smaller_micro_batches(gpus, launch, tmp_path, devices):
    """One process replaces itself, two are replaced by their launcher; nothing of the replaced ones is left."""
    script, starts = tmp_path / "filled.py", tmp_path / "STARTS"
    script.write_text(FILLED)
    words = (*WORDS, "--max_steps", STEPS, "--checkpoint_every", 3, "--dtype", "float64", "--batch_norm", "frozen")
    words = (*words, "--global_batch_size", 32, "--output_dir", tmp_path, *(("--workers", 1) if devices > 1 else ()))
    config, flags = ("single_gpu", ()) if devices == 1 else ("multi_gpu", ("--max_restarts", 3))
    env = {"STARTS": str(starts), "FULL": str(devices - 1)}
    gpus(
        config,
        script,
        *words,
        "--max_micro_batch_size",
        16,
        "--name",
        "run",
        devices=devices,
        gib=1,
        flags=flags,
        env=env,
    )
    found = [json.loads(line) for line in starts.read_text().splitlines()]
    assert len(found) == 2 * devices and {each["children"] for each in found} == {0}
    assert len({each["files"] for each in found if each["rank"] == found[0]["rank"]}) == 1, found
    assert devices > 1 or found[0]["process"] == found[1]["process"]
    name = torch.cuda.get_device_name() if IS_REAL else "Pretended GPU"
    assert json.loads((tmp_path / "run" / "micro_batch.json").read_text()) == {name: 8}
    assert not left_behind(starts)
    assert not [path for each in found for path in Path("/dev/shm").glob(f"*{each['process']}*")]

    done = launch("cpu", "recipes/cls.py", *words, "--workers", 0, "--name", "undisturbed")
    assert done.returncode == 0, done.stderr
    run, other = (Outcome("ok", "", "", 0.0, tmp_path / name) for name in ("run", "undisturbed"))
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        np.testing.assert_allclose(run.column(key), other.column(key), rtol=1e-8)


def left_behind(starts: Path) -> list[psutil.Process]:
    """Processes of an ended run, known by their environment, that are still alive after some seconds."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process] if process.environ().get("STARTS") == str(starts) else []
    return psutil.wait_procs(found, 10)[1]
