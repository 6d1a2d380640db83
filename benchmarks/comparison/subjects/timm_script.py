"""timm's train.py: CPU, no device ids; test_vit at 32 pixels; SGD with momentum; no warm-up."""

from data import CLASSIFICATION
from launching import CHECKOUTS, Launch, run_script

RECOVERY = "timm train.py, recovery-1-4"
VARIANTS = {"timm train.py, last": CLASSIFICATION, RECOVERY: CLASSIFICATION}
SAVED_AT = {RECOVERY: 21}
METRIC = r"Acc@1: +\S+ +\( *([\d.]+)\)"
ARGS = """--val-split val --model test_vit --img-size 32 --input-size 3 32 32 --crop-pct 1
    --num-classes 10 --device cpu --epochs 2 --opt momentum --lr 0.02 --warmup-epochs 0
    --output output --experiment run --recovery-interval 5"""


def train(launch: Launch) -> None:
    args = f"{ARGS} --data-dir {launch.data} --batch-size {launch.batch_size} --seed {launch.seed}"
    if not launch.augment:
        args += " --no-aug"
    if launch.resume:
        args += f" --resume output/run/{launch.variant.split()[-1]}.pth.tar --experiment resumed"
    if launch.weights:
        args += f" --initial-checkpoint {launch.weights}/output/run/last.pth.tar --epochs 1"
    run_script(CHECKOUTS / "timm/train.py", args, {"device_ids=[device], ": ""})
