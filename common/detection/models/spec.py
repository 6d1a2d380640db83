"""Detector specification: what a detector is built of."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from common.config.fields import split_integers
from common.errors import Refused


@dataclass(frozen=True)
class DetectorSpec:
    """What a detector is built of. Its initial weights are a function of `seed`, or loaded.

    The variant torchvision spreads the places of coarse levels evenly over the canvas; its
    RetinaNet has no GroupNorm and keeps 300 detections. The second versions are RetinaNet with
    GroupNorm and a P6 from C5, and R-CNNs with batch norm and one and four convolutions more.
    """

    family: str  # fcos, retinanet, faster_rcnn, mask_rcnn, or one of `TRANSFORMERS_FAMILIES`
    # Backbone: a timm name, `hf-hub:owner/name` or a timm folder; for DETRs see `detr_models`
    model: str
    num_classes: int
    # A model of transformers keeps its rows of classes with these names.
    class_names: Sequence[str] = ()
    pretrained: bool = False
    # Finest and coarsest level, of stride 2^level; None: the family's.
    levels: tuple[int, int] | None = None
    width: int = 256  # channels of the feature pyramid
    drop_path: float = 0.0  # of the backbone
    seed: int = 0
    convolutions: int = 4  # fcos, retinanet: convolutions in each of the heads
    variant: str = "own"  # or torchvision, torchvision_v2
    hidden: int = 1024  # faster_rcnn, mask_rcnn: width of the second stage
    mask_width: int = 256  # mask_rcnn: channels of the mask head
    # Detections in an image, if these are more than the family's; DETRs have as many as queries.
    max_detections: int = 0

    @classmethod
    def from_config(cls, config: Any, class_names: Sequence[str]) -> Self:
        """The detector that `config` describes, for data with these classes. Raises `Refused`."""
        levels = split_integers(config.levels, "-")
        if not levels or len(levels) != 2:
            raise Refused(
                f"--levels {config.levels}: must be two numbers joined by a dash, such as 3-7"
            )
        values = {}
        for field in fields(cls):
            if hasattr(config, field.name):
                values[field.name] = getattr(config, field.name)
        values |= {
            "family": config.detector,
            "num_classes": len(class_names),
            "class_names": class_names,
            "levels": levels,
            "pretrained": config.pretrained and not config.init,
        }
        return cls(**values)
