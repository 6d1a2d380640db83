"""A pretended GPU computes, fails and waits as a real one does."""

from tests.harness.launching import ROOT

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
    script = tmp_path / "script.py"
    script.write_text(UNCOMPUTED)
    done = gpus.launch.start_python(ROOT / "tests/pretended_gpu/run.py", script, env=gpus.environment).finish()
    assert done.stdout == "unknown operators are named\ncompiled graphs are computed\n", done.stdout + done.stderr
    assert "no kernel for void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor" in done.stderr
    assert "no kernel for cublasSgemm_v2, which no operator has launched" in done.stderr
    assert done.returncode == 1
    assert done.stderr.endswith("2 kernels or functions of the GPU were called that nothing computes: see above\n")
