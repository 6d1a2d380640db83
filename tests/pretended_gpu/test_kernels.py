"""The kernels that the pretended GPU has of its own compute what their operators are defined to compute."""

from tests.harness.launching import ROOT

HERE = ROOT / "tests" / "pretended_gpu"


def test_kernels_compute_what_operators_are(gpus):
    """Batch norm, attention, softmax, optimizers, scaling, draws, masks, boxes; in every type, forward and backward."""
    done = gpus.launch.start_python(HERE / "run.py", HERE / "operators.py", env=gpus.environment).finish()
    assert done.returncode == 0 and "no kernel" not in done.stderr, done.stderr
    assert "scaled_gradients torch.float32" in done.stdout, "the last of them"
