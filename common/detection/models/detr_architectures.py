"""Configurations of small published DETRs, where they differ from the defaults of transformers.

Values come from the authors' configuration files, under the names that transformers gives them.
"""

_RESNET_18 = {
    "model_type": "rt_detr_resnet",
    "out_indices": [2, 3, 4],
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
    "layer_type": "basic",
}
_HGNET_B0 = {
    "model_type": "hgnet_v2",
    "out_indices": [2, 3, 4],
    "hidden_sizes": [64, 256, 512, 1024],
    "stem_channels": [3, 16, 16],
    "stage_in_channels": [16, 64, 256, 512],
    "stage_mid_channels": [16, 32, 64, 128],
    "stage_out_channels": [64, 256, 512, 1024],
    "stage_num_blocks": [1, 1, 2, 1],
    "stage_numb_of_layers": [3, 3, 3, 3],
    "use_learnable_affine_block": True,
}
# DINOv3's smallest vision transformer; the maps of three of its 12 layers are used.
_DINOV3_TINY = {
    "model_type": "dinov3_vit",
    "hidden_size": 192,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "out_indices": [4, 8, 12],
    "key_bias": True,
    "layer_norm_eps": 1e-6,
    "apply_layernorm": False,
    "pos_embed_rescale": None,
}

# The gamma is of the matchability-aware loss.
_DEIMV2: dict = {"decoder_activation_function": "silu", "focal_loss_gamma": 1.5}
_NANO = {
    "backbone_config": _HGNET_B0 | {"out_indices": [3, 4]},
    "num_feature_levels": 2,
    "feat_strides": [16, 32],
    "d_model": 128,
    "encoder_in_channels": [512, 1024],
    "encoder_hidden_dim": 128,
    "encoder_ffn_dim": 512,
    "encode_proj_layers": [1],
    "decoder_in_channels": [128, 128],
    "decoder_ffn_dim": 512,
    "decoder_layers": 3,
    "decoder_n_points": [6, 6],
    "hidden_expansion": 0.34,
    "depth_mult": 0.5,
}

# Neck and decoder of the smallest models with three levels, also for timm's backbones.
_SMALL: dict = {"hidden_expansion": 0.5, "decoder_layers": 3}
_POINTS: dict = {"decoder_n_points": [3, 6, 3]}
SMALLEST_BY_FAMILY: dict[str, dict] = {
    "rtdetr_v2": _SMALL,
    "dfine": _SMALL | _POINTS | {"depth_mult": 0.34},
    "deimv2": _SMALL | _POINTS | _DEIMV2 | {"depth_mult": 0.67, "hidden_expansion": 0.34},
}

# From `rfdetr/config.py` of roboflow/rf-detr, and transformers' conversion of their weights.
_DINOV2 = {
    "model_type": "rf_detr_dinov2",
    "hidden_size": 384,
    "num_attention_heads": 6,
    "patch_size": 16,
    "num_windows": 2,
    "out_features": ["stage3", "stage6", "stage9", "stage12"],
    "image_size": 384,
}

ARCHITECTURES: dict[str, dict] = {
    "rtdetr_v2_r18vd": SMALLEST_BY_FAMILY["rtdetr_v2"]
    | {"backbone_config": _RESNET_18, "encoder_in_channels": [128, 256, 512]},
    "dfine_n": _NANO,
    "dfine_s": SMALLEST_BY_FAMILY["dfine"]
    | {"backbone_config": _HGNET_B0, "encoder_in_channels": [256, 512, 1024]},
    "deimv2_n": _NANO | _DEIMV2,
    "deimv2_s": SMALLEST_BY_FAMILY["deimv2"]
    | {
        "backbone_config": _DINOV3_TINY,
        "encoder_in_channels": [192] * 3,
        "encoder_has_trailing_conv": False,
    }
    | {"d_model": 192, "encoder_hidden_dim": 192, "encoder_ffn_dim": 512}
    | {"decoder_in_channels": [192] * 3, "decoder_ffn_dim": 512, "decoder_layers": 4},
    "rf_detr_nano": {"backbone_config": _DINOV2, "decoder_layers": 2, "decoder_n_points": 2},
    "rf_detr_seg_nano": {
        "backbone_config": _DINOV2 | {"patch_size": 12, "num_windows": 1, "image_size": 312},
        "decoder_layers": 4,
        "decoder_n_points": 2,
        "num_queries": 100,
        "class_loss_coefficient": 5,
    },
}
