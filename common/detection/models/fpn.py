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
# Options for images of any size: without them, some models of timm have a fixed size.
_ANY_SIZE = {"dynamic_img_size": True, "strict_img_size": False}


class Backbone(nn.Module):
    """A timm backbone and a feature pyramid: images [B, 3, H, W] -> list of [B, width, H / 2^l, W / 2^l].

    H and W are multiples of `stride`; if 2^l does not divide them, the size of the level is rounded
    up. timm makes the same features with `arguments`. Source: Lin et al. 2017, "Feature Pyramid
    Networks for Object Detection" (arXiv:1612.03144).
    """

    def __init__(self, spec: DetectorSpec, levels: tuple[int, int], coarser: str) -> None:
        """Build a pyramid from the first to the second of `levels` over the timm model `spec.model`.

        Levels that the model does not have come from `coarser`: "convolutions" or "subsampling".
        Raises `Refused`.
        """
        super().__init__()
        finest, coarsest = levels
        if not 1 <= finest <= coarsest <= _COARSEST:
            raise Refused(
                f"--levels {finest}-{coarsest}: must be two levels from 1 to {_COARSEST}, the "
                "finer first"
            )
        self.levels = tuple(range(finest, coarsest + 1))
        self.width = spec.width
        channels = self._build_features(spec)
        num_maps = len(channels)
        self.stride = 2 ** self.levels[num_maps - 1]  # coarser levels round up
        self._has_exact_strides = spec.variant == "own"
        torch.manual_seed(spec.seed + 2)
        is_convolved = coarser == "convolutions"
        self.fpn = _build_fpn(spec, channels, list(self.levels[num_maps:]), is_convolved)

    def _build_features(self, spec: DetectorSpec) -> list[int]:
        """Build the network that returns maps for the finer levels, and return their channels."""
        features = _create_features(spec)
        self.pretrained_cfg = features.pretrained_cfg
        info = features.feature_info
        finest = self.levels[0]
        coarsest = self.levels[-1]
        # The deepest map of each level.
        map_indices = {math.log2(stride): index for index, stride in enumerate(info.reduction())}
        feature_levels = [level for level in self.levels if level in map_indices]
        indices = [map_indices[level] for level in feature_levels]
        channels = [info.channels()[index] for index in indices]
        self.arguments = _list_arguments(features, [info.out_indices[index] for index in indices])
        if list(map_indices) == [4] and self.levels != (4,):
            feature_levels = list(range(finest, max(finest, min(coarsest, 5)) + 1))
            channels = [info.channels()[-1]] * len(feature_levels)
            torch.manual_seed(spec.seed + 1)
            features = SimplePyramid(features, channels[0], feature_levels)
            indices = list(range(len(channels)))
        else:
            deepest = max(map_indices)
            expected_levels = list(range(finest, int(min(coarsest, deepest)) + 1))
            if not indices or feature_levels != expected_levels:
                strides = ", ".join(map(str, sorted(set(info.reduction()))))
                raise Refused(
                    f"--levels {finest}-{coarsest}: {spec.model} has features at strides {strides} "
                    "(level l is stride 2^l)"
                )
            # Layers after the last map in use would have no gradient.
            if feature_levels[-1] < deepest:
                features = _create_features(spec, out_indices=self.arguments["out_indices"])
                indices = list(range(len(channels)))
            check_features(features, self.arguments)
        self.features = features
        self._map_indices = indices
        self._is_channels_last = getattr(features, "output_fmt", "NCHW") == "NHWC"  # Swin, MambaOut
        return channels

    def forward(self, images: Tensor) -> list[Tensor]:
        features = self.features(images)
        maps: OrderedDict[str, Tensor] = OrderedDict()
        for level, index in zip(self.levels, self._map_indices, strict=False):
            x = features[index]
            if self._is_channels_last:
                x = x.permute(0, 3, 1, 2).contiguous()
            maps[str(level)] = x
        return list(self.fpn(maps).values())

    @property
    def trunk(self) -> nn.Module:
        """The network of timm, whose stages can be frozen; the rest is the neck."""
        if isinstance(self.features, SimplePyramid):
            return self.features.features
        return self.features

    def grid_sizes(self, canvas: Sequence[int]) -> list[tuple[int, int]]:
        """Numbers of cells (down, across) of each level for a canvas of (H, W) pixels."""
        sizes = []
        for level in self.levels:
            rows, columns = [(length - 1) // 2**level + 1 for length in canvas]
            sizes.append((rows, columns))
        return sizes

    def strides(self, canvas: Sequence[int]) -> list[tuple[int, int]]:
        """Pixels between cells (down, across) of each level: 2^l, or spread as torchvision does."""
        if self._has_exact_strides:
            return [(2**level, 2**level) for level in self.levels]
        height, width = canvas
        return [(height // rows, width // columns) for rows, columns in self.grid_sizes(canvas)]


def _create_features(spec: DetectorSpec, **options: Any) -> nn.Module:
    """Create the timm model that returns maps of features."""
    return create_model(
        spec.model,
        pretrained=spec.pretrained,
        seed=spec.seed,
        requested={"drop_path_rate": spec.drop_path, **_ANY_SIZE},
        optional=tuple(_ANY_SIZE),
        features_only=True,
        **options,
    )


def _list_arguments(features: nn.Module, out_indices: list[int]) -> dict[str, Any]:
    """List the arguments with which timm creates the same features."""
    architecture = features.pretrained_cfg["architecture"]
    arguments = {"model_name": architecture, "out_indices": out_indices}
    sizes = {name: value for name, value in features.create_kwargs.items() if name in _ANY_SIZE}
    return arguments | sizes | PRETRAINED_OPTIONS.get(architecture, {})


def _build_fpn(
    spec: DetectorSpec,
    channels: list[int],
    extra_levels: list[int],
    is_convolved: bool,
) -> FeaturePyramidNetwork:
    """Build a pyramid over maps with these channels, and `extra_levels` above it."""
    is_v2 = spec.variant == "torchvision_v2"
    extra_blocks = None
    if extra_levels:
        in_channels = 0
        if is_convolved:
            in_channels = channels[-1] if is_v2 else spec.width
        extra_blocks = ExtraLevels(extra_levels, spec.width, in_channels)
    norm = nn.BatchNorm2d if is_v2 and not is_convolved else None
    return FeaturePyramidNetwork(channels, spec.width, extra_blocks, norm)


class ExtraLevels(ExtraFPNBlock):
    """Coarser levels by strided convolutions, as P6 and P7 of RetinaNet, with torchvision's names.

    They come from the pyramid's coarsest map, or if `channels` are not `width`, from the backbone's,
    which has as many. With 0 channels: by subsampling, as P6 of Faster R-CNN.
    """

    def __init__(self, levels: list[int], width: int, channels: int) -> None:
        super().__init__()
        self.names = [f"p{level}" for level in levels]
        self.is_from_backbone = channels not in (0, width)
        convolved_names = self.names if channels else []
        for name in convolved_names:
            convolution = nn.Conv2d(channels, width, kernel_size=3, stride=2, padding=1)
            nn.init.kaiming_uniform_(convolution.weight, a=1)
            nn.init.zeros_(convolution.get_parameter("bias"))
            self.add_module(name, convolution)
            channels = width

    def forward(
        self,
        results: list[Tensor],
        x: list[Tensor],
        names: list[str],
    ) -> tuple[list[Tensor], list[str]]:
        coarsest = x[-1] if self.is_from_backbone else results[-1]
        convolutions = list(self.children())
        for convolution in convolutions:
            results.append(convolution(coarsest))
            coarsest = F.relu(results[-1])
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
        self.resample = nn.ModuleList(_build_resampling(channels, level - 4) for level in levels)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.features(images)[-1]
        return [resample(x) for resample in self.resample]


def _build_resampling(channels: int, num_halvings: int) -> nn.Module:
    """Layers from [B, C, H, W] to [B, C, H / 2^n, W / 2^n], finer for negative `num_halvings`."""
    if num_halvings > 0:
        return nn.MaxPool2d(1, stride=2**num_halvings)
    layers: list[nn.Module] = []
    for _ in range(-num_halvings):
        if layers:
            layers += [nn.GroupNorm(1, channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2))
    return nn.Sequential(*layers)
