"""Export of a trained detector to a folder that others can load, such as docs/detect.py."""

import json
from pathlib import Path

from safetensors.torch import save_file

from common.config.origin import key_by_class
from common.detection.data.annotated import Annotated
from common.detection.models.detectors import FAMILIES, Detector
from common.detection.models.fpn import SimplePyramid
from common.detection.transforms import BoxAugmentation


def export(
    detector: Detector, source: Annotated, resize: BoxAugmentation, results: dict, folder: Path
) -> None:
    """Write a folder of weights, `config.json` with all settings to detect with them, and `results.json`.

    `source` has its classes, `resize` resized images for its evaluation. A detector with an `export`
    of its own, as transformers' have, writes the first two itself. The folder must not exist.
    """
    folder.mkdir(parents=True)
    short_side = max(resize.short_sides)
    if hasattr(detector, "export"):
        detector.export(folder, source.classes, short_side)
    else:
        tensors = {}
        for name, tensor in detector.state_dict().items():
            tensors[name] = tensor.detach().cpu().contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = build_export_config(detector)
        config |= {"short_side": short_side, "long_side": resize.long_side}
        config |= {"classes": list(source.classes), "category_ids": source.category_ids.tolist()}
        config["options"] |= {"min_size": short_side, "max_size": resize.long_side}
        _write_json(folder / "config.json", config)
    _write_json(folder / "results.json", key_by_class(results, source.classes))
    for file in folder.glob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)  # it was written for its owner alone


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def build_export_config(detector: Detector) -> dict:
    """Arguments of timm and torchvision for the same detector; `options` have torchvision's names."""
    family = next(name for name, kind in FAMILIES.items() if type(detector) is kind)
    backbone = detector.backbone
    has_two_stages = family.endswith("rcnn")
    generator = (detector.rpn if has_two_stages else detector).anchors.generator
    prefix = "box_" if has_two_stages else ""
    return {
        "family": family,
        "model": backbone.arguments["model_name"],
        # null: resampled
        "backbone": None if isinstance(backbone.features, SimplePyramid) else backbone.arguments,
        "levels": list(backbone.levels),
        "coarser": [level for level in backbone.levels if 2**level > backbone.stride],
        "width": backbone.width,
        "convolutions": getattr(detector, "convolutions", None),
        "variant": detector.variant,
        "anchors": {"sizes": generator.sizes, "aspect_ratios": generator.aspect_ratios},
        "options": {
            "num_classes": detector.num_classes + has_two_stages,  # 0 is background
            "image_mean": list(detector.pretrained_cfg["mean"]),
            "image_std": list(detector.pretrained_cfg["std"]),
            "size_divisible": backbone.stride,
            f"{prefix}score_thresh": detector.score_threshold,
            f"{prefix}nms_thresh": detector.nms_threshold,
            f"{prefix}detections_per_img": detector.limit,
        },
    }
