"""A run is the same run on any layout, with models that are whole, in shards (FSDP2), or have a
head that is cut by class.

Compared with one process that takes the whole batch at once, in float64: losses, results, weights,
statistics, moving averages and states of optimizers agree within 1e-8, also of a run that moves
between layouts. All cases of one world run in one launch.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.harness.drawings import draw_stripes, save_colours
from tests.harness.outcomes import (
    Outcome,
    assert_same_training,
    build_initial_state,
    compute_relative_distance,
    identical,
    select_parameters,
    select_statistics,
)
from tests.recipes.copied import CHANGES, copy

# Steps of a run, with a checkpoint after each third; classes of a head that is cut.
STEPS = 9
CLASSES = 40
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
HYBRID = FSDP | {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
# Weights are kept for the backward pass, which FSDP2 files say in another way.
ZERO2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
ENVIRONMENTS = {"": {}, "shards": FSDP, "hybrid": HYBRID, "zero2": ZERO2}
# Runs that another world resumes are in an earlier one.
WORLDS = ("2 shards", "2", "1", "3 shards", "3", "2 zero2", "4 hybrid", "5 shards")

# A copy, as any person's, that says what its parameters are: a run that was not sharded would
# agree, too.
SAYS_KINDS = """\
@@ main
         network, optimizer = run.prepare(
             model, optimizer, schedule, train_set, val_set, compute_losses
         )
