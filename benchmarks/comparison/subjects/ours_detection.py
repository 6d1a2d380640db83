"""The detection recipe of this repository."""

from data import DETECTION
from launching import Launch, run_script
from subjects.ours import RECIPE

SIZES = DETECTION
VARIANTS = {"det.py, float64": 0, "det.py, float32": 0}
VERSION = "this commit"
METRIC = r'"AP": ([\d.]+)'
CHANGES = "CPU; FCOS on test_resnet at 96 pixels; a checkpoint each 5 steps"
ARGS = """--name run --detector fcos --model test_resnet --levels 3-4 --width 32 --convolutions 1
    --short_sides 96 --long_side 96 --batch_norm frozen --global_batch_size 6 --epochs 2
    --opt momentum --lr 0.01 --lr_batch_size 6 --checkpoint_every 5 --workers 0 --tracker none"""


def train(launch: Launch) -> None:
    args = f"{ARGS} --data {launch.data} --seed {launch.seed}"
    args += f" --dtype {launch.variant.split()[-1]}"
    if not launch.augment:
        args += " --hflip 0"
    if launch.weights:
        args = f"--eval_only {launch.weights}/runs/run/best --workers 0 --tracker none"
    run_script(RECIPE.with_name("det.py"), args)
