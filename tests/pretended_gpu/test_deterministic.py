"""`--deterministic` asks torch for kernels that repeat a run bit for bit on a GPU, and names an
operator that has none.
"""

import pytest

from tests.harness.outcomes import Outcome
from tests.recipes.copied import copy

WORDS = (
    "--max_steps 2 --eval_every 2 --workers 0 --tracker none --mixup 0.2 --random_erasing 0.3 "
    "--clip 1"
).split()
PRINTS = """\
@@ main
         for step in run.steps():
+            import os
+
+            cudnn = torch.backends.cudnn
+            uses_deterministic = torch.are_deterministic_algorithms_enabled()
+            print("deterministic", uses_deterministic, cudnn.deterministic, cudnn.benchmark)
+            print("cuBLAS", os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""
POOLED = """\
@@
-                logits = network(images)  # [B, K]
+                logits = network(F.adaptive_avg_pool2d(images.requires_grad_(), 24))
"""
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runs(run_on_gpus, tmp_path_factory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("recipes")
    plain = copy(folder / "plain.py", PRINTS)
    pooled = copy(folder / "pooled.py", PRINTS, POOLED)
    cases = {
        "plain": [plain, "--deterministic"],
        "refused": [pooled, "--deterministic"],
        "free": [pooled],
    }
    return run_on_gpus(1, {name: flags + WORDS for name, flags in cases.items()})


@pytest.mark.parametrize(
    "name, settings", [("plain", "True True False"), ("free", "False False True")]
)
def test_kernels_are_deterministic_if_that_is_asked_for(runs, name: str, settings: str) -> None:
    """Without the flag cuDNN searches for its fastest algorithms."""
    assert runs[name].outcome == "ok"
    assert f"deterministic {settings}\ncuBLAS :4096:8\n" in runs[name].stdout


def test_an_operator_without_a_deterministic_kernel_is_refused(runs) -> None:
    """torch itself raises for it; without the flag it runs."""
    assert runs["refused"].outcome == "refused"
    message = (
        "--deterministic: torch has no deterministic kernel of adaptive_avg_pool2d_backward_cuda"
    )
    assert runs["refused"].text.startswith(message)
