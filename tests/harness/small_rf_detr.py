"""An RF-DETR that is small enough for tests."""

from unittest.mock import patch

from common.detection.models.detectors import Detector, build_detector
from common.detection.models.detr_architectures import ARCHITECTURES
from common.detection.models.spec import DetectorSpec

SIDE = 96  # of the squares that its position embeddings are made for, in pixels; 12 queries need 64
CONFIG = {
    "backbone_config": {
        "model_type": "rf_detr_dinov2",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "out_features": ["stage1", "stage3"],  # the last layer gets no gradient, as in base
        "num_windows": 2,
        "patch_size": 16,
        "image_size": SIDE,
    },
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_self_attention_heads": 2,
    "decoder_cross_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "decoder_n_points": 2,
    "num_queries": 12,
    "group_detr": 3,
}
FAMILIES = ("rf_detr", "rf_detr_seg")


def build(classes: int, family: str = "rf_detr", **options) -> Detector:
    """The detector; `options` are of `DetectorSpec`."""
    name = f"{family}_tiny"
    with patch.dict(ARCHITECTURES, {name: CONFIG}):
        return build_detector(DetectorSpec(family, name, classes, **options))