+        kinds = sorted({type(parameter.data).__name__ for parameter in network.parameters()})
+        run.say(f"parameters: {', '.join(kinds)}")
"""
CHANGE = CHANGES["hundreds-of-thousands-of-classes"]
HEAD = 'kind="cosface", scale=64.0, margin=0.35, share=1.0'
KINDS = {
    "cosface": 'kind="cosface", scale=16.0, margin=0.35, share=1.0',
    "sampled": 'kind="arcface", scale=16.0, margin=0.2, share=0.1',
}


@dataclass(frozen=True)
class Case:
    """Layouts are "processes x samples of a micro-batch at most", and "from" one that is resumed."""

    flags: str
    layouts: str
    long: str = ""  # those that are left to the long tests
    batch: int = 44
    recipe: str = "cls"
    steps: int = STEPS


VARIED = (
    "--augment rand-m5-n1 --random_erasing 0.25 --drop 0.1 --drop_path 0.1 --mixup 0.2 --cutmix "
    "0.2 --ema_decay 0.9"
)
GROUP = "--model test_resnet --lr 5e-3 --batch_norm group --norm_batch_size 4"
SCENES = (
    "--short_sides 80,96 --long_side 128 --hflip 0.3 --photometric 0.3 --iou_crop 0.3 --zoom_out "
    "0.3 --mosaic 0.3 --mixup 0.3 --group_window 2 --width 32 --clip 1 --ema_decay 0.9"
)
OF_DETR = f"{SCENES} --short_sides 64,96 --long_side 800 --batch_norm frozen"
GROUP_OF_2 = f"{SCENES} --batch_norm group --norm_batch_size 2"
CROPS = (
    "--crop_size 64 --hflip 0.5 --photometric 0.3 --label_smoothing 0.1 --ema_decay 0.9 "
    "--eval_short_side 80"
)
OF_HEAD = "--model test_vit --lr 5e-3 --schedule constant --ema_decay 0.9 --clip 1 --drop_path 0.1"
CASES = {
    "vit": Case(
        f"--model test_vit --lr 2e-3 {VARIED} --layer_decay 0.8 --clip 1 --label_smoothing 0.1",
        "3x16, 2x12 shards, 2x22 from 2x12 shards, 1x44 from 2x12 shards, 3x16 shards from 1x44, "
        "3x16 shards from 2x12 shards",
        "1x12, 2x22, 2x8, 3x16 shards, 2x12 zero2, 4x6 hybrid, 5x5 shards",
        steps=18,
    ),
    "resnet-group": Case(f"{GROUP} {VARIED}", "2x8, 2x12 shards", "1x12, 2x22, 3x16, 3x16 shards"),
    "resnet-global": Case(
        f"--model test_resnet --opt sgd --lr 0.1 {VARIED} --batch_norm global --schedule step "
        "--step_epochs 1",
        "2x22",
        "3x16, 2x22 shards, 3x22 shards",
    ),
    "resnet-thawing": Case(
        f"{GROUP} --freeze_stages 3 --unfreeze_epochs 0.5,1,1.5 --backbone_lr_factor 0.5 "
        "--head_lr_factor 2 --layer_decay 0.8 --clip 1 --ema_decay 0.9 --sampling sqrt",
        "3x16, 2x12 shards",
        "2x8",
    ),
    "convnext": Case(
        f"--model test_convnext --opt muon --lr 2e-3 {VARIED} --layer_decay 0.8 --clip 0.1 "
        "--clip_mode agc --grad_checkpointing",
        "",
        "2x12 shards, 1x12, 2x22, 2x8, 3x16, 3x16 shards",
    ),
    "several labels": Case(
        "--model test_vit --lr 2e-3 --loss bce --mixup 0.2 --ema_decay 0.7", "3x16"
    ),
    # Without what the cases above vary by, and with what they leave out.
    "vit-bce": Case(
        "--model test_vit --lr 2e-3 --loss bce --class_weights balanced --sampling balanced "
        "--repeats 2 --augment augmix-m3-w2 --color_jitter 0.2 --hflip 0.5 --vflip 0.5 --cache 24",
        "",
        "3x16",
    ),
    "compiled": Case(
        "--model test_vit --lr 2e-3 --drop_path 0.1 --clip 1 --compile", "", "2x12 shards"
    ),
    # Canvases differ from step to step, and every third scene has no box, so that some processes
    # have none.
    "fcos": Case(
        f"--detector fcos {SCENES} --batch_norm frozen --drop_path 0.1 --cache 80",
        "2x2, 3x4 from 2x2, 2x2 shards",
        "3x4, 3x4 shards",
        7,
        "det",
    ),
    "faster_rcnn": Case(
        f"--detector faster_rcnn {GROUP_OF_2} --sync_short_sides",
        "3x4 from 1x8",
        "2x2, 2x2 shards",
        8,
        "det",
        6,
    ),
    "fcos-thawing": Case(
        f"--detector fcos {GROUP_OF_2} --freeze_stages 2 --unfreeze_epochs 1,2 "
        "--backbone_lr_factor 0.5 --neck_lr_factor 2 --head_lr_factor 1.5",
        "",
        "2x2, 3x4",
        8,
        "det",
    ),
    "rf_detr": Case(
        f"--detector rf_detr --model RF_DETR {SCENES} --width 128 --drop_path 0.2 --lr 2e-3 "
        "--short_sides 64,96,128 --long_side 800",
        "3x4 from 1x7",
        "2x2, 3x4",
        7,
        "det",
    ),
    "rf_detr_seg": Case(
        f"--detector rf_detr_seg --model RF_DETR_SEG {SCENES} --width 128 --lr 2e-3 "
        "--short_sides 64,96 --long_side 800",
        "3x4 from 1x7, 2x2 shards",
        "2x2, 3x4",
        7,
        "det",
        6,
    ),
    "retinanet": Case(f"--detector retinanet {GROUP_OF_2}", "", "2x2, 3x4, 2x2 shards", 8, "det"),
    "rtdetr_v2": Case(
        f"--detector rtdetr_v2 --lr 2e-4 {OF_DETR}", "", "2x2, 3x4, 2x2 shards", 7, "det"
    ),
    "deimv2": Case(f"--detector deimv2 --lr 1e-3 {OF_DETR}", "", "2x2, 3x4, 2x2 shards", 7, "det"),
    # Some images have no labelled pixel, so that some processes have none.
    "fpn": Case(
        "--model test_resnet --width 32 --batch_norm group --norm_batch_size 2 --clip 1 "
        f"{CROPS} --class_weights sqrt --drop_path 0.1",
        "2x2, 3x4 from 1x8, 2x2 shards",
        "3x4, 3x4 shards",
        8,
        "seg",
    ),
    "linear": Case(
        f"--model test_vit --decoder linear --lr 5e-3 {CROPS} --cache 80", "3x3", "2x2", 7, "seg"
    ),
    # A head for many classes, each process with a part of them.
    "cosface": Case(OF_HEAD, "2x3, 3x5", "2x4 shards", 14, "cosface"),
    "sampled": Case(
        OF_HEAD,
        "2x3, 3x5, 1x14 from 2x3, 3x5 from 1x14 from 2x3",
        "2x4 shards, 3x5 shards from 2x3",
        14,
        "sampled",
    ),
}
LONG = {  # name of a run -> True if it is left to the long tests
    f"{name}: {layout}": layouts is case.long
    for name, case in CASES.items()
    for layouts in (case.layouts, case.long)
    for layout in layouts.split(", ")
    if layout
}
# Results of integers, equal in every digit.
EXACT = ("mIoU", "pixel_accuracy", "mean_class_accuracy", "IoU_class/leaf")
NORMS = ("local", "node", "global")


def get_world(run: str) -> str:
    return re.sub("x[0-9]+", "", run.partition(": ")[2].partition(" from ")[0])


def build_more_cases(
    world: str, recipes: dict[str, Path], run: Path, stripes: Path, args: list
) -> dict[str, list]:
    """Command lines of runs that are looked at otherwise; `run` has a head that was cut."""
    if world == "2":
        flags = {
            norm: f"--model test_resnet --lr 5e-3 --dtype float64 --batch_norm {norm}"
            for norm in NORMS
        }
        flags |= dict.fromkeys(
            ("first", "second"), f"{CASES['vit'].flags} --drop 0.5 --max_micro_batch_size 8"
        )
        whole = [recipes["cls"], "--data", stripes, "--global_batch_size", 44, "--max_steps", 3]
        whole += args
        return {name: whole + flags_of_case.split() for name, flags_of_case in flags.items()}
    if world != "1":
        return {}
    best = [recipes["sampled"], "--eval_only", run / "best"]
    return {
        "best/": best,
        "checkpoint": [recipes["sampled"], "--eval_only", run / f"checkpoints/step_{STEPS:08d}"],
        "other classes": best + ["--data", stripes],
        "of the original": [recipes["cls"]] + best[1:],
        "mixed": [recipes["cosface"]] + args + ["--data", stripes, "--mixup", 0.2],
    }


@pytest.fixture(scope="module")
def runs(
    run_several, stripes, scenes, regions, rf_detr, rf_detr_seg, tmp_path_factory, request
) -> dict[str, Outcome]:
    """By its name every run that the selected tests look at."""
    folder = tmp_path_factory.mktemp("layouts")
    outcomes = {}
    layouts = {"sampled: 2x3"}
    cases_to_run = {
        item.callspec.params.get("name")
        for item in request.session.items
        if hasattr(item, "callspec")
    }
    for run in LONG.keys() & cases_to_run:
        name, _, layout = run.partition(": ")
        layouts |= {run, f"{name}: 1x{CASES[name].batch}"}
        while layout := layout.partition(" from ")[2]:
            layouts.add(f"{name}: {layout}")
    draw_stripes(folder / "identities/train", (4,) * CLASSES)
    draw_stripes(folder / "identities/val", (2,) * CLASSES, seed=1)
    recipes = {
        recipe: copy(folder / f"{recipe}.py", SAYS_KINDS, recipe=recipe)
        for recipe in ("cls", "det", "seg")
    }
    for kind, head in KINDS.items():
        recipes[kind] = copy(folder / f"{kind}.py", SAYS_KINDS, CHANGE.replace(HEAD, head))
    save_colours(folder / "labels")
    data = {"cls": stripes, "det": scenes, "seg": regions, "several labels": folder / "labels"}
    for world in WORLDS:
        processes, _, kind = world.partition(" ")
        common = (
            f"--log_every 1 --keep_checkpoints 9 --workers {int(processes) - 1} --output_dir "
            f"{folder}/runs"
        ).split()
        commands = build_more_cases(world, recipes, folder / "runs/sampled: 2x3", stripes, common)
        for run in sorted(layouts):
            if get_world(run) == world:
                num_ranks = re.search("x([0-9]+)", run)[1]
                origin = run.partition(" from ")[2]
                name = run.partition(": ")[0]
                case = CASES[name]
                sizes = f"--global_batch_size {case.batch} --max_micro_batch_size {num_ranks}"
                lengths = (
                    f"--max_steps {case.steps} --eval_every {case.steps} --checkpoint_every "
                    f"{case.steps // 3}"
                )
                flags = f"{case.flags} {sizes} {lengths} --dtype float64"
                flags = flags.replace("RF_DETR_SEG", str(rf_detr_seg))
                flags = flags.replace("RF_DETR", str(rf_detr))
                commands[run] = [recipes[case.recipe]] + flags.split() + common
                commands[run] += [
                    "--data",
                    data.get(name, data.get(case.recipe, folder / "identities")),
                ]
                if origin:  # the first checkpoint that it made
                    checkpoints = outcomes[f"{name}: {origin}"].folder / "checkpoints"
                    commands[run] += ["--resume", min(checkpoints.glob("step_*"))]
        if commands:
            outcomes |= run_several(int(processes), commands, env=ENVIRONMENTS[kind], timeout=900)
    half = (
        f"--data {stripes} --model test_vit --lr 2e-3 {VARIED} --global_batch_size 22 --max_steps "
        "3 --log_every 1"
    ).split()
    for name, env in {"bf16 FSDP": FSDP, "bf16 DDP": {}}.items():
        environment = env | {"ACCELERATE_MIXED_PRECISION": "bf16"}
        outcomes |= run_several(2, {name: [recipes["cls"]] + half}, env=environment)
    refused = {"of the original", "mixed"}
    assert not {
        name: run.text
        for name, run in outcomes.items()
        if (run.outcome == "ok") == (name in refused)
    }
    return outcomes


@pytest.mark.parametrize(
    "name", [pytest.param(run, marks=[pytest.mark.long] * long) for run, long in LONG.items()]
)
def test_every_layout_is_the_same_run(name: str, runs: dict[str, Outcome]) -> None:
    case = name.partition(":")[0]
    whole = runs[f"{case}: 1x{CASES[case].batch}"]
    cut = runs[name]
    losses = whole.column("train/loss")
    start = build_initial_state(whole)
    steps = CASES[case].steps
    assert len(losses) == steps
    # With few boxes, or a tenth of the classes as negatives, losses are too noisy in a few steps.
    assert CASES[case].recipe in ("sampled", "det") or losses[-3:].mean() < losses[:3].mean(), (
        "the compared run learns"
    )
    assert cut.column("step").tolist() == list(
        range(1 + steps // 3 * name.count(" from "), steps + 1)
    )
    assert_same_training(whole, cut, start)
    keys = ["epoch", "samples", "train/lr", "eval/count", "eval/top1", "eval/ema_top1"]
    if CASES[case].recipe == "seg":
        keys += [f"eval/{prefix}{key}" for prefix in ("", "ema_") for key in EXACT]
        assert set(keys[-len(EXACT) :]) <= whole.rows[-1].keys()
    for key in keys:
        actual = cut.column(key).tolist()
        assert actual == whole.column(key).tolist()[-len(actual) :], key
    world = get_world(name)
    assert ("parameters: DTensor\n" in cut.stdout) == (
        " " in world
    ) and "parameters: Tensor\n" in whole.stdout
    if " " in world:  # in best/ everything is put together
        actual, expected = (
            load_file(run.folder / "best/model.safetensors") for run in (cut, whole)
        )
        assert actual.keys() == expected.keys()
        # Under names of the export's own, which `build_initial_state` may not have.
        for tensor, actual_tensor in expected.items():
            torch.testing.assert_close(
                actual[tensor], actual_tensor, rtol=1e-8, atol=1e-8, msg=tensor
            )
    if CASES[case].recipe == "det":
        assert whole.rows[-1]["eval/count"] == 7, "every image once"
        parts = [key for key in whole.rows[0] if key.startswith("train/loss_")]
        assert {"train/loss_class", "train/loss_box"} <= set(parts)
        np.testing.assert_allclose(sum(map(whole.column, parts)), losses, rtol=1e-12)
    if case in KINDS:
        processes = int(world[0])
        part = f", {-(-CLASSES // processes)} on this process" if processes > 1 else ""
        assert f"{CLASSES} classes{part}" in cut.stdout
        assert (
            "margin_head.weight/exp_avg" in cut.tensors("optimizer")
            and len(cut.tensors("margin_head")) == 1
        )


def test_plain_batch_norm_is_another_run_and_node_is_global(runs: dict[str, Outcome]) -> None:
    """The exact modes would not agree by themselves; on one machine `node` has the bits of `global`."""
    local, node, whole = (runs[norm].tensors() for norm in NORMS)
    start = build_initial_state(runs["global"])
    assert (
        compute_relative_distance(select_parameters(whole), select_parameters(local), start) > 1e-3
    )
    assert (
        compute_relative_distance(select_statistics(whole), select_statistics(local), start) > 1e-3
    )
    assert identical(node, whole)


def test_a_repeated_run_has_the_same_bits(runs: dict[str, Outcome]) -> None:
    """In float32, on the same layout, with dropout: losses, weights and averages."""
    first = runs["first"]
    second = runs["second"]
    assert np.array_equal(first.column("train/loss"), second.column("train/loss"))
    assert all(identical(first.tensors(file), second.tensors(file)) for file in ("model", "ema"))


def test_under_bf16_steps_of_shards_are_those_of_ddp_bit_for_bit(runs) -> None:
    """Weights and gradients stay in single precision; Accelerate's own policy for FSDP would cast them."""
    sharded = runs["bf16 FSDP"]
    plain = runs["bf16 DDP"]
    assert "parameters: DTensor\n" in sharded.stdout and "bf16" in sharded.stdout
    assert sharded.column("train/loss").tolist() == plain.column("train/loss").tolist()
    assert all(
        identical(sharded.tensors(file), plain.tensors(file))
        for file in ("model", "ema", "optimizer")
    )


