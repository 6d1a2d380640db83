"""A sharded run (FSDP2) is the run of one process: losses, weights, statistics, moving averages, evaluations, `best/`.

Shares and numbers of evaluated batches are unequal, and on three processes one has no batch to evaluate. All cases of one
world run in one launch.
"""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.outcomes import Outcome, assert_same_training, identical, start_of
from tests.recipes import copied

STEPS, HALF = 12, 6
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
HYBRID = FSDP | {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
# Weights are kept for the backward pass, which FSDP2 files say in another way.
ZERO2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}

# A copy, as any person's, that says what its parameters are: a run that was not sharded would agree, too.
KINDS = """\
@@ main
         network, optimizer = run.prepare(model, optimizer, schedule, samples, evaluated, losses_of)
+        kinds = sorted({type(parameter.data).__name__ for parameter in network.parameters()})
+        run.say(f"parameters: {', '.join(kinds)}")
"""
VARIED = "--augment rand-m5-n1 --random_erasing 0.25 --drop_path 0.1 --mixup 0.2 --cutmix 0.2 --ema_decay 0.9"
OF_DET = (
    "--short_sides 80,96 --long_side 128 --hflip 0.3 --mosaic 0.3 --mixup 0.3 --width 32 --clip 1 "
    "--ema_decay 0.9 --global_batch_size 7"
)
OF_DETR = f"{OF_DET} --short_sides 64,96 --long_side 800 --batch_norm frozen"


@dataclass(frozen=True)
class Case:
    flags: str
    worlds: dict[str, int] = field(
        default_factory=dict
    )  # name -> the most samples that one of its processes takes at once
    long: tuple[str, ...] = ()  # worlds that are left to the long tests
    recipe: str = "cls"


UNEQUAL = {"one": 22, "two": 5, "three": 12}
CASES = {
    "vit": Case(
        f"--model test_vit --lr 2e-3 {VARIED} --layer_decay 0.8 --clip 1 --global_batch_size 22",
        UNEQUAL | {"hybrid": 6, "zero2": 5, "five": 5},
        ("five", "zero2", "hybrid"),
    ),
    "convnext": Case(
        f"--model test_convnext --opt muon --lr 2e-3 {VARIED} --clip 0.1 --clip_mode agc --grad_checkpointing "
        "--global_batch_size 22",
        {"one": 22, "two": 12, "three": 12},
        ("three",),
    ),
    "resnet-group": Case(
        f"--model test_resnet --lr 5e-3 {VARIED} --batch_norm group --norm_batch_size 4 --global_batch_size 24",
        {"one": 24, "two": 8, "three": 4},
        ("three",),
    ),
    "resnet-global": Case(
        f"--model test_resnet --opt sgd --lr 0.1 {VARIED} --batch_norm global --global_batch_size 22",
        {"one": 22, "two": 22, "three": 22},
        ("one", "two", "three"),
    ),
    "resnet-thawing": Case(
        "--model test_resnet --lr 5e-3 --batch_norm group --norm_batch_size 6 --freeze_stages 3 --unfreeze_epochs 0.5,1,1.5 "
        "--backbone_lr_factor 0.5 --head_lr_factor 2 --clip 1 --ema_decay 0.9 --global_batch_size 24",
        {"one": 24, "two": 6},
    ),
    "compiled": Case(
        "--model test_vit --lr 2e-3 --drop_path 0.1 --clip 1 --ema_decay 0.9 --global_batch_size 22 --compile",
        {"one": 22, "two": 5},
        ("one", "two"),
    ),
    "fcos": Case(
        f"--detector fcos --batch_norm frozen --drop_path 0.1 {OF_DET}",
        {"one": 8, "two": 4, "three": 4},
        ("three",),
        "det",
    ),
    "retinanet": Case(
        f"--detector retinanet --batch_norm frozen {OF_DET}", {"one": 8, "two": 2}, ("one", "two"), "det"
    ),
    "faster_rcnn": Case(
        f"--detector faster_rcnn --batch_norm frozen {OF_DET}", {"one": 8, "two": 2}, ("one", "two"), "det"
    ),
    "rtdetr_v2": Case(f"--detector rtdetr_v2 --lr 2e-4 {OF_DETR}", {"one": 8, "two": 2}, ("one", "two"), "det"),
    "dfine": Case(f"--detector dfine --lr 2e-4 {OF_DETR}", {"one": 8, "two": 2}, ("one", "two"), "det"),
}
WORLDS = {
    "one": (1, {}),
    "two": (2, FSDP),
    "three": (3, FSDP),
    "hybrid": (4, HYBRID),
    "zero2": (2, ZERO2),
    "five": (5, FSDP),
}
# Runs that begin with a checkpoint of another strategy: name -> world, and the run that it resumes from.
MOVED = {
    "one to two": ("two", "vit one"),
    "two to three": ("three", "vit two"),
    "three to one": ("last", "vit three"),
    "two to DDP": ("ddp", "vit two"),
}


