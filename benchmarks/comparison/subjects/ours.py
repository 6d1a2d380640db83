"""The classification recipe of this repository."""

from pathlib import Path

from launching import Launch, run_script

VARIANTS = {"cls.py, float64": 0, "cls.py, float32": 0}  # 0: by the length of the resumed run
VERSION = "this commit"
METRIC = r'"top1": ([\d.]+)'
CHANGES = "CPU; a checkpoint each 5 steps"
RECIPE = Path(__file__).resolve().parents[3] / "recipes/cls.py"
ARGS = """--name run --model test_vit --image_size 32 --crop_pct 1 --global_batch_size 24 --epochs 2
    --opt momentum --lr 0.02 --lr_batch_size 24 --warmup_epochs 0 --checkpoint_every 5
    --workers 0 --tracker none"""


def train(launch: Launch) -> None:
    args = f"{ARGS} --data {launch.data} --seed {launch.seed} --dtype {launch.variant.split()[-1]}"
    if not launch.augment:
        args += " --crop_scale 1 --hflip 0"
    if launch.weights:
        args = f"--eval_only {launch.weights}/runs/run/best --workers 0 --tracker none"
    run_script(RECIPE, args)
