"""Object detection: data, detectors, weights and metrics."""

from typing import TYPE_CHECKING

from common.imports import export_lazily
from common.patches.timm import import_timm

if TYPE_CHECKING:
    from common.detection.batches import EvalDataset, TrainDataset, Transforms
    from common.detection.data.sources import load_data
    from common.detection.defaults import refuse_missing
    from common.detection.evaluation.evaluation import Evaluation
    from common.detection.models.detectors import build_detector
    from common.detection.models.spec import DetectorSpec
    from common.detection.transforms import BoxAugmentation, read_sides
    from common.detection.weights.pretrained import load_pretrained, read_once
    from common.detection.weights.sources import read_origin as weights_origin
    from common.detection.weights.sources import read_settings as weights_settings

__all__, __getattr__ = export_lazily(__name__)

import_timm()  # before the modules of this room import torchvision, which timm imports, too