def test_of_a_head_that_is_cut_only_the_embedding_leaves_the_run(runs) -> None:
    """best/ is a model of timm, evaluated alike, also on other classes. The moving average has no head."""
    run = runs["sampled: 2x3"]
    model = timm.create_model(f"local-dir:{run.folder / 'best'}", pretrained=True).eval()
    assert model(torch.zeros(1, 3, *model.pretrained_cfg["input_size"][1:])).shape == (1, 128)
    assert (
        load_file(run.folder / "best/model.safetensors").keys()
        == run.tensors("ema").keys()
        == run.tensors().keys()
    )
    assert run.tensors("margin_head")["weight"].shape == (CLASSES, 128)
    last = run.read("summary.json")["last"]
    for name in ("best/", "checkpoint"):
        results = json.loads(runs[name].stdout.splitlines()[-1])
        for key in ("recall_at_1", "verification_accuracy"):
            assert results[key] == pytest.approx(last[f"eval/ema_{key}"], abs=1e-12), (name, key)
    refused = json.loads(runs["other classes"].stdout.splitlines()[-1])
    assert refused["count"] == 23 and 0 < refused["recall_at_1"] <= 1
    assert "128 classes without names" in runs["of the original"].text, (
        "no logits, which would be wrong numbers"
    )
    assert "leave out --mixup" in runs["mixed"].text and not runs["mixed"].folder.exists()
