"""Backbone with a feature pyramid: the feature maps that a detector looks at.

A level `l` is a feature map with one cell for each 2^l x 2^l pixels of the canvas. Levels that the
backbone has go through the feature pyramid; coarser ones are made from the pyramid's coarsest.
"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock

from common.detection.models.spec import DetectorSpec
from common.errors import Refused
from common.training.timm_models import AS_PRETRAINED, check_features, create

_COARSEST = 12  # level: one cell for 4,096 pixels
# For images of any size: some models of timm have a fixed size without these.
_OF_ANY_SIZE = {"dynamic_img_size": True, "strict_img_size": False}


class Backbone(nn.Module):
    """A timm backbone and a feature pyramid: images [B, 3, H, W] -> list of [B, width, H / 2^l, W / 2^l], fine to coarse.

    H and W are multiples of `stride`; if 2^l does not divide them, the size of the level is rounded
    up.
    Source: Lin et al. 2017, "Feature Pyramid Networks for Object Detection" (arXiv:1612.03144).
    """

    def __init__(
        self,
        features: nn.Module,
        picks: dict[int, int],
        channels: list[int],
        levels: tuple[int, ...],
        width: int,
        coarser: str,
        variant: str = "own",
    ) -> None:
        """`picks`: level -> index of its map in `features`, fine to coarse; `channels` of these maps."""
        super().__init__()
        self.features, self.levels, self.width = features, levels, width
        self.stride = 2 ** max(picks)  # by which the backbone divides itself; coarser levels round up
        self._picks = list(picks.values())
        self._channels_last = getattr(features, "output_fmt", "NCHW") == "NHWC"  # Swin, MambaOut
        extra = [level for level in levels if level > max(picks)]
        self._even = variant != "own"
        is_second = variant == "torchvision_v2"
        if coarser == "convolutions":
            block, norm = Convolutions(extra, width, channels[-1] if is_second else width), None
        else:
            block, norm = Subsampling(extra), nn.BatchNorm2d if is_second else None
        self.fpn = FeaturePyramidNetwork(channels, width, block if extra else None, norm)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.features(images)
        maps = [maps[pick] for pick in self._picks]
        if self._channels_last:
            maps = [x.permute(0, 3, 1, 2).contiguous() for x in maps]
        return list(self.fpn(OrderedDict(zip(map(str, self.levels), maps, strict=False))).values())

    @property
    def trunk(self) -> nn.Module:
        """The network of timm, whose stages can be frozen; the rest is the neck."""
        return self.features.features if isinstance(self.features, SimplePyramid) else self.features

    def grid_sizes(self, canvas: tuple[int, int]) -> list[tuple[int, int]]:
        """Cells (down, across) of each level for a canvas of (H, W) pixels."""
        height, width = canvas
        return [((height - 1) // 2**level + 1, (width - 1) // 2**level + 1) for level in self.levels]

    def strides(self, canvas: tuple[int, int]) -> list[tuple[int, int]]:
        """Pixels between cells (down, across) of each level: 2^l, or as torchvision spreads the cells of levels rounded up."""
        if not self._even:
            return [(2**level, 2**level) for level in self.levels]
        return [(canvas[0] // down, canvas[1] // across) for down, across in self.grid_sizes(canvas)]


class Convolutions(ExtraFPNBlock):
    """Coarser levels by strided convolutions from the pyramid's coarsest, as P6 and P7 of FCOS and RetinaNet.

    With another number of `channels` than `width`, from the backbone's coarsest map, which has as many.
    """

    def __init__(self, levels: list[int], width: int, channels: int) -> None:
        super().__init__()
        self.of_backbone = channels != width
        for place, level in enumerate(levels):
            convolution = nn.Conv2d(width if place else channels, width, 3, stride=2, padding=1)
            nn.init.kaiming_uniform_(convolution.weight, a=1)
            nn.init.zeros_(convolution.bias)
            self.add_module(f"p{level}", convolution)  # the names that torchvision's LastLevelP6P7 has

    def forward(self, results: list[Tensor], x: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        for place, (name, convolution) in enumerate(self.named_children()):
            first = x[-1] if self.of_backbone else results[-1]
            results.append(convolution(F.relu(results[-1]) if place else first))
            names.append(name)
        return results, names


class Subsampling(ExtraFPNBlock):
    """Coarser levels of every second cell, as P6 of Faster R-CNN, without parameters."""

    def __init__(self, levels: list[int]) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, results: list[Tensor], x: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        for level in self.levels:
            results.append(results[-1][:, :, ::2, ::2])
            names.append(f"p{level}")
        return results, names


class GroupNorm(nn.GroupNorm):
    """torch's, also for groups of one channel on a map of 1 x 1: its forward refuses them, and can't be exported for that."""

    def forward(self, maps: Tensor) -> Tensor:
        return torch.group_norm(maps, self.num_groups, self.weight, self.bias, self.eps)


class SimplePyramid(nn.Module):
    """The single map of a plain vision transformer, resampled to several levels: images -> list of maps.

    Source: Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection" (arXiv:2203.16527).
    """

    def __init__(self, features: nn.Module, channels: int, level: int, levels: list[int]) -> None:
        super().__init__()
        self.features = features
        self.resample = nn.ModuleList(_resample(channels, other - level) for other in levels)

    def forward(self, images: Tensor) -> list[Tensor]:
        plain = self.features(images)[-1]
        return [resample(plain) for resample in self.resample]


def build_backbone(spec: DetectorSpec, coarser: str) -> Backbone:
    """The features of the timm model `spec.model`, with a feature pyramid from the first to the second of `spec.levels`.

    `coarser` says how levels are made that the backbone does not have: by "convolutions" or by
    "subsampling". Raises `Refused` for an unknown name, weights out of reach, and levels that the
    model has no features for.
    """
    name, (lowest, highest) = spec.model, spec.levels
    if not 1 <= lowest <= highest <= _COARSEST:
        raise Refused(
            f"--levels {lowest}-{highest}: the first is at least 1 and at most the second, which is at most {_COARSEST}"
        )
    features = _create(spec)
    normalization, info = features.pretrained_cfg, features.feature_info
    # The deepest of each level.
    found = {math.log2(reduction): place for place, reduction in enumerate(info.reduction())}
    picks = {level: found[level] for level in range(lowest, highest + 1) if level in found}
    channels, indices = ([column[pick] for pick in picks.values()] for column in (info.channels(), info.out_indices))
    kept = {name: value for name, value in features.created_with.items() if name in _OF_ANY_SIZE}
    kept |= AS_PRETRAINED.get(normalization["architecture"], {})
    arguments = {"model_name": normalization["architecture"], "out_indices": indices, **kept}
    if len(found) == 1 and 4 in found and spec.levels != (4, 4):
        made = list(range(lowest, max(lowest, min(highest, 5)) + 1))
        channels = [info.channels()[-1]] * len(made)
        torch.manual_seed(spec.seed + 1)
        features = SimplePyramid(features, channels[0], 4, made)
        picks = {level: place for place, level in enumerate(made)}
    elif list(picks) != list(range(lowest, int(min(highest, max(found))) + 1)) or not picks:
        strides = ", ".join(str(reduction) for reduction in sorted(set(info.reduction())))
        raise Refused(f"--levels {lowest}-{highest}: {name} has features at strides {strides} (level l is stride 2^l)")
    elif max(picks) < max(found):  # layers after the last map in use would have no gradient
        features = _create(spec, out_indices=indices)
        picks = {level: place for place, level in enumerate(picks)}
    if not isinstance(features, SimplePyramid):
        check_features(features, arguments)
    torch.manual_seed(spec.seed + 2)
    backbone = Backbone(features, picks, channels, tuple(range(lowest, highest + 1)), spec.width, coarser, spec.variant)
    backbone.pretrained_cfg = normalization  # with the mean and standard deviation of its images
    backbone.arguments = arguments  # with which `timm.create_model(features_only=True)` makes the same features
    return backbone


def _resample(width: int, by: int) -> nn.Module:
    """[B, width, H, W] -> [B, width, H / 2^by, W / 2^by], finer where `by` is negative."""
    if by > 0:
        return nn.MaxPool2d(1, stride=2**by)
    steps = [nn.ConvTranspose2d(width, width, 2, stride=2) for _ in range(-by)]
    between = [layer for step in steps for layer in (step, nn.GroupNorm(1, width), nn.GELU())]
    return nn.Sequential(*between[:-2])


def _create(spec: DetectorSpec, **options) -> nn.Module:
    return create(
        spec.model,
        pretrained=spec.pretrained,
        seed=spec.seed,
        wishes={"drop_path_rate": spec.drop_path, **_OF_ANY_SIZE},
        optional=tuple(_OF_ANY_SIZE),
        features_only=True,
        **options,
    )
