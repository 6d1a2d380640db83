"""Object detection: data, detectors, weights and metrics."""

from typing import TYPE_CHECKING

from common.imports import face, import_timm

if TYPE_CHECKING:
    from common.detection import defaults
    from common.detection.batches import EvaluationScenes, TrainingImages, blank_padding
    from common.detection.data import sources
    from common.detection.evaluation import plots
    from common.detection.evaluation.metrics import Detections
    from common.detection.grouping import build_stream
    from common.detection.models import detectors
    from common.detection.models.spec import DetectorSpec
    from common.detection.transforms import BoxAugmentation, read_sides
    from common.detection.weights import sources as sources_of_weights
    from common.detection.weights.begin import begin_with, read_once

__all__, __getattr__ = face(__name__)

import_timm()  # before the modules of this room import torchvision, which timm imports, too
