"""Building a detector from its specification."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from common.detection.models.detector import Detector, Suppressing
from common.detection.models.detr import DETR
from common.detection.models.detr_models import FAMILIES as OF_TRANSFORMERS
from common.detection.models.fpn import Backbone
from common.detection.models.one_stage import FCOS, RetinaNet
from common.detection.models.rcnn import FasterRCNN, MaskRCNN
from common.detection.models.rf_detr import RFDETR
from common.detection.models.spec import DetectorSpec
from common.errors import Refused
from common.training.timm_models import format_loaded_backbone


class Matched(nn.Module):
    """A detector with a data set's class ids. `places` are its own ids of them; others are left out."""

    def __init__(self, detector: Detector, places: Sequence[int]) -> None:
        super().__init__()
        self.detector, self.places = detector, list(places)

    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        places = torch.tensor(self.places, device=images.device)
        found = []
        for of_image in self.detector.detect(images, sizes):
            owner, number = (of_image["labels"][:, None] == places).nonzero(as_tuple=True)
            found.append(
                {name: column[owner] for name, column in of_image.items()} | {"labels": number}
            )
        return found


def build_detector(spec: DetectorSpec) -> Detector:
    """A detector on a timm backbone, or one of transformers. Raises `Refused`."""
    if spec.width % 32:
        raise Refused(
            f"--width {spec.width}: the heads normalise 32 groups of channels; take a multiple of "
            "32"
        )
    if spec.family in OF_TRANSFORMERS:
        return RFDETR(spec) if spec.family == "rf_detr" else DETR(spec)
    kind: type[Suppressing] = FAMILIES[spec.family]
    if spec.variant == "torchvision_v2" and kind is FCOS:
        raise Refused(
            "--variant torchvision_v2: --detector fcos has no second version; take --variant "
            "torchvision"
        )
    backbone = Backbone(spec, spec.levels or kind.levels, kind.coarser)
    torch.manual_seed(spec.seed + 3)
    detector = kind(backbone, spec)
    detector.begins_with = format_loaded_backbone(
        backbone.trunk, detector, spec.model, spec.pretrained
    )
    return detector


FAMILIES = {"fcos": FCOS, "retinanet": RetinaNet, "faster_rcnn": FasterRCNN, "mask_rcnn": MaskRCNN}
