"""Building a detector from its specification."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from common.detection.models.detector import Detector, NMSDetector
from common.detection.models.detr import DETR
from common.detection.models.detr_models import TRANSFORMERS_FAMILIES
from common.detection.models.fpn import Backbone
from common.detection.models.one_stage import FCOS, RetinaNet
from common.detection.models.rcnn import FasterRCNN, MaskRCNN
from common.detection.models.rf_detr import RFDETR, RFDETRSeg
from common.detection.models.spec import DetectorSpec
from common.errors import Refused
from common.training.timm_models import format_loaded_backbone

FAMILIES: dict[str, type[NMSDetector]] = {
    "fcos": FCOS,
    "retinanet": RetinaNet,
    "faster_rcnn": FasterRCNN,
    "mask_rcnn": MaskRCNN,
}


class ClassRemapper(nn.Module):
    """A detector that returns class ids of a data set instead of its own.

    `class_ids` are the detector's ids of the data set's classes, in their order. Detections of
    classes that are not among them are left out.
    """

    def __init__(self, detector: Detector, class_ids: Sequence[int]) -> None:
        super().__init__()
        self.detector = detector
        self.class_ids = list(class_ids)

    def detect(self, images: Tensor, sizes: Tensor) -> list[dict[str, Tensor]]:
        class_ids = torch.tensor(self.class_ids, device=images.device)
        results = []
        for detections in self.detector.detect(images, sizes):
            is_class = detections["labels"][:, None] == class_ids
            indices, labels = is_class.nonzero(as_tuple=True)
            result = {name: values[indices] for name, values in detections.items()}
            results.append(result | {"labels": labels})
        return results


def build_detector(spec: DetectorSpec) -> Detector:
    """Build a detector on a timm backbone, or one of transformers. Raises `Refused`."""
    if spec.width % 32:
        raise Refused(
            f"--width {spec.width}: the heads normalise 32 groups of channels; take a multiple of "
            "32"
        )
    if spec.family == "rf_detr":
        return RFDETR(spec)
    if spec.family == "rf_detr_seg":
        return RFDETRSeg(spec)
    if spec.family in TRANSFORMERS_FAMILIES:
        return DETR(spec)
    detector_class = FAMILIES[spec.family]
    if spec.variant == "torchvision_v2" and spec.family == "fcos":
        raise Refused(
            "--variant torchvision_v2: --detector fcos has no second version; take --variant "
            "torchvision"
        )
    levels = spec.levels or detector_class.levels
    backbone = Backbone(spec, levels, detector_class.coarser)
    torch.manual_seed(spec.seed + 3)
    detector = detector_class(backbone, spec)
    detector.weights_summary = format_loaded_backbone(
        backbone.trunk, detector, spec.model, spec.pretrained
    )
    return detector
