"""Does a kernel that the pretended GPU has of its own compute what the operator is?"""

from tests.conftest import ROOT

HERE = ROOT / "tests" / "pretended_gpu"


def test_kernels_compute_what_operators_are(gpus):
    """Each operator that the CPU has no kernel for, in every type, forward and backward: see operators.py."""
    done = gpus.launch.start_python(HERE / "run.py", HERE / "operators.py", env=gpus.environment).finish()
    assert done.returncode == 0 and "no kernel" not in done.stderr, done.stderr
    assert "shared_batch_norm torch.bfloat16" in done.stdout
