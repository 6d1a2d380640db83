"""Detectors of other tools: backbones in timm, differences of the families, lengths and sizes in our units."""

from collections.abc import Iterable

import timm

from tools.adopt.adoption import facts, rounded

TAGS = "tv_in1k tv2_in1k gluon_in1k fb_swsl_ig1b_ft_in1k pycls_in1k ms_in1k fb_in1k".split()  # by preference
_OF_FASTER_RCNN = (
    "an image's losses are divided by 256 anchors and 512 proposals, not by the number that was sampled",
    "box losses are smooth L1; RoIAlign takes 2 x 2 samples for each of its cells",
)
_DIFFERENT = {
    "faster_rcnn": _OF_FASTER_RCNN,
    "mask_rcnn": _OF_FASTER_RCNN,
    "retinanet": ("the heads have GroupNorm", "box losses are smooth L1"),
    "fcos": (
        "the head is torchvision's: centerness from the boxes' branch, points within 1.5 strides of a box's centre, GIoU",
        "losses are divided by the number of points in the global batch, not in a GPU's batch",
    ),
}


def differences(detector: str) -> tuple[str, ...]:
    """What is different for all configs of a family."""
    return (
        *_DIFFERENT[detector],
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


def images_of(names: Iterable[str]) -> int:
    """Training images of these data sets together; 0 if one is not known."""
    sizes = [facts("detectron2")["images"].get(name, 0) for name in names]
    return sum(sizes) if all(sizes) else 0


def sides_of(shorts: Iterable[int], ranged: bool, stride: int = 32) -> str:
    """`--short_sides`; a range in steps: (640, 800) -> 640,672,...,800."""
    low, *_, high = sorted(shorts) * 2
    return ",".join(map(str, sorted({*range(low, high, stride), high}) if ranged else shorts))


def epochs_of(steps: float, batch: int, images: int) -> float | int:
    """Steps as epochs; never more steps than asked for, though epochs round up to steps."""
    return rounded((steps - 0.01) * batch / images) if steps > 1 else rounded(steps * batch / images)


def falls(epochs: Iterable[float], beyond: float = 10**6) -> str:
    """`--step_epochs` for these epochs. One number alone would mean a fall every so many."""
    text = [str(rounded(epoch)) for epoch in epochs]
    return ",".join(text if len(text) != 1 else [*text, str(rounded(beyond))])