def flags(case: Case, limit: int, data: Path) -> list[str]:
    cadence = f"--log_every 1 --eval_every {STEPS} --checkpoint_every {HALF} --keep_checkpoints 9"
    words = f"--data {data} {case.flags} --max_micro_batch_size {limit} --max_steps {STEPS} --dtype float64 {cadence}"
    return words.split()


@pytest.fixture(scope="module")
def runs(run_several, stripes, scenes, tmp_path_factory, thorough) -> dict[str, Outcome]:
    """Every run by its case and world, and those that move."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    recipes = {recipe: copied.copy(folder / f"{recipe}.py", KINDS, recipe=recipe) for recipe in ("cls", "det")}
    worlds = WORLDS | {"last": (1, {}), "ddp": (2, {})}
    for world, (processes, env) in worlds.items():
        commands = {}
        for name, case in CASES.items():
            if world in case.worlds and (thorough or world not in case.long):
                data = {"cls": stripes, "det": scenes}[case.recipe]
                commands[f"{name} {world}"] = [recipes[case.recipe], *flags(case, case.worlds[world], data)]
        for name, (where, origin) in MOVED.items():
            if where == world:
                words = flags(CASES["vit"], 12, stripes)
                checkpoint = found[origin].folder / "checkpoints" / f"step_{HALF:08d}"
                commands[name] = [recipes["cls"], *words, "--resume", checkpoint]
        for words in commands.values():
            words += ["--output_dir", folder / "runs"]
        if commands:
            found |= run_several(processes, commands, env=env, timeout=900)
    half = f"--data {stripes} --model test_vit --lr 2e-3 {VARIED} --global_batch_size 22 --max_steps 3 --log_every 1".split()
    for name, env in {"bf16 FSDP": FSDP, "bf16 DDP": {}}.items():
        command = [recipes["cls"], *half, "--output_dir", folder / "runs"]
        found |= run_several(2, {name: command}, env=env | {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert not {name: run.text for name, run in found.items() if run.outcome != "ok"}
    return found


def assert_same(whole: Outcome, cut: Outcome) -> None:
    """Also of `best/`."""
    assert_same_training(whole, cut, start_of(whole))
    mine, theirs = (load_file(run.folder / "best/model.safetensors") for run in (cut, whole))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():  # under names of the export's own, which `start_of` may not have
        torch.testing.assert_close(mine[name], tensor, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    "name, world",
    [
        pytest.param(name, world, id=f"{name}-{world}", marks=[pytest.mark.long] * (world in case.long))
        for name, case in CASES.items()
        for world in case.worlds
        if world != "one"
    ],
)
def test_a_sharded_run_is_that_of_one_process(name: str, world: str, runs) -> None:
    whole, cut = runs[f"{name} one"], runs[f"{name} {world}"]
    assert "parameters: Tensor" in whole.stdout
    assert "parameters: DTensor\n" in cut.stdout
    losses = whole.column("train/loss")
    assert losses[-3:].mean() < losses[:3].mean(), "the compared run learns"
    assert_same(whole, cut)


def test_under_bf16_steps_are_those_of_ddp_bit_for_bit(runs) -> None:
    """Weights and gradients stay in single precision; Accelerate's own policy for FSDP would cast them."""
    sharded, plain = runs["bf16 FSDP"], runs["bf16 DDP"]
    assert "parameters: DTensor\n" in sharded.stdout and "bf16" in sharded.stdout
    assert sharded.column("train/loss").tolist() == plain.column("train/loss").tolist()
    assert all(identical(sharded.tensors(file), plain.tensors(file)) for file in ("model", "ema", "optimizer"))


@pytest.mark.parametrize("name", MOVED)
def test_a_run_moves_between_shards_ddp_and_one_process(name: str, runs) -> None:
    """Half-way, from the checkpoint of another strategy."""
    moved = runs[name]
    assert moved.column("step").tolist() == [*range(HALF + 1, STEPS + 1)]
    assert ("parameters: DTensor\n" in moved.stdout) == (MOVED[name][0] in ("two", "three"))
    assert_same(runs["vit one"], moved)
