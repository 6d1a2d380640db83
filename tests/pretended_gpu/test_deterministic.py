"""`--deterministic` asks torch for kernels that repeat a run bit for bit on a GPU, and names an operator that has none."""

import pytest

from tests.harness.launching import ROOT

WORDS = "--max_steps 2 --eval_every 2 --workers 0 --tracker none --mixup 0.2 --random_erasing 0.3 --clip 1".split()
STEPS = "        for step in run.steps():\n"
SAYS = """
        import os

        asked = torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        print("asked", *asked, torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)

"""
LOGITS = "logits = network(images)"
POOLED = "logits = network(F.adaptive_avg_pool2d(images.requires_grad_(), 24))"


@pytest.mark.gpu
def test_deterministic_kernels_are_asked_for_and_an_operator_without_one_is_refused(run_on_gpus, tmp_path) -> None:
    """torch itself raises for such an operator. Without the flag it runs, and cuDNN searches for its fastest algorithms."""
    recipe = (ROOT / "recipes" / "cls.py").read_text().replace(STEPS, SAYS + STEPS)
    plain, pooled = tmp_path / "plain.py", tmp_path / "pooled.py"
    plain.write_text(recipe)
    pooled.write_text(recipe.replace(LOGITS, POOLED))
    cases = {"plain": [plain, "--deterministic"], "refused": [pooled, "--deterministic"], "free": [pooled]}
    runs = run_on_gpus(1, {name: [*words, *WORDS] for name, words in cases.items()})
    plain, refused, free = runs.values()
    assert plain.outcome == free.outcome == "ok"
    assert "asked True :4096:8 True False" in plain.stdout
    assert "asked False :4096:8 False True" in free.stdout
    assert refused.outcome == "refused"
    assert refused.text.startswith(
        "--deterministic: torch has no deterministic kernel of adaptive_avg_pool2d_backward_cuda"
    )
