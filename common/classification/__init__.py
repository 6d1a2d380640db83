"""What only image classification needs."""

from typing import TYPE_CHECKING

from common.imports import face

if TYPE_CHECKING:
    from common.classification import plots, sources
    from common.classification.augmentation import Augmentation, ColorJitter, Mixing, Normalize, RandomErasing
    from common.classification.balancing import class_weights, sample_weights
    from common.classification.batches import EvaluationSamples, TrainingSamples
    from common.classification.embeddings import EmbeddingEvaluation
    from common.classification.metrics import Evaluation

__all__, __getattr__ = face(__name__)
