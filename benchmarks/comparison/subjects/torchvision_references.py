"""torchvision's references: CPU, gloo, no device ids; a seed. Classification: test_vit at 32 pixels.

Detection: FCOS of one convolution at 96 pixels.
"""

from data import CLASSIFICATION, DETECTION
from image_folder import build_model
from launching import CHECKOUTS, Launch, run_script
from torch import nn
from torchvision.models._api import register_model
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

VARIANTS = {
    "torchvision references, classification": CLASSIFICATION,
    "torchvision references, detection": DETECTION,
}
METRIC = r"(?:Acc@1|\(AP\) @\[ IoU=0.50:0.95 \| area=   all \| maxDets=100 \] =) ([\d.]+)"
ARGS = {
    "classification": """--model test_vit --lr 0.02 --train-crop-size 32 --val-resize-size 32
        --val-crop-size 32""",
    "detection": "--model small_fcos --lr 0.01",
}
CHANGES = {
    '"nccl"': '"gloo"',
    '"cuda"': '"cpu"',
    "torch.cuda.set_device(args.gpu)": "",
    "device_ids=[args.gpu]": "",
    "weights_only=True": "weights_only=False",
}


@register_model("test_vit")
def build_vit(**_unused) -> nn.Module:
    return build_model()


@register_model("small_fcos")
def build_fcos(num_classes: int, **_unused) -> FCOS:
    backbone = nn.Conv2d(3, 32, kernel_size=8, stride=8)
    anchors = AnchorGenerator(((8,),), ((1.0,),))
    return FCOS(backbone, num_classes, min_size=96, max_size=96, anchor_generator=anchors)


def train(launch: Launch) -> None:
    task = launch.variant.split()[-1]
    args = f"{ARGS[task]} --device cpu --epochs 2 --workers 0 --output-dir ."
    args += f" --data-path {launch.data} --batch-size {launch.batch_size}"
    checkpoint = launch.get_checkpoint("checkpoint.pth")
    if checkpoint:
        args += f" --resume {checkpoint}"
    if launch.weights:
        args += " --test-only"
    run_script(CHECKOUTS / f"vision/references/{task}/train.py", args, CHANGES)
