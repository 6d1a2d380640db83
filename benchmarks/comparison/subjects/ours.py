"""The recipes of this repository: CPU; small models; a checkpoint each 5 steps."""

from pathlib import Path

from data import CLASSIFICATION, DETECTION
from launching import Launch, run_script

VARIANTS = {"cls.py, float64": CLASSIFICATION, "cls.py, float32": CLASSIFICATION}
VARIANTS |= {"det.py, float64": DETECTION, "det.py, float32": DETECTION}
METRIC = r'"(?:top1|AP)": ([\d.]+)'
RECIPES = Path(__file__).resolve().parents[3] / "recipes"
ARGS = {
    "cls.py": """--model test_vit --image_size 32 --crop_pct 1 --global_batch_size 24
        --lr 0.02 --lr_batch_size 24 --warmup_epochs 0""",
    "det.py": """--detector fcos --model test_resnet --levels 3-4 --width 32 --convolutions 1
        --short_sides 96 --long_side 96 --batch_norm frozen --global_batch_size 6
        --lr 0.01 --lr_batch_size 6""",
}
ARGS_OF_BOTH = "--name run --epochs 2 --opt momentum --checkpoint_every 5"
NO_AUGMENTATION = {"cls.py": " --crop_scale 1 --hflip 0", "det.py": " --hflip 0"}


def train(launch: Launch) -> None:
    recipe, dtype = launch.variant.split(", ")
    args = (
        f"{ARGS[recipe]} {ARGS_OF_BOTH} --data {launch.data} --seed {launch.seed} --dtype {dtype}"
    )
    if not launch.augment:
        args += NO_AUGMENTATION[recipe]
    if launch.weights:
        args = f"--eval_only {launch.weights}/runs/run/best"
    run_script(RECIPES / recipe, f"{args} --workers 0 --tracker none")
