"""Export of a trained detector to a folder that others can load, and loading of such a folder.

docs/detectors.md has the script that loads a folder without this project.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoints.resume import load_model
from common.config.origin import by_name
from common.detection.data.annotated import Annotated
from common.detection.models.detectors import FAMILIES, OF_TRANSFORMERS, Detector, build_detector
from common.detection.models.fpn import SimplePyramid
from common.detection.models.postprocessing import MOST
from common.detection.models.spec import DetectorSpec
from common.detection.transforms import BoxAugmentation
from common.errors import Refused
from common.files import SMALL, check_regular, read_text
from common.training.timm_models import begins_with, take_rows

# What two detectors must have in common to exchange weights, and its flag.
_FLAGS = {
    "family": "--detector",
    "model": "--model",
    "levels": "--levels",
    "width": "--width",
    "convolutions": "--convolutions",
}


def export(detector: Detector, source: Annotated, plain: BoxAugmentation, results: dict, folder: Path) -> None:
    """Write a folder of weights, `config.json` with all that is needed to detect with them, and `results.json`.

    `source` has the classes that it was trained on, `plain` is how images were resized to evaluate it. A detector with an
    `export(folder, classes, side)` of its own, as transformers' have, writes the first two itself. The folder must not exist.
    """
    folder.mkdir(parents=True)
    if _is_transformers(detector):
        detector.export(folder, source.classes, max(plain.short_sides))
    else:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in detector.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = describe(detector)
        config |= {"short_side": max(plain.short_sides), "long_side": plain.long_side}
        config |= {"classes": list(source.classes), "category_ids": source.category_ids.tolist()}
        config["options"] |= {"min_size": config["short_side"], "max_size": config["long_side"]}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "results.json").write_text(json.dumps(by_name(results, source.classes), indent=2) + "\n")
    for file in folder.glob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)  # it was written for its owner alone


def describe(detector: Detector) -> dict:
    """What timm and torchvision need to know to make the same detector; `options` are named as torchvision's arguments."""
    family = next(name for name, kind in FAMILIES.items() if type(detector) is kind)
    backbone, two_stages = detector.backbone, family.endswith("rcnn")
    if family == "fcos":
        anchors = {"sizes": [[2**level] for level in backbone.levels], "aspect_ratios": [[1.0]] * len(backbone.levels)}
    else:
        generator = (detector.rpn if two_stages else detector).anchors.generator
        anchors = {"sizes": generator.sizes, "aspect_ratios": generator.aspect_ratios}
    thresholds = {"score_thresh": detector.score_threshold, "nms_thresh": detector.nms_threshold}
    thresholds["detections_per_img"] = MOST
    return {
        "family": family,
        "model": backbone.arguments["model_name"],
        "backbone": None if isinstance(backbone.features, SimplePyramid) else backbone.arguments,  # null: resampled
        "levels": list(backbone.levels),
        "coarser": [level for level in backbone.levels if 2**level > backbone.stride],
        "width": backbone.width,
        "convolutions": getattr(detector, "convolutions", None),
        "anchors": anchors,
        "options": {
            "num_classes": detector.classes + two_stages,  # 0 is background
            "image_mean": list(detector.pretrained_cfg["mean"]),
            "image_std": list(detector.pretrained_cfg["std"]),
            "size_divisible": backbone.stride,
            **{f"{'box_' * two_stages}{name}": value for name, value in thresholds.items()},
        },
    }


def load(detector: Detector, folder: Path) -> None:
    """Load the weights of an exported folder, or of a checkpoint's moving average or model, to evaluate them.

    Raises `Refused` if they are of another detector.
    """
    if not (folder / "config.json").is_file():
        return load_model(detector, folder)
    _, tensors = _read(detector, folder)
    _refuse_others(folder, detector.state_dict(), tensors, same_shapes=True)
    detector.load_state_dict(tensors)


def begin_with(detector: Detector, folder: Path, names: Sequence[str]) -> str:
    """Load the weights of an exported folder of the same architecture into `detector`, whose classes have these names.

    The heads keep what the folder knows of classes with the same names, and are new for the others.
    Returns in words which weights were loaded. Raises `Refused` for another architecture.
    """
    if _is_transformers(detector):
        raise Refused(f"--init {folder}: detectors of transformers begin with a folder that is given as --model")
    if not (folder / "config.json").is_file():
        found = "no config.json is in it" if folder.exists() else "nothing is there"
        raise Refused(f"--init {folder}: no exported detector, {found}; name a run's best/")
    config, tensors = _read(detector, folder)
    mine = detector.state_dict()
    _refuse_others(folder, mine, tensors, same_shapes=False)
    # The first class of an R-CNN is the background, which all data have.
    background = [None] if "roi_heads" in dict(detector.named_children()) else []
    new, known = [*background, *names], [*background, *config["classes"]]
    head, trained = _of_classes(mine, len(new)), _of_classes(tensors, len(known))
    for name in mine.keys() - head.keys():
        mine[name].copy_(tensors[name])
    fresh = take_rows(head, trained, new, known)
    return begins_with(len(mine) - len(head) * bool(fresh), len(mine), str(folder), fresh, len(names))


def _of_classes(tensors: dict[str, Tensor], classes: int) -> dict[str, Tensor]:
    """The tensors of a detector that have a part for each class, by name, as views [classes, ...]."""
    views = {}
    for name, tensor in tensors.items():
        layer = name.split(".")[-2]
        if layer == "cls_logits" and not name.startswith("rpn."):
            views[name] = tensor.unflatten(0, (-1, classes)).transpose(0, 1)  # each anchor has one per class
        elif layer in ("cls_score", "bbox_pred", "mask_fcn_logits") and not name.startswith("rpn."):
            views[name] = tensor.unflatten(0, (classes, -1))
    return views


def _read(detector: Detector, folder: Path) -> tuple[dict, dict[str, Tensor]]:
    """Configuration and tensors of a folder, if it is of the same architecture. Raises `Refused` otherwise."""
    try:
        check_regular(folder)
        config = json.loads(read_text(folder / "config.json", SMALL))
        if _is_transformers(detector):
            config["classes"] = [config["id2label"][str(number)] for number in range(len(config["id2label"]))]
            family = next(name for name, theirs in OF_TRANSFORMERS.items() if theirs == detector.config.model_type)
            spec = DetectorSpec(family, str(folder), detector.classes, config["classes"])
            return config, build_detector(spec).state_dict()
        there = {key: config.get(key) for key in _FLAGS}
        config["classes"] = list(config.get("classes", []))
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Refused(f"{folder}: not a whole exported detector ({reason}); name a run's best/") from None
    here = describe(detector)
    differing = [
        f"{flag} {_said(there[key])} there, {_said(here[key])} here"
        for key, flag in _FLAGS.items()
        if there[key] != here[key]
    ]
    if differing:
        raise Refused(f"{folder} is of another detector: {'; '.join(differing)}; give the flags that made it")
    return config, tensors


def _is_transformers(detector: Detector) -> bool:
    return hasattr(detector, "export")


def _said(value) -> str:
    """As on the command line."""
    return f"{value[0]}-{value[-1]}" if isinstance(value, list) else str(value)


def _refuse_others(folder: Path, mine: dict[str, Tensor], theirs: dict[str, Tensor], same_shapes: bool) -> None:
    differing = sorted(mine.keys() ^ theirs.keys())
    if same_shapes:
        differing += sorted(name for name in mine.keys() & theirs.keys() if mine[name].shape != theirs[name].shape)
    if differing:
        raise Refused(f"{folder} is of another detector: {len(differing)} tensors differ, first {differing[0]}")
