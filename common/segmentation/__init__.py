"""Semantic segmentation: data, models, augmentation and metrics."""

from typing import TYPE_CHECKING

from common.imports import export_lazily
from common.patches.timm import import_timm

if TYPE_CHECKING:
    from common.segmentation.augmentation import CropAugmentation
    from common.segmentation.batches import EvalDataset, TrainDataset, Transforms
    from common.segmentation.evaluation import Evaluation
    from common.segmentation.losses import build_loss
    from common.segmentation.models import build_segmenter
    from common.segmentation.sources import load_data

__all__, __getattr__ = export_lazily(__name__)

import_timm()  # before the modules of this room import torchvision, which timm imports, too
