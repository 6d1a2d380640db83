"""What only image classification needs."""

from typing import TYPE_CHECKING

from common.imports import face

if TYPE_CHECKING:
    from common.classification import plots, sources, suspects
    from common.classification.augmentation import Augmentation, Normalize
    from common.classification.balancing import class_weights, sample_weights
    from common.classification.batches import EvaluationSamples, TrainingSamples
    from common.classification.color_jitter import ColorJitter
    from common.classification.embeddings import EmbeddingEvaluation
    from common.classification.evaluation import Evaluation
    from common.classification.mixing import Mixing
    from common.classification.random_erasing import RandomErasing

__all__, __getattr__ = face(__name__)
