"""Copied recipes with the changes of docs/change_it.md train as the same run on one process and on
three with unequal shares.

A copy never resumes a run of another source, ends well when it stops itself, and is refused where
its loss is a mean.
"""

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tifffile
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.harness.outcomes import Outcome, assert_same_training
from tests.harness.several import load_recipe
from tests.recipes.copied import CHANGES, PAGE, copy, get_recipe

ROOT = Path(__file__).parents[2]
EXACT = (
    "--dtype float64 --global_batch_size 50 --max_steps 8 --eval_every 4 --checkpoint_every 4 "
    "--log_every 1"
).split()
EXACT += "--schedule constant".split()
# Leaves three processes unequal shares: 20, 20 and 10.
GROUPS = "--batch_norm group --norm_batch_size 10"
# Which changes are made together, and the flags of the run.
DAYS = {
    "focal": (
        ("focal-loss", "a-second-head", "a-metric-and-its-picture"),
        "--model test_vit --lr 2e-3",
    ),
    "margin": (
        ("margin-head", "a-data-set-of-your-own", "a-schedule-of-your-own"),
        "--model test_vit --lr 2e-3",
    ),
    "stages": (
        ("frozen-stages", "learning-rates-of-their-own", "an-evaluation-of-your-own"),
        f"{GROUPS} --lr 2e-3",
    ),
    "optimizers": (
        ("two-optimizers", "an-augmentation-of-your-own", "early-stopping", "another-metric"),
        f"{GROUPS} --lr 2e-3 --ema_decay 0.9",
    ),
    "module": (("a-model-of-your-own", "early-stopping"), f"{GROUPS} --lr 2e-3"),
    "bands": (("more-channels-than-three",), "--model test_vit --lr 2e-3"),
    "teacher": (("a-teacher",), "--model test_vit --lr 2e-3"),
    "detector": (
        ("detection-loss-weights", "detection-head", "detection-augmentation"),
        "--batch_norm frozen --global_batch_size 7 --short_sides 80,96 --long_side 128 --width 32 "
        "--lr 1e-3",
    ),
    "dice": (
        ("segmentation-dice-loss",),
        "--batch_norm frozen --global_batch_size 7 --crop_size 64 --width 32 --lr 1e-3",
    ),
    "decoder": (
        ("segmentation-decoder",),
        "--batch_norm frozen --global_batch_size 7 --crop_size 64 --width 32 --lr 1e-3",
    ),
}
STOP_ON_ONE_RANK = """The last rank ends the run, on its own, in its third step.
@@
+            if run.step == 3 and run.accelerator.is_last_process:
+                run.stop("enough")
             if run.should_save():
"""
BREAK = """The loop is left behind a step.
@@
                 run.save()
+            if run.step == 2:
+                break
"""
DRAWS = """Says when it draws.
@@
+class Announced(Evaluation):
+    def draw(self, pictures):
+        super().draw(pictures)
+        print("draws at step", getattr(pictures, "step", "none"))
+        raise ValueError("no paint")
+
+
 def predict(model, batch):
@@ evaluate
-    evaluation = Evaluation(data, batches.device)
+    evaluation = Announced(data, batches.device)
"""
MEAN = """A mean as loss, of shape [1] or [].
@@
-            return loss_fn(logits, targets)
+            return loss_fn(logits, targets).mean(0, keepdim=len(targets) > 1)
"""


@pytest.mark.smoke
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_small_and_the_pages_command_applies_it(name: str, tmp_path) -> None:
    num_lines = len(re.findall(r"^[+-] *\S", CHANGES[name], re.M))
    assert 0 < num_lines <= (30 if "picture" in name else 20)
    messages = apply_as_the_page_says(tmp_path, get_recipe(name), name)
    assert messages == ["patching file mine.py"], "other lines: python -m tests.recipes.copied"


@pytest.mark.smoke
@pytest.mark.parametrize("name", DAYS)
def test_the_pages_command_applies_several_changes(name: str, tmp_path) -> None:
    """Those before move the lines of those after."""
    changes, _ = DAYS[name]
    apply_as_the_page_says(tmp_path, get_recipe(changes[0]), *changes)


