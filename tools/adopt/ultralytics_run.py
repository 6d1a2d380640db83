"""Reader of the args.yaml that a training of Ultralytics' detectors writes.

YOLO models have no successor here, and optimizers' settings belong to a model. A preset has the data, length, batch and
augmentation of the file, with model and optimization of a preset of this project.
"""

from pathlib import Path

from common.errors import Refused
from recipes import det
from tools.adopt.adoption import Adoption, facts, known, read_settings

PRESETS = Path(det.__file__).parent / "presets"
# What a preset gives to a proposed model, and how it trains it.
PROPOSED = """detector model pretrained width batch_norm drop_path label_smoothing ema_decay opt lr lr_batch_size lr_scaling
    backbone_lr_factor layer_decay schedule warmup_epochs weight_decay clip""".split()
OPTIMIZATION = "optimizer lr0 lrf cos_lr momentum weight_decay warmup_epochs warmup_momentum warmup_bias_lr"


def read(values: dict, file: Path) -> Adoption:
    """What becomes of an args.yaml. Raises `Refused`, as for tasks without a recipe."""
    adoption = Adoption("Ultralytics", file, det, values, known("ultralytics"))
    if (task := adoption["task"]) != "detect":
        raise Refused(f"{file}: task {task!s:.50} has no successor here: only boxes are carried")
    adoption.skip("task")
    _batch(adoption)
    _model(adoption, Path(str(adoption["model"] or "")).stem)
    _lengths(adoption)
    _boxes(adoption)
    adoption.finish(facts("ultralytics"))
    return adoption


def _batch(adoption: Adoption) -> None:
    size, devices = adoption["batch"], adoption["device"]
    if not isinstance(size, int) or size < 1:
        raise Refused(f"{adoption.file}: batch {size} is a choice of the moment: put the batch size of a step there")
    devices = devices if isinstance(devices, list) else str("" if devices is None else devices).split(",")
    adoption.gpus = len(devices)
    accumulated = max(1, round(adoption["nbs"] / size))
    note = f"{size} over all GPUs, accumulated {accumulated} times for nbs {adoption['nbs']}"
    sizes = {"global_batch_size": size * accumulated, "max_micro_batch_size": max(1, size // adoption.gpus)}
    adoption.carry("batch nbs", note, **sizes)


def _model(adoption: Adoption, stem: str) -> None:
    """Carry RT-DETR, propose D-FINE for all others, and the optimization of its preset."""
    preset, model = "coco_dfine_s", "ustc-community/dfine-small-coco"
    if stem.startswith("rtdetr"):
        preset = "coco_rtdetrv2_r18"
        model = f"PekingU/rtdetr_v2_{'r101vd' if stem == 'rtdetr-resnet101' else 'r50vd'}"
    else:
        reason = f"{stem or 'the model'} has no successor here: YOLO's weights and losses are not this project's"
        adoption.leave("model pretrained", reason)
    proposed = read_settings(PRESETS / f"{preset}.yaml") | {"lr_scaling": "sqrt", "model": model}
    batch, most = (adoption.preset[name][0] for name in ("global_batch_size", "max_micro_batch_size"))
    if proposed.get("batch_norm") == "global" and batch > most * adoption.gpus:
        proposed["batch_norm"] = "local"  # statistics over the whole batch can't be had in several micro-steps
    flags = {flag: proposed[flag] for flag in PROPOSED if flag in proposed}
    note = f"proposed: from recipes/presets/{preset}.yaml"
    adoption.carry("model pretrained" if stem.startswith("rtdetr") else [], note, **flags)
    adoption.leave(OPTIMIZATION, "the preset has this project's for its model")


def _lengths(adoption: Adoption) -> None:
    adoption.carry_each("epochs seed patience")
    adoption.carry_each("time:max_hours split compile", only_if_set=True)
    adoption.launch("amp", {"bf16": "bf16", False: "", "fp32": ""}.get(adoption["amp"], "fp16"))
    data = Path(str(adoption["data"] or ""))
    if len(data.parts) < 2 or data.suffix not in ("", ".yaml", ".yml"):
        adoption.leave("data", "give the folder that holds data.yaml, or the image folder, with --data FOLDER")
    else:
        adoption.carry("data", "the folder of the data", data=str(data.parent if data.suffix else data))


def _boxes(adoption: Adoption) -> None:
    """Augmentation of images with boxes; images become squares of `imgsz`."""
    side, share = int(adoption["imgsz"]), adoption["multi_scale"] or 0
    share = 0.5 if share is True else float(share)  # Ultralytics before 8.4 had a switch
    square = -(-side // 32) * 32
    # Ultralytics draws a length from these limits and rounds it down to a multiple of the stride.
    limits = max(32, int(square * (1 - share))), int(square * (1 + share) + 32) - 1
    sides = range(limits[0] // 32 * 32, limits[1] // 32 * 32 + 1, 32) if share else [square]
    note = "squares; one side is drawn for each step" if share else "squares"
    note += ", as a multiple of 32" if square != side else ""
    adoption.carry("imgsz multi_scale", note, short_sides=",".join(map(str, sides)), eval_short_side=square)
    adoption.carry_each("fliplr:hflip mosaic mixup")
    if any(adoption[f"hsv_{channel}"] for channel in "hsv"):
        adoption.carry("hsv_h hsv_s hsv_v", "its strengths are fixed", photometric=0.5)
    moved = [name for name in ("scale", "translate") if adoption[name]]
    adoption.leave(moved, "images with boxes are resized as a whole: --short_sides, --zoom_out, --iou_crop")
    off = int(adoption["close_mosaic"] or 0)
    end = max(0, adoption["epochs"] - off) if off else 0
    adoption.carry("close_mosaic", "strong augmentation ends", strong_epochs=end)
    adoption.skip("auto_augment erasing channels_last dropout")  # of classifiers only
