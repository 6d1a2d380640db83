"""Configurations of the published DETRs, without weights: where they differ from the defaults of transformers.

Values come from the authors' configuration files, under the names that transformers gives them.
"""

_STAGES = {"out_indices": [2, 3, 4]}  # whose maps are used
_RESNET_18 = {
    "model_type": "rt_detr_resnet",
    **_STAGES,
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
    "layer_type": "basic",
}
_RESNET_50 = {"model_type": "rt_detr_resnet", **_STAGES}


def _hgnet(stem: int, channels: list[int], middle: list[int], blocks: list[int], layers: int) -> dict:
    """An HGNetv2. `channels` leave the stem and each stage; each block of a stage has `layers` layers of `middle` channels."""
    return {
        "model_type": "hgnet_v2",
        **_STAGES,
        "hidden_sizes": channels[1:],
        "stem_channels": [3, stem, channels[0]],
        "stage_in_channels": channels[:-1],
        "stage_mid_channels": middle,
        "stage_out_channels": channels[1:],
        "stage_num_blocks": blocks,
        "stage_numb_of_layers": [layers] * 4,
        "use_learnable_affine_block": layers < 6,
    }


_HGNET_B0 = _hgnet(16, [16, 64, 256, 512, 1024], [16, 32, 64, 128], [1, 1, 2, 1], 3)
_HGNET_B2 = _hgnet(24, [32, 96, 384, 768, 1536], [32, 64, 128, 256], [1, 1, 3, 1], 4)
_HGNET_B5 = _hgnet(32, [64, 128, 512, 1024, 2048], [64, 128, 256, 512], [1, 2, 5, 2], 6)
# DINOv3's smallest vision transformer, distilled by DEIMv2's authors; the maps of three of its 12 layers are used.
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
_OF_DEIMV2: dict = {"decoder_activation_function": "silu", "focal_loss_gamma": 1.5}
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

# Neck and decoder of the smallest published models with three levels, which also stand on timm's backbones.
_SMALL: dict = {"hidden_expansion": 0.5, "decoder_layers": 3}
_POINTS: dict = {"decoder_n_points": [3, 6, 3]}
SMALL_OF: dict[str, dict] = {
    "rtdetr_v2": _SMALL,
    "dfine": _SMALL | _POINTS | {"depth_mult": 0.34},
    "deimv2": _SMALL | _POINTS | _OF_DEIMV2 | {"depth_mult": 0.67, "hidden_expansion": 0.34},
}

# From `rfdetr/config.py` of roboflow/rf-detr, and transformers' conversion of their weights. They were trained on squares of
# 384, 512, 576 and 560 pixels; `image_size` only counts the position embeddings.
_DINOV2 = {"model_type": "rf_detr_dinov2", "hidden_size": 384, "num_attention_heads": 6}
_PATCHES_16 = {"patch_size": 16, "num_windows": 2, "out_features": ["stage3", "stage6", "stage9", "stage12"]}
_PATCHES_14 = {"patch_size": 14, "num_windows": 4, "out_features": ["stage2", "stage5", "stage8", "stage11"]}


def _rf_detr(side: int, layers: int, patches: dict) -> dict:
    backbone = _DINOV2 | patches | {"image_size": side}
    return {"backbone_config": backbone, "decoder_layers": layers, "decoder_n_points": 2}


_OF_RESNET_18: dict = {"encoder_in_channels": [128, 256, 512], "hidden_expansion": 0.5}
_WIDE: dict = {"encoder_hidden_dim": 384, "encoder_ffn_dim": 2048, "decoder_in_channels": [384, 384, 384]}
ARCHITECTURES: dict[str, dict] = {
    "rtdetr_v2_r18vd": _OF_RESNET_18 | {"backbone_config": _RESNET_18, "decoder_layers": 3},
    "rtdetr_v2_r34vd": _OF_RESNET_18 | {"backbone_config": _RESNET_18 | {"depths": [3, 4, 6, 3]}, "decoder_layers": 4},
    "rtdetr_v2_r50vd": {"backbone_config": _RESNET_50},
    "rtdetr_v2_r101vd": _WIDE | {"backbone_config": _RESNET_50 | {"depths": [3, 4, 23, 3]}},
    "dfine_n": _NANO,
    "dfine_s": SMALL_OF["dfine"] | {"backbone_config": _HGNET_B0, "encoder_in_channels": [256, 512, 1024]},
    "dfine_m": _POINTS
    | {"backbone_config": _HGNET_B2, "encoder_in_channels": [384, 768, 1536]}
    | {"decoder_layers": 4, "depth_mult": 0.67},
    "dfine_l": _POINTS,
    "dfine_x": _POINTS | _WIDE | {"backbone_config": _HGNET_B5, "reg_scale": 8.0},
    "deimv2_n": _NANO | _OF_DEIMV2,
    "deimv2_s": SMALL_OF["deimv2"]
    | {"backbone_config": _DINOV3_TINY, "encoder_in_channels": [192] * 3, "encoder_has_trailing_conv": False}
    | {"d_model": 192, "encoder_hidden_dim": 192, "encoder_ffn_dim": 512}
    | {"decoder_in_channels": [192] * 3, "decoder_ffn_dim": 512, "decoder_layers": 4},
    "rf_detr_nano": _rf_detr(384, 2, _PATCHES_16),
    "rf_detr_small": _rf_detr(512, 3, _PATCHES_16),
    "rf_detr_medium": _rf_detr(576, 4, _PATCHES_16),
    "rf_detr_base": _rf_detr(518, 3, _PATCHES_14),
}
