"""A copy with a head that is cut by class is the same run on any number of processes, also after it has moved between them.

Shares are unequal, and each world takes another number of micro-steps. All cases of one world run in one launch.
"""

import json
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.harness.drawings import draw_stripes
from tests.harness.interrupted import Interrupted
from tests.harness.outcomes import Outcome, assert_same_training, start_of
from tests.recipes.copied import CHANGES, copy
from tests.recipes.test_sharded import FSDP

STEPS, HALF, CLASSES = 12, 6, 40
CHANGE = CHANGES["hundreds-of-thousands-of-classes"]
HEAD = 'kind="cosface", scale=64.0, margin=0.35, share=1.0'
KINDS = {
    "cosface": 'kind="cosface", scale=16.0, margin=0.35, share=1.0',
    "sampled": 'kind="arcface", scale=16.0, margin=0.2, share=0.1',
}
FLAGS = (
    f"--model test_vit --lr 5e-3 --schedule constant --ema_decay 0.9 --clip 1 --drop_path 0.1 --global_batch_size 14 "
    f"--max_steps {STEPS} --log_every 1 --eval_every {STEPS} --checkpoint_every {HALF} --keep_checkpoints 9 --dtype float64"
).split()
# World -> processes, the most samples that one takes at once, environment.
WORLDS = {"two": (2, 3, {}), "one": (1, 14, {}), "three": (3, 5, {}), "shards": (2, 4, FSDP)}
# Resumed half-way in the world of the first name, from the run of the second, and what it is then called.
MOVES = {
    "two, one": ("one", "sampled two"),
    "two, one, three": ("three", "two, one"),
    "to shards": ("shards", "two, one"),
}


@pytest.fixture(scope="module")
def identities(tmp_path_factory) -> Path:
    """Many classes of a few photographs each."""
    folder = tmp_path_factory.mktemp("identities")
    draw_stripes(folder / "train", (4,) * CLASSES)
    draw_stripes(folder / "val", (2,) * CLASSES, seed=1)
    return folder


@pytest.fixture(scope="module")
def runs(run_several, identities, stripes, tmp_path_factory, thorough) -> dict[str, Outcome]:
    folder, found = tmp_path_factory.mktemp("runs"), {}
    recipes = {kind: copy(folder / f"{kind}.py", CHANGE.replace(HEAD, head)) for kind, head in KINDS.items()}
    for world, (processes, limit, env) in WORLDS.items():
        if world == "shards" and not thorough:
            continue
        words = ["--data", identities, *FLAGS, "--max_micro_batch_size", limit, "--output_dir", folder / "runs"]
        commands = {f"{kind} {world}": [recipe, *words] for kind, recipe in recipes.items()}
        for name, (where, origin) in MOVES.items():
            if where == world:  # of a run that has itself moved, the first checkpoint that it made
                checkpoints = sorted((found[origin].folder / "checkpoints").glob("step_*"))
                commands[name] = [recipes["sampled"], *words, "--resume", checkpoints[0]]
                if name == "two, one":
                    commands[name] += ["--checkpoint_every", 3]
        if world == "one":
            best = found["sampled two"].folder / "best"
            evaluated = [recipes["sampled"], "--output_dir", folder / "runs", "--eval_only"]
            commands["best/"] = [*evaluated, best]
            commands["checkpoint"] = [*evaluated, best.parent / "checkpoints" / f"step_{STEPS:08d}"]
            commands["other classes"] = [*evaluated, best, "--data", stripes]
            commands["of the original"] = ["recipes/cls.py", *evaluated[1:], best]
            commands["mixed"] = [recipes["cosface"], *words, "--mixup", 0.2]
        found |= run_several(processes, commands, env=env, timeout=600)
    refused = {"of the original", "mixed"}
    assert not {name: run.text for name, run in found.items() if (run.outcome == "ok") == (name in refused)}
    return found


