"""What is a detector to a recipe, and how does a name become one?"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from common.detection.models.detr import build_detr
from common.detection.models.detr_models import FAMILIES as DETR_FAMILIES
from common.detection.models.fcos import FCOS
from common.detection.models.fpn import SimplePyramid, build_backbone
from common.detection.models.mask_rcnn import MaskRCNN
from common.detection.models.rcnn import FasterRCNN
from common.detection.models.retinanet import RetinaNet
from common.errors import Refused
from common.training.timm_models import begins_with_backbone


class Detector(Protocol):
    """A module whose losses do not depend on how a global batch is split, and whose classes are 0..K-1 everywhere.

    targets, one dict an image: boxes [n, 4] left, top, right, bottom in pixels of the canvas; labels int64[n]; crowd
    bool[n]; position int, of the stream; where known, size int64[2], true width and height on the canvas, and regions, a
    list of the rows that are crowd regions, of which the host need not ask the device then.
    n may be 0. Crowd regions are neither foreground nor background; a region's own boxes still count.
    """

    stride: int  # sides of the canvas are multiples of this, in pixels
    backbone: nn.Module  # what may be compiled; the rest breaks graphs

    def counts(self, targets: list[dict], canvas: tuple[int, int]) -> Tensor:
        """int64[C]: what the losses of these images are divided by, to be summed over the global batch beforehand."""

    def losses(self, images: Tensor, targets: list[dict], totals: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The module's forward: the loss of each image [B], and its parts by name, detached [B].

        `images` [B, 3, H, W] are normalised, `totals` int64[C] is the sum of `counts` over the global batch. Losses are
        divided already: their *sum* over the global batch is its loss. Every parameter gets a gradient, boxes or none.
        """

    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        """Detections of each image, best first: boxes [n, 4] in pixels of the canvas, scores [n], labels int64[n].

        `sizes` [B, 2] are the true widths and heights of the images on the canvas [B, 3, H, W].
        """


class Matched(nn.Module):
    """A detector that calls classes as data do: `places` are its class ids of theirs. What is of no such class is left out."""

    def __init__(self, detector: Detector, places: Sequence[int]) -> None:
        super().__init__()
        self.detector, self.places = detector, list(places)

    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        places = torch.tensor(self.places, device=images.device)
        found = []
        for of_image in self.detector.detect(images, sizes):
            owner, number = (of_image["labels"][:, None] == places).nonzero(as_tuple=True)
            found.append({name: column[owner] for name, column in of_image.items()} | {"labels": number})
        return found


def build_detector(
    family: str,
    backbone: str,
    classes: int,
    *,
    pretrained: bool = False,
    levels: tuple[int, int] = (0, 0),
    width: int = 256,
    convolutions: int = 4,
    drop_path: float = 0.0,
    seed: int = 0,
    names: Sequence[str] = (),
    **options,
) -> Detector:
    """A detector on a timm backbone; its initial weights are a function of `seed`, or loaded: `begins_with` says it in words.

    Args:
        family: one of `FAMILIES` or of `detr_models.FAMILIES`, for which `detr_models.build_model` says the rest.
        backbone: a timm name, `hf-hub:owner/name` or a local timm folder.
        levels: finest and coarsest level of the pyramid, of stride 2^level; (0, 0) is the family's own.
        width: channels of the pyramid.
        convolutions: in each head of fcos and retinanet.
        names: of the classes. A pretrained model of transformers keeps what it knows of those it has.
        options: `hidden` width of the second stage (faster_rcnn, mask_rcnn), `mask_width` (mask_rcnn).

    Raises:
        Refused: for an unknown family or backbone, weights out of reach, and levels that the backbone can't have.
    """
    if family not in FAMILIES | DETR_FAMILIES:
        raise Refused(f"--detector {family} is unknown: choose one of {', '.join(FAMILIES | DETR_FAMILIES)}")
    if width % 32:
        raise Refused(f"--width {width}: the heads normalise 32 groups of channels; take a multiple of 32")
    if family in DETR_FAMILIES:
        own = {"pretrained": pretrained, "width": width, "drop_path": drop_path, "seed": seed, "names": names}
        return build_detr(family, backbone, classes, **own)
    kind = FAMILIES[family]
    built = build_backbone(
        backbone,
        pretrained=pretrained,
        levels=levels if any(levels) else kind.levels,
        width=width,
        coarser=kind.coarser,
        drop_path=drop_path,
        seed=seed,
    )
    if family in ("fcos", "retinanet"):
        options["convolutions"] = convolutions
    torch.manual_seed(seed + 3)
    detector = kind(built, classes, **options)
    detector.seed = seed  # what a detector draws at random is a function of it and the images' positions
    # What images are normalised with. The mean is a whole pixel value, so that padding with it becomes 0, as torchvision pads.
    mean = tuple(round(255 * value) / 255 for value in built.pretrained_cfg["mean"])
    detector.pretrained_cfg = built.pretrained_cfg | {"mean": mean}
    features = built.features.features if isinstance(built.features, SimplePyramid) else built.features
    detector.begins_with = begins_with_backbone(features, detector, backbone, pretrained)
    return detector


FAMILIES = {"fcos": FCOS, "retinanet": RetinaNet, "faster_rcnn": FasterRCNN, "mask_rcnn": MaskRCNN}
