"""What only image classification needs."""

from typing import TYPE_CHECKING

from common.imports import export_lazily

if TYPE_CHECKING:
    from common.classification.augmentation import (
        Augmentation,
        ColorJitter,
        Mixing,
        Normalize,
        RandomErasing,
        Transforms,
    )
    from common.classification.balancing import class_weights
    from common.classification.batches import EvalDataset, TrainDataset
    from common.classification.embeddings import EmbeddingEvaluation
    from common.classification.evaluation import Evaluation
    from common.classification.margin_head import MarginHead, add_margin_head
    from common.classification.sources import load_data

__all__, __getattr__ = export_lazily(__name__)
