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
    detector: Detector, source: Annotated, plain: BoxAugmentation, results: dict, folder: Path
) -> None:
    """Write a folder of weights, `config.json` with all settings to detect with them, and `results.json`.

    `source` has its classes, `plain` resized images for its evaluation. A detector with an `export`
    of its own, as transformers' have, writes the first two itself. The folder must not exist.
    """
    folder.mkdir(parents=True)
    if hasattr(detector, "export"):
        detector.export(folder, source.classes, max(plain.short_sides))
    else:
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in detector.state_dict().items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = describe(detector)
        config |= {"short_side": max(plain.short_sides), "long_side": plain.long_side}
        config |= {"classes": list(source.classes), "category_ids": source.category_ids.tolist()}
        config["options"] |= {"min_size": config["short_side"], "max_size": config["long_side"]}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "results.json").write_text(
        json.dumps(key_by_class(results, source.classes), indent=2) + "\n"
    )
    for file in folder.glob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)  # it was written for its owner alone


def describe(detector: Detector) -> dict:
    """Arguments of timm and torchvision for the same detector; `options` have torchvision's names."""
    family = next(name for name, kind in FAMILIES.items() if type(detector) is kind)
    backbone, two_stages = detector.backbone, family.endswith("rcnn")
    generator = (detector.rpn if two_stages else detector).anchors.generator
    thresholds = {"score_thresh": detector.score_threshold, "nms_thresh": detector.nms_threshold}
    thresholds["detections_per_img"] = detector.limit
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
            "num_classes": detector.num_classes + two_stages,  # 0 is background
            "image_mean": list(detector.pretrained_cfg["mean"]),
            "image_std": list(detector.pretrained_cfg["std"]),
            "size_divisible": backbone.stride,
            **{f"{'box_' * two_stages}{name}": value for name, value in thresholds.items()},
        },
    }
