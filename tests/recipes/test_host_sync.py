"""Does a step of the classification recipe ever make the host wait for a GPU?

Between two optimizer steps of the real `main` torch raises where the host would wait. (Without a GPU the same is asked of
what varies a batch, with tensors that say that they are on one: tests/common/test_no_host_sync.py.)
"""

from pathlib import Path

import pytest
import torch
from PIL import Image

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

STEPS = """
import sys
from pathlib import Path
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from common.run import Run
from tests.recipes.several import load

steps = 0

def look(*_):
    global steps
    steps += 1
    if steps == 5:  # what is made once has been made
        torch.cuda.set_sync_debug_mode("error")
    if steps == 15:
        torch.cuda.set_sync_debug_mode("default")
        print("no step waited", flush=True)
        sys.exit(0)

observe = Run.observe

def log_and_observe(run, step, losses, *others):
    run.log({"train/aux": losses ** 2, "train/own": 0.5})  # as a copied recipe may
    observe(run, step, losses, *others)

Run.observe = log_and_observe
recipe = load(Path("recipes/cls.py"))
register_optimizer_step_post_hook(look)
sys.argv[0] = "cls.py"
recipe.main()
"""

PHOTOGRAPHS = "--color_jitter 0.4 --random_erasing 0.25 --hflip 0.5 --label_smoothing 0.1 --channels_last --clip 1"
CASES = {
    "plain": ("no", ""),
    "bf16": ("bf16", f"{PHOTOGRAPHS} --mixup 0.2 --cutmix 1 --ema_decay 0.99"),
    "fp16": ("fp16", f"{PHOTOGRAPHS} --clip_mode agc --ema_decay 0.99"),
    "sgd": ("fp16", "--opt sgd --loss bce --class_weights balanced"),
    "drop path": ("bf16", "--model test_vit --drop_path 0.2 --drop 0.1 --layer_decay 0.8"),
    "group norm": ("bf16", "--batch_norm group --norm_batch_size 8 --max_micro_batch_size 16"),
    "decoded on the device": (
        "bf16",
        f"{PHOTOGRAPHS} --decode device --data JPEGS --model test_resnet --image_size 32",
    ),
    "compiled": ("bf16", f"{PHOTOGRAPHS} --mixup 0.2 --compile"),
}


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("jpegs")
    for place in range(80):
        file = folder / f"class {place % 2}" / f"{place}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.effect_noise((80, 60), 40 + place % 2).convert("RGB").save(file)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_no_step_waits_for_the_device(launch, jpegs: Path, tmp_path: Path, name: str) -> None:
    precision, flags = CASES[name]
    words = (
        "--global_batch_size 32 --max_steps 1000 --eval_every 1000 --checkpoint_every 1000 --tracker none --workers 2"
    )
    words = [word.replace("JPEGS", str(jpegs)) for word in f"{words} {flags}".split()]
    env = {"ACCELERATE_MIXED_PRECISION": precision}
    done = launch.start_python("-c", STEPS, *words, "--output_dir", tmp_path, env=env).finish(300)
    assert done.returncode == 0 and "no step waited" in done.stdout, done.stderr