@pytest.mark.parametrize(
    "name",
    [
        *(f"{kind} {world}" for kind in KINDS for world in ("two", "three")),
        *(pytest.param(f"{kind} shards", marks=pytest.mark.long) for kind in KINDS),
    ],
)
def test_a_head_in_parts_is_the_run_of_one_process(name: str, runs) -> None:
    whole, cut = runs[f"{name.split()[0]} one"], runs[name]
    losses, each = whole.column("train/loss"), CLASSES // 3 + 1
    assert len(losses) == STEPS
    # With a tenth of the classes as negatives, other ones in each step, the loss is too noisy to tell in a few steps.
    assert "sampled" in name or losses[-3:].mean() < losses[:3].mean(), "the compared run learns"
    on_process = {"two": f", {CLASSES // 2} on this process", "three": f", {each} on this process"}
    assert f"{CLASSES} classes{on_process.get(name.split()[1], '')}" in cut.stdout
    assert_same_training(whole, cut, start_of(whole))
    assert "margin_head.weight/exp_avg" in cut.tensors("optimizer") and len(cut.tensors("margin_head")) == 1


@pytest.mark.parametrize(
    "name",
    [name if where != "shards" else pytest.param(name, marks=pytest.mark.long) for name, (where, _) in MOVES.items()],
)
def test_a_checkpoint_moves_to_another_number_of_processes(name: str, runs) -> None:
    moved = runs[name]
    assert moved.column("step")[0] == HALF + 1 + 3 * (name != "two, one") and moved.column("step")[-1] == STEPS
    assert_same_training(runs["sampled one"], moved, start_of(runs["sampled one"]))


def test_what_leaves_the_run_is_the_embedding(runs) -> None:
    """best/ is a model of timm, evaluated alike, also on other classes; neither it nor the moving average has the head."""
    run = runs["sampled two"]
    model = timm.create_model(f"local-dir:{run.folder / 'best'}", pretrained=True).eval()
    assert model(torch.zeros(1, 3, *model.pretrained_cfg["input_size"][1:])).shape == (1, 128)
    assert load_file(run.folder / "best/model.safetensors").keys() == run.tensors("ema").keys() == run.tensors().keys()
    assert run.tensors("margin_head")["weight"].shape == (CLASSES, 128)
    last = run.read("summary.json")["last"]
    for name in ("best/", "checkpoint"):
        results = json.loads(runs[name].stdout.splitlines()[-1])
        for key in ("recall_at_1", "verification_accuracy"):
            assert results[key] == pytest.approx(last[f"eval/ema_{key}"], abs=1e-12), (name, key)
    others = json.loads(runs["other classes"].stdout.splitlines()[-1])
    assert others["count"] == 23 and 0 < others["recall_at_1"] <= 1
    assert "128 classes without names" in runs["of the original"].text, "no logits, which would be wrong numbers"
    assert "leave out --mixup" in runs["mixed"].text and not runs["mixed"].folder.exists()


@pytest.mark.long
def test_a_killed_run_is_that_of_an_undisturbed_one(launch, runs, identities, tmp_path) -> None:
    """Killed on two processes, it ends on three."""
    recipe = copy(tmp_path / "sampled.py", CHANGE.replace(HEAD, KINDS["sampled"]))
    flags = [*FLAGS, "--data", identities, "--output_dir", tmp_path / "runs", "--name", "killed", "--tracker", "none"]
    flags += ["--image_size", 32, "--crop_pct", 1, "--crop_scale", 0.7, "--hflip", 0, "--warmup_epochs", 0]
    started = launch.start("multi_cpu", recipe, *flags, "--checkpoint_every", 2)
    Interrupted(started, tmp_path / "runs/killed").at_step(5).interrupt("KILL all").gone()
    done = launch("multi_cpu", recipe, *flags, flags=["--num_processes", 3])
    assert done.returncode == 0 and "resuming from step" in done.stdout, done.stdout + done.stderr
    resumed = Outcome("ok", "", done.stdout, 0.0, tmp_path / "runs/killed")
    assert_same_training(runs["sampled one"], resumed, start_of(runs["sampled one"]))
