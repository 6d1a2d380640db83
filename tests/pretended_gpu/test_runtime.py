"""A pretended GPU computes, fails and waits as a real one does."""

import json
import signal

import psutil
import pytest

from tests.harness.machines import Watched
from tests.pretended_gpu import build

UNCOMPUTED = """
import torch
from torch.utils._python_dispatch import _disable_current_modes


def failing(call):
    try:
        call()
    except Exception as error:
        return str(error)


used = torch.ones(1000, device="cuda")
address = used.data_ptr()
del used
again = torch.empty(1000, device="cuda")
assert again.data_ptr() == address and again.isnan().all(), "a reused block must not show its old values"
assert torch.empty(5 << 20, dtype=torch.float16, device="cuda").isnan().all()
assert "_fused_dropout" in failing(lambda: torch.ops.aten._fused_dropout(again, 0.5))
print("unknown operators are named")
with _disable_current_modes():  # like a kernel of Triton or of C++ that no operator launches
    assert "not supported" in failing(lambda: torch.zeros(3, device="cuda"))
    assert "CUBLAS" in failing(lambda: torch.empty(3, 3, device="cuda").mm(torch.empty(3, 3, device="cuda")))

net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten())
net.append(torch.nn.Linear(144, 5)).cuda()
images = torch.randn(2, 3, 8, 8, device="cuda")


def gradients():
    net.zero_grad()
    loss = net(images).square().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in net.parameters())]


eager = gradients()
net.compile()
torch.testing.assert_close(gradients(), eager)
print("compiled graphs are computed")
"""


def test_what_nothing_computes_is_named_and_never_read(gpus, tmp_path):
    """Unwritten memory is NaN. A kernel that no operator launched fails, is named, and the run ends with an error."""
    done = gpus.python(UNCOMPUTED, tmp_path)
    assert done.stdout == "unknown operators are named\ncompiled graphs are computed\n", done.stdout + done.stderr
    assert "no kernel for void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor" in done.stderr
    assert "no kernel for cublasSgemm_v2, which no operator has launched" in done.stderr
    assert done.returncode == 1
    assert done.stderr.endswith("2 kernels or functions of the GPU were called that nothing computes: see above\n")


def test_a_machine_that_lacks_something_is_told_what(monkeypatch, tmp_path):
    """Also, CUDA's headers are found in both layouts of wheels."""
    monkeypatch.setattr(build.shutil, "which", lambda tool: None if tool == "nm" else tool)
    assert build.why_not() in ("nm (Debian: gcc, binutils) are needed to pretend GPUs", "there is a real GPU")
    for layout in ("cu13", "cuda_runtime"):
        header = tmp_path / layout / "nvidia" / layout / "include" / "cuda_runtime_api.h"
        header.parent.mkdir(parents=True)
        header.touch()
        assert build._headers(tmp_path / layout) == header.parent
    assert build._headers(tmp_path) is None


@pytest.mark.gpu
@pytest.mark.long
def test_killed_and_stopped_runs_resume_and_leave_nothing(gpus, tmp_path):
    """Two ranks with data workers: one is killed, later all are asked to stop; losses equal those of an uninterrupted run."""
    devices = gpus.at_most(2)
    config = "multi_gpu" if devices > 1 else "single_gpu"
    words = "--tracker none --workers 2 --log_every 1 --max_steps 60 --eval_every 60 --checkpoint_every 5".split()
    words = ["recipes/cls.py", "--deterministic", *words, "--output_dir", tmp_path, "--name"]
    gpus(config, *words, "straight", devices=devices)

    def ranks() -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("PRETENDED_TEST") == mine]

    mine = str(tmp_path)
    for wanted in (8, 20):
        started = gpus.start(config, *words, "run", devices=devices, env={"PRETENDED_TEST": mine})
        run = Watched(tmp_path / "run", [started])
        run.until(lambda run=run, wanted=wanted: run.step() >= wanted, f"step {wanted}", 200)
        if wanted == 8:
            started_ranks = psutil.Process(started.process.pid).children()
            {each.environ().get("RANK", "0"): each for each in started_ranks}[str(devices - 1)].kill()
        else:
            started.process.send_signal(signal.SIGTERM)
        assert started.finish(120).returncode != 0
        run.started.clear()
        run.until(lambda: not ranks(), "all processes end", 30)
    gpus(config, *words, "run", devices=devices)
    one, other = (map(json.loads, (tmp_path / name / "metrics.jsonl").open()) for name in ("straight", "run"))
    losses = [{row["step"]: row["train/loss"] for row in rows if "train/loss" in row} for rows in (one, other)]
    assert losses[0] == losses[1] and len(losses[0]) == 60
