"""Detectors of other tools: which backbone of timm is theirs, and how the families here differ from theirs."""

import timm

TAGS = "tv_in1k tv2_in1k gluon_in1k fb_swsl_ig1b_ft_in1k pycls_in1k ms_in1k fb_in1k".split()  # by preference
DIFFERENT = {
    "faster_rcnn": (
        "an image's losses are divided by 256 anchors and 512 proposals, not by the number that was sampled",
        "box losses are smooth L1; RoIAlign takes 2 x 2 samples for each of its cells",
    ),
    "retinanet": ("the heads have GroupNorm", "box losses are smooth L1"),
    "fcos": (
        "the head is torchvision's: centerness from the boxes' branch, points within 1.5 strides of a box's centre, GIoU",
        "losses are divided by the number of points in the global batch, not by that of a GPU",
    ),
}
DIFFERENT["mask_rcnn"] = DIFFERENT["faster_rcnn"]
ALWAYS = (
    "images without boxes are used",
    "norms and biases have no weight decay; images are downscaled with antialiasing",
)


def resnet(depth: int, groups: int = 1, width: int = 64) -> str:
    """timm's name of a ResNet or ResNeXt, with the tag of weights from ImageNet; "" if it has none."""
    return pretrained(f"resnet{depth}" if groups == 1 else f"resnext{depth}_{groups}x{width}d")


def pretrained(name: str) -> str:
    """`name` with the tag of its weights from ImageNet-1k; "" if timm has no such model."""
    if not timm.is_model(name):
        return ""
    tag = next((tag for tag in TAGS if f"{name}.{tag}" in timm.list_pretrained(f"{name}.*")), "")
    return f"{name}.{tag}" if tag else name


def differences(detector: str) -> tuple[str, ...]:
    """What is different for all configs of a family."""
    return *DIFFERENT[detector], *ALWAYS


def steps_between(low: int, high: int, stride: int = 32) -> str:
    """Sides from `low` to `high`, for a range that is drawn from: (640, 800) -> 640,672,...,800."""
    return ",".join(map(str, sorted({*range(low, high, stride), high})))
