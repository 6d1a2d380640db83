"""A copied recipe can log its own numbers and draw in mid-run: they are the same on any layout, and
in every tracker.

What would make its results depend on the layout without a word is refused by name: a metric of one
rank's samples, random numbers from a global generator, a parameter that no checkpoint has.
"""

import re

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness.outcomes import Outcome, assert_same_training
from tests.recipes.copied import copy

NUMBERS = """Numbers of the samples and of the model, and pictures at each evaluation.
@@ main
-            return loss_fn(logits, targets)
+            losses = loss_fn(logits, targets)
+            probabilities = logits.detach().softmax(1)
+            run.log({"train/confidence": probabilities.amax(1), "train/squared": losses.detach() ** 2})
+            return losses
@@ main
+            run.log({"train/weight": next(model.parameters()).detach().norm(), "train/half": 0.5})
             grad_norm = run.clip_gradients(config.clip, config.clip_mode)
@@ main
-                default_metric = "f1" if val_data.multi_label else "top1"
-                run.evaluate(evaluate, config.best_metric or default_metric)
+                evaluation = run.evaluate(evaluate, best_metric="top1")
+                if run.step < run.last:  # after the last one, the run draws them itself
+                    evaluation.draw(run)
"""
FLAGS = (
    "--name run --model test_vit --dtype float64 --global_batch_size 51 --max_steps 6 "
    "--eval_every 3 --log_every 2"
)
NOISE = """Random numbers of each place that a copy may draw them in.
@@
+class Noise(Normalize):
+    def sample(self, positions):
+        return DRAW
+
+    def apply(self, images, targets, sampled):
+        return images + sampled.to(images)[:, None, None, None], targets
+
+
 def build_transforms(config: Config, model, device: torch.device) -> Transforms:
@@ build_transforms
     augmentations.append(normalize)
+    augmentations.append(Noise(data_config, dtype, device))
"""
OF_LOSS = """Noise in the targets.
@@
-            return loss_fn(logits, targets)
+            return loss_fn(logits, targets + 0.1 * torch.rand_like(targets))
"""
MISTAKES = {
    "a worker's generator": NOISE.replace(
        "DRAW", "torch.rand(len(positions)).numpy() + 0 * positions"
    ),
    "the device's generator": NOISE.replace("DRAW", "positions").replace(
        "sampled.to", "torch.rand(len(images)).to"
    ),
    "the loss": OF_LOSS,
    "another parameter": """A parameter beside the model.
@@ main
         optimizer = build_optimizer(config, model)
+        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
""",
    "no direction": """A result of one's own that leads.
@@ evaluate
-    return evaluation  # or a dict of results over all ranks, without pictures
+    results = evaluation.results()
+    return results | {"regret": 1 - results["top1"]}
@@ main
-                default_metric = "f1" if val_data.multi_label else "top1"
-                run.evaluate(evaluate, config.best_metric or default_metric)
+                run.evaluate(evaluate, best_metric="regret")
""",
}
OF_ONE_RANK = """A metric that is not reduced.
@@
-from common.distributed import all_or_none
+from common.distributed import all_or_none, rank
@@ evaluate
-    return evaluation  # or a dict of results over all ranks, without pictures
+    return evaluation.results() | {"first": float(rank())}
"""
OWN = ("train/confidence", "train/squared", "train/weight", "train/half")


@pytest.fixture(scope="module")
def outcomes(run_several, tmp_path_factory) -> dict[str, Outcome]:
    """The copy on one process and on two with unequal shares, and copies with mistakes."""
    folder = tmp_path_factory.mktemp("copy")
    script = copy(folder / "mine.py", NUMBERS)
    cases = {
        name: [copy(folder / f"{name}.py", diff), "--dry_run"] for name, diff in MISTAKES.items()
    }
    cases["dropout is none"] = (
        "--drop 0.5 --drop_path 0.2 --mixup 0.2 --random_erasing 0.3 --dry_run".split()
    )
    cases["one"] = (
        f"{FLAGS} --tracker tensorboard --workers 2 --max_micro_batch_size 20 --output_dir {folder}/1".split()
    )
    two = {"two": f"{FLAGS} --max_micro_batch_size 9 --output_dir {folder}/2".split()}
    two["of one rank"] = [
        copy(folder / "of_one_rank.py", OF_ONE_RANK)
    ] + "--max_steps 2 --model test_vit".split()
    return run_several(1, cases, recipe=script, pictures=True) | run_several(
        2, two, recipe=script, pictures=True
    )


def test_custom_numbers_and_pictures_are_the_same_on_any_layout(outcomes) -> None:
    one_rank = outcomes["one"]
    two_ranks = outcomes["two"]
    assert (one_rank.outcome, two_ranks.outcome) == ("ok", "ok"), one_rank.text + two_ranks.text
    assert (
        [row["step"] for row in one_rank.rows]
        == [row["step"] for row in two_ranks.rows]
        == [2, 3, 4, 6]
    )
    assert_same_training(one_rank, two_ranks)
    for name in (*OWN, "train/weight_norm", "train/update_ratio"):
        assert len(one_rank.column(name)) == 4 and (
            name == "train/half" or np.ptp(one_rank.column(name)) > 0
        )
    # Squares of the losses whose mean stands beside them.
    assert (one_rank.column("train/squared") > one_rank.column("train/loss") ** 2).all()
    for picture in ("confusion", "mistakes", "first_batch"):
        files = [run.folder / f"pictures/{picture}.png" for run in (one_rank, two_ranks)]
        assert files[0].read_bytes() == files[1].read_bytes(), picture


def test_the_tracker_has_pictures_and_what_the_start_table_says(outcomes) -> None:
    outcome = outcomes["one"]
    events = EventAccumulator(
        str(outcome.folder / "tensorboard"), size_guidance={"tensors": 0}
    ).Reload()
    assert [event.step for event in events.Images("confusion")] == [3, 6]
    (config,) = (
        event.tensor_proto.string_val[0].decode() for event in events.Tensors("config/text_summary")
    )
    logged_config = dict(line.strip().partition(": ")[::2] for line in config.splitlines())
    expected = {
        "model": "test_vit",
        "run/train_images": "1438",
        "run/micro_steps": "3",
        "run/precision": "fp64",
    }
    assert {name: logged_config[name] for name in expected} == expected
    assert re.search(rf"fingerprint +{logged_config['run/fingerprint']},", outcome.stdout)


SAID = {
    "a worker's generator": "the same samples, made again, have other images in smaller batches: ",
    "the device's generator": "the same samples, made again, have other images: ",
    "the loss": "the same samples, made again, have other losses: ",
    "another parameter": "the optimizer has a parameter of shape [3] that the model has not, ",
    "no direction": (
        "run.evaluate: whether a larger regret is better is not known; add larger_is_better=True, "
        "or False"
    ),
    "of one rank": "run.evaluate: first differs between processes (",
}


@pytest.mark.parametrize("name", SAID)
def test_what_would_depend_on_the_layout_is_refused_by_name(outcomes, name: str) -> None:
    assert outcomes[name].outcome == "refused" and outcomes[name].text.startswith(SAID[name]), (
        outcomes[name].text
    )
    assert "\n" not in outcomes[name].text
    fine = outcomes["dropout is none"]
    assert fine.outcome == "ok" and not fine.folder.exists(), "a dry run leaves nothing"
