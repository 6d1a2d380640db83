"""Models for semantic segmentation: a timm backbone with a decoder."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.batch_plan import BatchPlan
from common.detection.models.fpn import Backbone
from common.detection.models.spec import DetectorSpec
from common.distributed.collectives import all_sum
from common.segmentation.masks import IGNORED
from common.training.timm_models import create_model, format_loaded_backbone

_LEVELS = (2, 5)  # of the feature pyramid: strides 4 to 32
_DECODER_WIDTH = 128
_GROUPS = 32  # of channels, that are normalised together


class Segmenter(nn.Module):
    """A backbone and a decoder: images [B, 3, H, W] -> logits [B, K, H / s, W / s].

    H and W are multiples of `stride`. s is 4 for the decoder `fpn`, and `stride` for `linear`.
    """

    needs_whole_step = True  # see `training.step.StepModule`
    size_flag = "--crop_size"  # see `common.training.warm_up.warm_up`

    def __init__(self, backbone: nn.Module, decoder: nn.Module, description: "Description") -> None:
        super().__init__()
        self.backbone = backbone
        self.decoder = decoder
        self.description = description
        self.stride: int = backbone.stride
        self.pretrained_cfg: dict[str, Any] = backbone.pretrained_cfg
        self.title = f"{description.decoder} decoder on {description.model}"
        self.weights_summary = ""

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.backbone(images))

    def prepare_step(
        self, step: int, batches: Sequence[Any], plan: BatchPlan, is_trial: bool
    ) -> None:
        """Set each batch's `totals` int64[2]: labelled pixels and images of the global batch.

        In a trial, the pixels are those of these batches. See `training.step.StepModule`.
        """
        num_labelled = sum((batch.labels != IGNORED).sum() for batch in batches)
        num_labelled = torch.as_tensor(num_labelled).reshape(1)
        if not is_trial:
            num_labelled = all_sum(num_labelled)
        for batch in batches:
            batch.totals = F.pad(num_labelled, (0, 1), value=plan.global_batch_size)

    def describe(self) -> dict[str, str]:
        """Rows of the start table, beside those of every model."""
        return {}


class Description(NamedTuple):
    """What a segmenter is built of."""

    model: str  # a timm name, `hf-hub:owner/name` or a timm folder
    decoder: str  # fpn or linear
    width: int  # channels of the feature pyramid
    num_classes: int


class FPNDecoder(nn.Module):
    """Maps of levels 2, 3, ... -> logits of level 2: each map is upsampled to the finest, and all are added.

    Source: Kirillov et al. 2019, "Panoptic Feature Pyramid Networks" (arXiv:1901.02446), section 3.1.
    """

    def __init__(self, num_levels: int, channels: int, num_classes: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList()
        for level in range(num_levels):
            layers: list[nn.Module] = []
            for i in range(max(1, level)):
                in_channels = _DECODER_WIDTH if i else channels
                layers.append(nn.Conv2d(in_channels, _DECODER_WIDTH, 3, padding=1, bias=False))
                layers.append(nn.GroupNorm(_GROUPS, _DECODER_WIDTH))
                layers.append(nn.ReLU())
                if level:
                    layers.append(nn.Upsample(scale_factor=2, mode="bilinear"))
            self.branches.append(nn.Sequential(*layers))
        self.classifier = nn.Conv2d(_DECODER_WIDTH, num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        x = self.branches[0](maps[0])
        for branch, features in zip(self.branches[1:], maps[1:], strict=True):
            x = x + branch(features)
        return self.classifier(x)


class LastFeatures(nn.Module):
    """The deepest map of a timm backbone: images [B, 3, H, W] -> [B, C, H / stride, W / stride]."""

    def __init__(self, description: Description, pretrained: bool, drop_path: float, seed: int):
        super().__init__()
        any_size = {"dynamic_img_size": True, "strict_img_size": False}
        self.features = create_model(
            description.model,
            pretrained=pretrained,
            seed=seed,
            requested={"drop_path_rate": drop_path} | any_size,
            optional=tuple(any_size),
            features_only=True,
        )
        self.pretrained_cfg = self.features.pretrained_cfg
        self.stride: int = self.features.feature_info.reduction()[-1]
        self.channels: int = self.features.feature_info.channels()[-1]
        self._is_channels_last = getattr(self.features, "output_fmt", "NCHW") == "NHWC"

    @property
    def trunk(self) -> nn.Module:
        """The network of timm, whose stages can be frozen."""
        return self.features

    def forward(self, images: Tensor) -> Tensor:
        x = self.features(images)[-1]
        return x.permute(0, 3, 1, 2).contiguous() if self._is_channels_last else x


def build_segmenter(
    name: str,
    num_classes: int,
    *,
    decoder: str = "fpn",
    width: int = 256,
    pretrained: bool = False,
    drop_path: float = 0.0,
    seed: int = 0,
) -> Segmenter:
    """Build a segmenter on the timm model `name`, with the decoder `fpn` or `linear`.

    `linear` is a convolution of 1 x 1 over the deepest map. Initial weights are a function of
    `seed`, those of the backbone are loaded with `pretrained` or from a folder. Raises `Refused`.
    """
    description = Description(name, decoder, width, num_classes)
    backbone: nn.Module
    if decoder == "linear":
        backbone = LastFeatures(description, pretrained, drop_path, seed)
        torch.manual_seed(seed + 3)
        head: nn.Module = nn.Conv2d(backbone.channels, num_classes, 1)
    else:
        spec = DetectorSpec(
            family="fpn",
            model=name,
            num_classes=num_classes,
            pretrained=pretrained,
            width=width,
            drop_path=drop_path,
            seed=seed,
        )
        backbone = Backbone(spec, _LEVELS, coarser="subsampling")
        torch.manual_seed(seed + 3)
        head = FPNDecoder(len(backbone.levels), width, num_classes)
    model = Segmenter(backbone, head, description)
    model.weights_summary = format_loaded_backbone(backbone.trunk, model, name, pretrained)
    return model
