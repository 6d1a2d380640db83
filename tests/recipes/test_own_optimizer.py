"""An optimizer of one's own is what the start table, the records and the rows of a run describe,
not the flags.
"""

import pytest

from tests.recipes.copied import copy

OWN = """Another optimizer, whose rate is not the schedule's.
@@ main
-        optimizer = build_optimizer(config, model)
+        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1, alpha=0.9)
@@ main
-            set_learning_rate(optimizer, schedule(step))
+            for group in optimizer.param_groups:
+                group["lr"] = 1e-4 * (step + 1)
"""


def test_an_optimizer_of_ones_own_is_described_as_it_is(run_several, tmp_path) -> None:
    copy(tmp_path / "own.py", OWN)
    args = [
        "--name",
        "own",
        "--output_dir",
        tmp_path,
        "--max_steps",
        3,
        "--log_every",
        1,
        "--lr",
        0.004,
    ]
    (run,) = run_several(2, {"own": args}, recipe=tmp_path / "own.py").values()
    assert run.column("train/lr") == pytest.approx([1e-4, 2e-4, 3e-4]), (
        "the schedule's rate was not used"
    )
    described = "0.004, cosine, RMSprop (momentum 0, alpha 0.9, eps 1e-08, weight_decay 0)"
    assert f"learning rate     {described}\n" in run.stdout
    assert run.read("environment.json")["optimization"] == described
