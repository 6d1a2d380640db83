"""Backbone with a feature pyramid. Level `l` has a cell for each 2^l x 2^l pixels."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock

from common.detection.models.spec import DetectorSpec
from common.errors import Refused
from common.training.timm_models import PRETRAINED_OPTIONS, check_features, create_model

_COARSEST = 12  # level: one cell for 4,096 pixels
# For images of any size: some models of timm have a fixed size without these.
_OF_ANY_SIZE = {"dynamic_img_size": True, "strict_img_size": False}


class Backbone(nn.Module):
    """A timm backbone and a feature pyramid: images [B, 3, H, W] -> list of [B, width, H / 2^l, W / 2^l].

    H and W are multiples of `stride`; if 2^l does not divide them, the size of the level is rounded
    up. timm makes the same features with `arguments`. Source: Lin et al. 2017, "Feature Pyramid
    Networks for Object Detection" (arXiv:1612.03144).
    """

    def __init__(self, spec: DetectorSpec, levels: tuple[int, int], coarser: str) -> None:
        """A pyramid from the first to the second of `levels` over the timm model `spec.model`.

        Levels that it does not have are made by `coarser`, "convolutions" or "subsampling". Raises `Refused`.
        """
        super().__init__()
        lowest, highest = levels
        if not 1 <= lowest <= highest <= _COARSEST:
            raise Refused(
                f"--levels {lowest}-{highest}: must be two levels from 1 to {_COARSEST}, the "
                "finer first"
            )
        features = _create_features(spec)
        self.pretrained_cfg = features.pretrained_cfg
        self.levels = tuple(range(lowest, highest + 1))
        self.width = spec.width
        info = features.feature_info
        # The deepest of each level.
        map_index = {
            math.log2(reduction): index for index, reduction in enumerate(info.reduction())
        }
        feature_levels = [level for level in self.levels if level in map_index]
        picks = [map_index[level] for level in feature_levels]
        channels = [info.channels()[pick] for pick in picks]
        self.arguments = _list_arguments(features, [info.out_indices[pick] for pick in picks])
        if list(map_index) == [4] and levels != (4, 4):
            feature_levels = list(range(lowest, max(lowest, min(highest, 5)) + 1))
            channels = [info.channels()[-1]] * len(feature_levels)
            torch.manual_seed(spec.seed + 1)
            features = SimplePyramid(features, channels[0], feature_levels)
            picks = list(range(len(channels)))
        else:
            deepest = max(map_index)
            if not picks or feature_levels != list(range(lowest, int(min(highest, deepest)) + 1)):
                strides = ", ".join(map(str, sorted(set(info.reduction()))))
                problem = f"{spec.model} has features at strides {strides} (level l is stride 2^l)"
                raise Refused(f"--levels {lowest}-{highest}: {problem}")
            # Layers after the last map in use would have no gradient.
            if feature_levels[-1] < deepest:
                features = _create_features(spec, out_indices=self.arguments["out_indices"])
                picks = list(range(len(channels)))
            check_features(features, self.arguments)
        self.features = features
        self.stride = 2 ** feature_levels[-1]  # coarser levels round up
        self._picks = picks
        self._is_even = spec.variant != "own"
        self._channels_last = getattr(features, "output_fmt", "NCHW") == "NHWC"  # Swin, MambaOut
        torch.manual_seed(spec.seed + 2)
        extra_levels = [level for level in self.levels if level > feature_levels[-1]]
        self.fpn = _build_fpn(spec, channels, extra_levels, is_convolved=coarser == "convolutions")

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

    def grid_sizes(self, canvas: Sequence[int]) -> list[tuple[int, int]]:
        """Cells (down, across) of each level for a canvas of (H, W) pixels."""
        height, width = canvas
        return [
            ((height - 1) // 2**level + 1, (width - 1) // 2**level + 1) for level in self.levels
        ]

    def strides(self, canvas: Sequence[int]) -> list[tuple[int, int]]:
        """Pixels between cells (down, across) of each level: 2^l, or spread as torchvision does."""
        if not self._is_even:
            return [(2**level, 2**level) for level in self.levels]
        return [
            (canvas[0] // down, canvas[1] // across) for down, across in self.grid_sizes(canvas)
        ]


def _create_features(spec: DetectorSpec, **options: Any) -> nn.Module:
    """The timm model that gives maps of features."""
    return create_model(
        spec.model,
        pretrained=spec.pretrained,
        seed=spec.seed,
        requested={"drop_path_rate": spec.drop_path, **_OF_ANY_SIZE},
        optional=tuple(_OF_ANY_SIZE),
        features_only=True,
        **options,
    )


def _list_arguments(features: nn.Module, out_indices: list[int]) -> dict[str, Any]:
    """With what timm makes the same features."""
    architecture = features.pretrained_cfg["architecture"]
    sizes = {name: value for name, value in features.create_kwargs.items() if name in _OF_ANY_SIZE}
    return (
        {"model_name": architecture, "out_indices": out_indices}
        | sizes
        | PRETRAINED_OPTIONS.get(architecture, {})
    )


def _build_fpn(
    spec: DetectorSpec, channels: list[int], extra_levels: list[int], is_convolved: bool
) -> FeaturePyramidNetwork:
    """A pyramid over maps with so many channels, and coarser levels above it."""
    is_second = spec.variant == "torchvision_v2"
    coarser = None
    if extra_levels:
        convolved_channels = channels[-1] if is_second else spec.width
        coarser = Coarser(extra_levels, spec.width, convolved_channels if is_convolved else 0)
    norm = nn.BatchNorm2d if is_second and not is_convolved else None
    return FeaturePyramidNetwork(channels, spec.width, coarser, norm)


class Coarser(ExtraFPNBlock):
    """Coarser levels by strided convolutions, as P6 and P7 of RetinaNet, with torchvision's names.

    They are made from the pyramid's coarsest map, or if `channels` are not `width`, from the
    backbone's, which has as many. With 0 channels: of every second cell, as P6 of Faster R-CNN.
    """

    def __init__(self, levels: list[int], width: int, channels: int) -> None:
        super().__init__()
        self.names, self.of_backbone = [f"p{level}" for level in levels], channels not in (0, width)
        for name in self.names if channels else ():
            convolution = nn.Conv2d(channels, width, 3, stride=2, padding=1)
            nn.init.kaiming_uniform_(convolution.weight, a=1)
            nn.init.zeros_(convolution.get_parameter("bias"))
            self.add_module(name, convolution)
            channels = width

    def forward(
        self, results: list[Tensor], x: list[Tensor], names: list[str]
    ) -> tuple[list[Tensor], list[str]]:
        finest, convolutions = x[-1] if self.of_backbone else results[-1], [*self.children()]
        for convolution in convolutions:
            results.append(convolution(finest))
            finest = F.relu(results[-1])
        for _ in self.names[len(convolutions) :]:
            results.append(results[-1][:, :, ::2, ::2])
        return results, names + self.names


class GroupNorm(nn.GroupNorm):
    """torch's, also for groups of one channel on a map of 1 x 1, which its forward refuses."""

    def forward(self, maps: Tensor) -> Tensor:
        return torch.group_norm(maps, self.num_groups, self.weight, self.bias, self.eps)


class SimplePyramid(nn.Module):
    """The map of a plain vision transformer, of level 4, resampled to several: images -> list of maps.

    Source: Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection"
    (arXiv:2203.16527).
    """

    def __init__(self, features: nn.Module, channels: int, levels: list[int]) -> None:
        super().__init__()
        self.features = features
        self.resample = nn.ModuleList(_resample(channels, level - 4) for level in levels)

    def forward(self, images: Tensor) -> list[Tensor]:
        plain = self.features(images)[-1]
        return [resample(plain) for resample in self.resample]


def _resample(width: int, by: int) -> nn.Module:
    """[B, width, H, W] -> [B, width, H / 2^by, W / 2^by], finer where `by` is negative."""
    if by > 0:
        return nn.MaxPool2d(1, stride=2**by)
    steps = [nn.ConvTranspose2d(width, width, 2, stride=2) for _ in range(-by)]
    between = [layer for step in steps for layer in (step, nn.GroupNorm(1, width), nn.GELU())]
    return nn.Sequential(*between[:-2])
