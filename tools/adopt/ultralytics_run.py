"""Reader of the args.yaml that Ultralytics' train writes.

YOLO models have no successor here. A preset for one has the data, length, batch and augmentation of the file, with model and
optimization of a preset of this project.
"""

from pathlib import Path
from typing import Any

from common.errors import Refused
from recipes import det
from tools.adopt.adoption import Adoption, facts, known, read_settings, rounded

PRESETS = Path(det.__file__).parent / "presets"
OPTIMIZERS = "sgd adam adamw adamax nadam radam rmsprop".split()
# What a preset gives to a proposed model, and how it trains it.
MODEL = "detector model pretrained width batch_norm drop_path label_smoothing ema_decay".split()
RATES = (
    "opt lr lr_batch_size lr_scaling backbone_lr_factor layer_decay schedule warmup_epochs weight_decay clip".split()
)
DFINE = "ustc-community/dfine-small-coco"


def read(values: dict, file: Path, batch: int = 0) -> Adoption:
    """What becomes of an args.yaml. Raises `Refused`, as for tasks without a recipe."""
    defaults = known("ultralytics")
    task = values.get("task", defaults["task"])
    if task != "detect":
        way = "only boxes are carried"
        if task == "segment":
            way = "mask_rcnn reads outlines from COCO's JSON: convert the data for --detector mask_rcnn, or put task: detect"
        elif task == "classify":
            way = "begin with --config recipes/presets/finetune.yaml --data FOLDER"
        raise Refused(f"{file}: task {task!s:.50} has no successor for these data; {way}")
    adoption = Adoption("Ultralytics", file, det, values, defaults)
    adoption.skip("task")
    _model(adoption, Path(str(adoption["model"] or "")).stem, _batch(adoption, batch))
    _lengths(adoption)
    _boxes(adoption)
    adoption.finish(facts("ultralytics"))
    return adoption


def _propose(adoption: Adoption, names: str | list[str], preset: str, flags: list[str], **changes: Any) -> None:
    """Settings that a preset of this project has for its model."""
    said = read_settings(PRESETS / f"{preset}.yaml") | {"lr_scaling": "sqrt"} | changes
    accumulates = adoption.preset["global_batch_size"][0] > adoption.preset["max_micro_batch_size"][0] * adoption.gpus
    if said.get("batch_norm") == "global" and accumulates:
        said["batch_norm"] = "local"  # statistics over the whole batch can't be had in several micro-steps
    found = {flag: said[flag] for flag in flags if flag in said}
    adoption.carry(names, f"proposed: from recipes/presets/{preset}.yaml", **found)


def _model(adoption: Adoption, stem: str, batch: int) -> None:
    """Carry the model, if it has a successor, and then its optimization; else propose one."""
    names, opt = "model pretrained", str(adoption["optimizer"])
    if stem.startswith("rtdetr"):
        preset, backbone = "coco_rtdetrv2_r18", "r101vd" if stem == "rtdetr-resnet101" else "r50vd"
        _propose(adoption, names, preset, MODEL, model=f"PekingU/rtdetr_v2_{backbone}")
        if opt.lower() in OPTIMIZERS:
            return _optimization(adoption, opt.lower(), batch)
        reason = "a choice that depends on the data" if opt == "auto" else "not among the optimizers here"
    else:
        reason = f"{stem or 'the model'} has no successor here: YOLO's weights and losses are not this project's"
        adoption.leave(names, reason)
        preset, reason = "coco_dfine_s", "meant for another model"
        _propose(adoption, [], preset, MODEL, model=DFINE)
    names = "optimizer lr0 lrf cos_lr momentum weight_decay warmup_epochs warmup_momentum warmup_bias_lr"
    adoption.leave(names, f"{reason}; the preset has this project's for its model")
    _propose(adoption, [], preset, RATES)


def _batch(adoption: Adoption, batch: int) -> int:
    size = batch or adoption["batch"]
    if not isinstance(size, int) or size < 1:
        is_open = f"batch {size} is a choice of the moment"
        raise Refused(f"{adoption.file}: {is_open}: give the batch size of a step with --batch N")
    devices = adoption["device"]
    devices = devices if isinstance(devices, list) else str("" if devices is None else devices).split(",")
    adoption.gpus = len(devices)
    accumulated = max(1, round(adoption["nbs"] / size))
    note = f"{size} over all GPUs, accumulated {accumulated} times for nbs {adoption['nbs']}"
    sizes = {"global_batch_size": size * accumulated, "max_micro_batch_size": max(1, size // adoption.gpus)}
    adoption.carry("batch nbs", note, **sizes)
    return size * accumulated


def _lengths(adoption: Adoption) -> None:
    adoption.carry_each("epochs seed patience")
    adoption.carry_each("time:max_hours split compile", only_if_set=True)
    adoption.launch("amp", {"bf16": "bf16", False: "", "fp32": ""}.get(adoption["amp"], "fp16"))
    data = Path(str(adoption["data"] or ""))
    if len(data.parts) < 2 or data.suffix not in ("", ".yaml", ".yml"):
        adoption.leave("data", "give the folder that holds data.yaml, or the image folder, with --data FOLDER")
    else:
        adoption.carry("data", "the folder of the data", data=str(data.parent if data.suffix else data))


def _optimization(adoption: Adoption, opt: str, batch: int) -> None:
    note = {"sgd": "SGD with Nesterov momentum", "rmsprop": "with timm's alpha, 0.9 for 0.99"}.get(opt, "")
    adoption.carry("optimizer", note, opt=opt)
    adoption.carry("lr0", lr=float(adoption["lr0"]), lr_batch_size=batch, lr_scaling="none")
    schedule = "cosine" if adoption["cos_lr"] else "linear"
    note = "by step, from the end of the warm-up; Ultralytics by epoch, from the start"
    adoption.carry("lrf cos_lr", note, schedule=schedule, min_lr_ratio=adoption["lrf"])
    if opt in ("sgd", "rmsprop"):
        adoption.carry_each("momentum")
    else:
        adoption.leave("momentum", "is the first beta of this optimizer, for which its own default is used")
    decay = float(adoption["weight_decay"]) * batch / adoption["nbs"]
    adoption.carry("weight_decay", f"x batch {batch} / nbs {adoption['nbs']}", weight_decay=rounded(decay))
    warmup = min(float(adoption["warmup_epochs"]), max(adoption["epochs"] - 1, 0))  # as Ultralytics shortens it
    adoption.carry("warmup_epochs", warmup_epochs=warmup)
    reason = "the warm-up raises the rate of all parameters from zero, with one momentum and the whole batch"
    adoption.leave("warmup_momentum warmup_bias_lr", reason)
    adoption.carry([], "fixed in Ultralytics", clip=10.0, ema_decay=0.9999)


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
    moves = [name for name in ("scale", "degrees", "translate", "copy_paste") if adoption[name]]
    adoption.leave(moves, "does not exist here for boxes; --zoom_out and --iou_crop vary the scale")
    off = int(adoption["close_mosaic"] or 0)
    end = max(0, adoption["epochs"] - off) if off else 0
    adoption.carry("close_mosaic", "strong augmentation ends", strong_epochs=end)
    adoption.skip("auto_augment erasing channels_last dropout")  # of classifiers only
