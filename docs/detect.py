"""Detects objects in photos with a `best/` of FCOS, RetinaNet, Faster or Mask R-CNN, without this project.

Run it as `python detect.py runs/NAME/best photo.jpg ...`. It needs torch, torchvision, timm and
safetensors. It prints photo, class, score, and left, top, right and bottom in pixels, best first.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torchvision.models import detection as tv
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7
from torchvision.transforms.v2 import functional as F


def open_image(file):
    """Upright RGB as in training: transparency lies on white, and more than 8 bits are scaled to 8."""
    image = ImageOps.exif_transpose(Image.open(file))
    # 0 is black and 65535 white, or 1.0 of floats; beyond that, the extremes are.
    if image.mode[0] in "IF":
        values = np.asarray(image, np.float32)
        low, high = 0, 1 if image.mode == "F" else 65535
        if values.min() < low or values.max() > high:
            low, high = values.min(), values.max()
        image = Image.fromarray(np.rint((values - low) * (255 / (high - low))).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


folder, *photos = sys.argv[1:]
config = json.loads(Path(folder, "config.json").read_text())
width, levels, classes = config["width"], config["levels"], len(config["classes"])
shift = int("rcnn" in config["family"])  # class 0 is background
variant = config.get("variant", "own")
second = variant == "torchvision_v2"
norm = torch.nn.BatchNorm2d if second else None


class Backbone(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.out_channels = (
            timm.create_model(**config["backbone"], features_only=True),
            width,
        )
        channels = self.features.feature_info.channels()
        deepest = channels[-1] if second else width
        coarser = {(): None, (6,): LastLevelMaxPool(), (6, 7): LastLevelP6P7(deepest, width)}[
            tuple(config["coarser"])
        ]
        self.fpn = FeaturePyramidNetwork(channels, width, coarser, norm if shift else None)

    def forward(self, images):
        channels_last = getattr(self.features, "output_fmt", "NCHW") == "NHWC"  # Swin, MambaOut
        maps = [x.permute(0, 3, 1, 2) if channels_last else x for x in self.features(images)]
        return self.fpn(dict(zip(map(str, levels), maps, strict=False)))


class Anchors(tv.anchor_utils.AnchorGenerator):
    def grid_anchors(self, sizes, strides):
        if variant == "own":  # exact strides, also where a coarse level is rounded up
            strides = [[torch.tensor(2**level)] * 2 for level in levels]
        return super().grid_anchors(sizes, strides)


backbone, anchors = Backbone(), Anchors(**config["anchors"])
if config["family"] == "fcos":
    head = tv.fcos.FCOSHead(width, 1, classes, config["convolutions"])
    model = tv.FCOS(backbone, **config["options"], anchor_generator=anchors, head=head)
elif config["family"] == "retinanet":
    groups = None if variant == "torchvision" else partial(torch.nn.GroupNorm, 32)
    head = tv.retinanet.RetinaNetHead(width, 9, classes, norm_layer=groups)
    for part in head.children():
        part.conv = part.conv[: config["convolutions"]]
    model = tv.RetinaNet(backbone, **config["options"], anchor_generator=anchors, head=head)
else:
    pools = {"box_roi_pool": 7} | ({"mask_roi_pool": 14} if config["family"] == "mask_rcnn" else {})
    names = [str(level) for level in levels if level not in config["coarser"]]
    pools = {
        name: MultiScaleRoIAlign(names, size, sampling_ratio=2) for name, size in pools.items()
    }
    if second:
        pools["rpn_head"] = tv.rpn.RPNHead(width, 3, conv_depth=2)
        pools["box_head"] = tv.faster_rcnn.FastRCNNConvFCHead(
            (width, 7, 7), [width] * 4, [1024], norm
        )
        if config["family"] == "mask_rcnn":
            pools["mask_head"] = tv.mask_rcnn.MaskRCNNHeads(width, [256] * 4, 1, norm)
    kind = tv.MaskRCNN if config["family"] == "mask_rcnn" else tv.FasterRCNN
    model = kind(backbone, **config["options"], rpn_anchor_generator=anchors, **pools)
model.load_state_dict(load_file(Path(folder, "model.safetensors")))
model.eval()

for name in photos:
    photo = open_image(name)
    # As the evaluation resizes. torchvision would do it without antialiasing and find less; now it
    # has nothing to resize.
    scale = min(config["short_side"] / min(photo.size), config["long_side"] / max(photo.size))
    size = [max(1, round(side * scale)) for side in photo.size]
    pixels = F.resize(F.to_image(photo), size[::-1], antialias=True)
    with torch.no_grad():
        found = model([pixels / 255])[0]
    boxes = found["boxes"] * (torch.tensor(photo.size) / torch.tensor(size)).repeat(2)
    for box, label, score in zip(
        boxes.tolist(), found["labels"] - shift, found["scores"], strict=True
    ):
        print(name, config["classes"][label], f"{score:.6f}", *(f"{side:.2f}" for side in box))