def apply_as_the_page_says(folder: Path, recipe: str, *changes: str) -> list[str]:
    """Lines that the commands print. The copy is as `copy` makes it."""
    (folder / "docs").symlink_to(ROOT / "docs")
    script = copy(folder / "mine.py", recipe=recipe)
    command = re.search("^awk .*", PAGE, re.M)[0]
    lines = []
    for change in changes:
        title = change.replace("-", " ").capitalize()
        command_line = command.replace("Focal loss", title) + " --fuzz=0"
        printed = subprocess.check_output(command_line, shell=True, cwd=folder, text=True)
        lines += printed.splitlines()
    diffs = [CHANGES[change] for change in changes]
    expected = copy(folder / "expected.py", *diffs, recipe=recipe)
    assert script.read_text() == expected.read_text()
    compile(script.read_text(), script.name, "exec")
    return lines


@pytest.mark.smoke
def test_every_change_of_the_page_is_trained() -> None:
    trained = {"hundreds-of-thousands-of-classes"}  # in test_layout.py
    for changes, _ in DAYS.values():
        trained |= set(changes)
    assert trained == CHANGES.keys()


def test_the_picture_of_the_page_is_drawn(tmp_path) -> None:
    copy(tmp_path / "cls_ranks.py", CHANGES["a-metric-and-its-picture"])
    load_recipe(tmp_path / "cls_ranks.py").draw_bars([7, 2, 1], tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 1_000


@pytest.fixture(scope="module")
def runs(run_several, stripes, scenes, regions, tmp_path_factory) -> dict[str, dict[str, Outcome]]:
    """By number of processes and name: two launches."""
    folder = tmp_path_factory.mktemp("copies")
    outcomes = {}
    table = ["path,kind,split"]
    (folder / "shells").mkdir()
    for path in sorted(stripes.rglob("*.png")):
        split, kind, name = path.parts[-3:]
        table.append(f"{path},{kind},{split}")
        (folder / "shells" / f"{kind.replace('_', '-')}_{split}{name}").symlink_to(path)
    (folder / "labels.csv").write_text("\n".join(table))
    draw_bands(stripes, folder / "bands")
    data_args = {
        "focal": ["--data", folder / "labels.csv"],
        "margin": ["--data", folder / "shells"],
    }
    data_args["detector"] = ["--data", scenes]
    data_args["bands"] = ["--data", folder / "bands"]
    data_args["dice"] = data_args["decoder"] = ["--data", regions]
    data_args["teacher"] = ["--data", stripes, "--teacher", folder / "runs_1/stages/best"]
    data = ["--data", stripes]
    short = "--max_steps 8 --model test_vit --global_batch_size 24 --log_every 1".split()
    one_rank = copy(folder / "one_rank.py", STOP_ON_ONE_RANK)
    for processes in (1, 3):
        cases = {}
        output = ["--output_dir", folder / f"runs_{processes}"]
        for name, (changes, flags) in DAYS.items():
            kind = get_recipe(changes[0])
            diffs = [CHANGES[change] for change in changes]
            diffs += [DRAWS] if name == "module" else []
            recipe = copy(folder / f"{kind}_{name}.py", *diffs, recipe=kind)
            cases[name] = [recipe] + data_args.get(name, data) + EXACT + flags.split() + output
        if processes == 3:
            cases["one_rank"] = [one_rank] + data + short + output
        else:
            broken = [copy(folder / "broken.py", BREAK), "--checkpoint_every", 4]
            broken += data + short + output
            # Nothing gets better than the first evaluation.
            stopped = cases["module"] + "--max_steps 40 --wait 8 --lr 1e-9 --name stopped".split()
            cases |= {"broken": broken, "broken again": broken + ["--name", "broken"]}
            cases |= {"stopped": stopped, "stopped, longer": stopped + ["--max_steps", 44]}
            cases["mean"] = [copy(folder / "mean.py", MEAN)] + data + short + output
            for name in ("optimizers", "teacher"):
                args = [word for word in cases[name][1:] if word not in data_args.get(name, ())]
                cases[f"original of {name}"] = ["recipes/cls.py"] + args + data + ["--max_steps", 1]
            student_args = [word for word in cases["teacher"] if word not in ("--data", stripes)]
            cases["teacher of other classes"] = student_args + ["--data", "digits"]
            module = cases["module"]
            cases["resumed"] = module + ["--name", "resumed", "--max_steps", 4]
            cases["resumed, longer"] = module + ["--name", "resumed"]
            for what in ("best", "checkpoints/step_00000008"):
                weights = folder / "runs_1/module" / what
                cases[f"module's {what}"] = module + ["--eval_only", weights]
            cases["best bands"] = cases["bands"] + ["--eval_only", folder / "runs_1/bands/best"]
            weights = folder / "runs_1/detector/best"
            cases["best boxes"] = cases["detector"] + ["--eval_only", weights]
            unnamed = data + short + output + ["--max_steps", 1, "--name", ""]
            cases["without a name"] = [one_rank] + unnamed
            same = data + short + ["--max_steps", 4] + output + ["--name", "source"]
            cases["original"] = same
            focal = copy(folder / "focal/cls.py", CHANGES["focal-loss"])
            cases["finished by the original"] = [focal] + same
            cases["allowed"] = [focal] + same + ["--max_steps", 6, "--allow_changed_source"]
            cases["as before"] = ["recipes/cls.py"] + same + ["--max_steps", 7]
        outcomes[processes] = run_several(processes, cases, timeout=600)
    return outcomes


@pytest.mark.parametrize("name", DAYS)
def test_a_changed_copy_is_the_same_run_on_any_layout(
    name: str, runs: dict[str, dict[str, Outcome]]
) -> None:
    one_rank = runs[1][name]
    three_ranks = runs[3][name]
    assert (one_rank.outcome, three_ranks.outcome) == ("ok", "ok"), one_rank.text + three_ranks.text
    losses = one_rank.column("train/loss")
    assert len(losses) == 8 and losses[-1] < losses[0]
    results = {"detector": {"train/loss_box", "eval/AP"}, "stages": {"eval/accuracy"}}
    results["dice"] = results["decoder"] = {"eval/loss", "eval/mIoU"}
    assert {key for row in one_rank.rows for key in row} >= results.get(
        name, {"eval/loss", "eval/f1_macro"}
    )
    assert_same_training(one_rank, three_ranks)


def test_a_second_head_and_a_table_of_labels_take_effect(runs) -> None:
    run = runs[1]["focal"]
    assert "labels.csv: 199" in run.stdout and len(run.column("train/odd")) == 8
    assert {name.split("/")[0] for name in run.tensors("optimizer")} >= {
        "odd.weight",
        "model.head.weight",
    }
    assert run.read("best/config.json")["module"] == "TwoHeads"


def test_a_metric_of_ones_own_is_a_result(runs) -> None:
    run = runs[1]["focal"]
    ranks = run.column("eval/reciprocal_rank")
    assert len(ranks) == len(run.column("eval/loss"))
    assert (ranks >= run.column("eval/top1")).all() and ranks.max() <= 1


def test_a_margin_head_and_a_data_set_of_ones_own_take_effect(runs) -> None:
    run = runs[1]["margin"]
    assert {"directions", "model.cls_token"} <= run.tensors().keys()
    assert "model.head.weight" not in run.tensors()
    assert re.search("trained on +80 % of Shells", run.stdout)
    assert "stuff-0, stuff-1" in run.stdout


def test_a_fourth_channel_is_trained_evaluated_and_exported(runs) -> None:
    run = runs[1]["bands"]
    best = runs[1]["best bands"]
    assert re.search(r"input +4 x \d+ x \d+\n", run.stdout) and "transparency" not in run.stdout
    summary = run.read("summary.json")
    assert best.outcome == "ok", best.text
    assert json.loads(best.stdout.splitlines()[-1])["loss"] == pytest.approx(
        summary["best"]["eval/loss"], rel=1e-6
    )
    loaded = timm.create_model(f"local-dir:{run.folder / 'best'}", pretrained=True)
    exported = load_file(run.folder / "best/model.safetensors")
    assert exported["patch_embed.proj.weight"].shape[1] == 4
    for name, tensor in loaded.state_dict().items():  # float32; the run's are float64
        assert torch.equal(tensor, exported[name].to(tensor)), name


def test_pictures_of_four_channels_are_drawn(forks, stripes, tmp_path) -> None:
    draw_bands(stripes, tmp_path / "bands")
    recipe = copy(tmp_path / "cls_bands.py", CHANGES["more-channels-than-three"])
    args = ["--data", tmp_path / "bands"] + "--model test_vit --max_steps 2 --name drawn".split()
    ended = forks(args + ["--output_dir", tmp_path], recipe=recipe, pictures=True)
    assert ended.code == 0, ended
    for name in ("first_batch", "mistakes"):
        assert (tmp_path / "drawn/pictures" / f"{name}.png").is_file(), name


def test_a_schedule_of_ones_own_is_used_and_described(runs) -> None:
    run = runs[1]["margin"]
    triangle = [2e-3 * (1 - abs(2 * step / 9 - 1)) for step in range(1, 9)]
    np.testing.assert_allclose(run.column("train/lr"), triangle)
    assert re.search(
        "learning rate +0.0004444 to 0.001778 to 0.0004444 by schedule, adamw\n", run.stdout
    )


def test_frozen_stages_stay_as_they_are(runs) -> None:
    run = runs[1]["stages"]
    layers = sum(
        isinstance(layer, torch.nn.BatchNorm2d)
        for layer in timm.create_model("test_resnet").modules()
    )
    assert re.search(rf"batch norm +group: .*; \d+ of {layers} layers are frozen\n", run.stdout)
    first, last = (
        load_file(run.folder / f"checkpoints/step_0000000{step}/model.safetensors")
        for step in (4, 8)
    )
    moved = {name for name, tensor in first.items() if not torch.equal(tensor, last[name])}
    assert {name.split(".")[0] for name in moved} == {"layer4", "fc"}
    assert any(name.endswith("running_mean") for name in moved)
    assert run.tensors("optimizer").keys() >= {"fc.weight/exp_avg", "layer4.0.conv1.weight/exp_avg"}


@pytest.mark.parametrize("name", ["optimizers", "teacher"])
def test_an_augmentation_and_a_teacher_change_the_loss(runs, name: str) -> None:
    """Greyscale images, and a loss against the teacher's probabilities."""
    original = runs[1][f"original of {name}"]
    assert runs[1][name].column("train/loss")[0] != pytest.approx(
        original.column("train/loss")[0], rel=1e-4
    )


def test_two_optimizers_and_another_metric_take_effect(runs) -> None:
    run = runs[1]["optimizers"]
    states = run.tensors("optimizer")
    assert not any(name.startswith("fc.") for name in states)
    assert any("exp_avg" in name for name in states)
    assert re.search(r"best +brier \(EMA\) \d\.\d+ at step", run.stdout), "not in per cent"
    best = run.read("summary.json")["best"]["eval/ema_brier"]
    assert best == min(run.column("eval/ema_brier")), "smaller is better"


def test_a_teacher_leaves_no_trace_and_must_know_the_classes(runs) -> None:
    run = runs[1]["teacher"]
    refused = runs[1]["teacher of other classes"]
    assert run.tensors().keys() == timm.create_model("test_vit", num_classes=5).state_dict().keys()
    assert run.read("best/config.json")["architecture"] == "test_vit"
    assert (
        refused.outcome == "refused"
        and "stages/best: does not know 0; take one trained on these" in refused.text
    )


def test_changes_of_a_detector_take_effect(runs: dict[str, dict[str, Outcome]]) -> None:
    boxes = runs[1]["detector"]
    best = runs[1]["best boxes"]
    total = 3 * boxes.column("train/loss_box") + boxes.column("train/loss_class")
    total += boxes.column("train/loss_centerness")
    np.testing.assert_allclose(boxes.column("train/loss"), total)
    assert "head.classification_head.conv.0.1.weight" in boxes.tensors()
    summary = boxes.read("summary.json")
    assert best.outcome == "ok", best.text
    assert json.loads(best.stdout.splitlines()[-1])["AP"] == pytest.approx(
        summary["best"]["eval/AP"]
    )


def test_a_run_that_its_recipe_stops_ends_well(runs) -> None:
    """After an evaluation it ends there; pictures, results and best/ are those of a run's end."""
    first = runs[1]["stopped"]
    longer = runs[1]["stopped, longer"]
    assert re.search(
        "12 steps in [0-9]+ s of training, ended by no better result since step 4", first.stdout
    ), first
    assert (first.folder / "best/model.safetensors").is_file()
    assert "draws at step 12" in first.stdout
    assert "the pictures of the evaluation could not be drawn: ValueError: no paint" in first.stdout
    assert longer.outcome == "ok" and "resuming from step 12 of 44" in longer.stdout
    assert read_status(longer)[:2] == ("finished", 16), (
        "it waits for 8 steps at most, and has waited longer"
    )


def test_one_rank_can_stop_a_run(runs) -> None:
    """All end at one step soon after, with an evaluation and a checkpoint."""
    run = runs[3]["one_rank"]
    assert run.outcome == "ok" and read_status(run) == ("finished", 5, "enough")
    assert run.checkpoint.name == "step_00000005"
    assert "eval/top1" in run.rows[-1] and run.rows[-1]["step"] == 5


def test_a_loop_that_was_left_is_saved_and_stays_ended(runs) -> None:
    """Where no checkpoint is due."""
    run = runs[1]["broken"]
    resumed = runs[1]["broken again"]
    why = "the recipe, which left its loop"
    assert run.outcome == "ok" and 'run.stop("why") ends a run with one' in run.stdout
    assert read_status(run) == ("finished", 2, why) and run.checkpoint.name == "step_00000002"
    assert (
        resumed.outcome == "ok" and f"this run was ended at step 2 of 8 by {why}" in resumed.stdout
    )


def test_a_mean_as_loss_is_refused_before_the_first_step(runs) -> None:
    run = runs[1]["mean"]
    assert run.outcome == "refused" and not run.folder.exists()
    assert "one loss per sample; take reduction='none'" in run.text and "\n" not in run.text


def test_a_module_of_ones_own_is_evaluated_exported_and_resumed(runs) -> None:
    run = runs[1]["module"]
    longer = runs[1]["resumed, longer"]
    assert re.search("model +Sequential: ", run.stdout)
    assert "resuming from step 4 of 8" in longer.stdout
    for name, tensor in run.tensors().items():
        assert torch.equal(longer.tensors()[name], tensor), name
    exported = run.read("best/config.json")
    assert exported["label_names"] == [f"stuff_{number}" for number in range(5)]
    last = run.read("summary.json")["last"]
    for what in ("best", "checkpoints/step_00000008"):
        evaluated = runs[1][f"module's {what}"]
        assert evaluated.outcome == "ok", evaluated.text
        results = json.loads(evaluated.stdout.splitlines()[-1])
        if what != "best" or last["step"] == 8:
            assert results["loss"] == pytest.approx(last["eval/loss"], rel=1e-9)


def test_a_checkpoint_is_resumed_by_the_source_that_made_it(runs) -> None:
    """Also one that is finished, unless it is allowed. The source is kept with the run."""
    refused = runs[1]["finished by the original"]
    assert refused.outcome == "refused" and "finished" not in refused.stdout
    assert "was made by another source of cls.py" in refused.text
    for way_out in ("--name", "--allow_changed_source", "put the source back"):
        assert way_out in refused.text
    assert "+        log_probabilities = logits.log_softmax(1)" in refused.stdout
    allowed = runs[1]["allowed"]
    assert allowed.outcome == "ok" and "as --allow_changed_source says" in allowed.stdout
    assert runs[1]["as before"].outcome == "refused", "it was made by the changed one since"
    focal = (allowed.folder.parents[1] / "focal/cls.py").read_text()
    assert (allowed.folder / "source/cls.py").read_text() == focal
    facts = allowed.read("environment.json")
    assert len(list(allowed.folder.parent.glob("one_rank-*"))) == 1, (
        "a run is called after the file that was started"
    )
    assert (
        facts["recipe"].endswith("focal/cls.py")
        and set(facts["source"]) == {"cls.py"}
        and facts["commit"] is None
    )


def draw_bands(stripes: Path, folder: Path) -> None:
    """TIFFs of four bands: grey, grey, grey, and a picture of stripes."""
    folder.mkdir()
    for path in sorted(stripes.rglob("*.png")):
        split, kind, name = path.parts[-3:]
        band = np.asarray(Image.open(path).convert("L"))
        grey = np.full_like(band, 100)
        pixels = np.stack([grey, grey, grey, band], axis=2)
        file = folder / f"{kind.replace('_', '-')}_{split}{Path(name).stem}.tif"
        tifffile.imwrite(file, pixels, photometric="rgb", extrasamples=[0])


def read_status(run: Outcome) -> tuple[str, int, str]:
    content = run.read("status.json")
    return content["status"], content["step"], content["cause"]
