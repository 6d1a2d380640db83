"""Reader of the args.yaml that Ultralytics' train writes, and of data.yaml.

YOLO models have no successor here. A preset for one has the data, length, batch and augmentation of the file, with model and
optimization of a preset of this project.
"""

from pathlib import Path
from typing import Any

import timm

from common.errors import Refused
from recipes import cls, det
from tools.adopt.adoption import Adoption, facts, numbers, read_settings, rounded

TOOL = "Ultralytics"
PRESETS = Path(det.__file__).parent / "presets"
OPTIMIZERS = "SGD Adam AdamW Adamax NAdam RAdam RMSProp".split()
RT_DETR = {"rtdetr-resnet101": "PekingU/rtdetr_v2_r101vd"}  # the others: r50vd
MODEL = (
    "detector model pretrained width batch_norm drop_path label_smoothing".split()
)  # what a preset gives to a proposed model
RATES = """opt lr lr_batch_size lr_scaling backbone_lr_factor layer_decay schedule warmup_epochs weight_decay clip
ema_decay""".split()
OPTIMIZATION = """optimizer lr0 lrf cos_lr momentum weight_decay warmup_epochs warmup_momentum warmup_bias_lr""".split()

NOT_CARRIED = {  # only where they differ from Ultralytics' defaults
    "single_cls": "merge the classes in the labels",
    "rect": "--group_window 16 puts similar shapes into one step, for detectors whose images are no squares",
    "fraction": "all training images are used",
    "freeze": "layers are not numbered here; --freeze_stages 1 freezes stem and first stage of the backbone",
    "conf iou max_det": "thresholds are the family's own",
    "box cls dfl pose kobj rle angle dlog dgrad dlam cls_pw": "losses have the family's own weights",
    "distill_model dis": "distillation does not exist here",
    "shear perspective flipud bgr cutmix": "does not exist here for boxes",
    "copy_paste_mode": "objects come from another image",
    "resume": "the same command resumes",
    "augment agnostic_nms classes": "evaluation shows each image once, with all classes",
    "cfg": "its settings are in this file already",
}
NO_EFFECT = {
    "mode save save_period exist_ok verbose val plots save_json": "every run saves, evaluates and draws",
    "cls_remap": "classes of the same name keep their weights where the model has them",
    "cache workers device": "--cache, --workers, and the file given to accelerate launch",
    "project name": "name the run with --output_dir and --name",
    "deterministic profile": "--deterministic, --profile",
    "overlap_mask mask_ratio retina_masks": "belongs to YOLO's masks",
    "channels_last dropout": "not of detectors",
    "auto_augment erasing": "only of classifiers",
    "source vid_stride stream_buffer visualize embed show save_frames save_txt save_conf save_crop show_labels show_conf "
    "show_boxes line_width": "belongs to prediction",
    "format optimize dynamic simplify opset workspace quantize dnn nms": "belongs to export",
    "tracker": "belongs to tracking",
    "save_dir": "name the run with --output_dir and --name",
}


def known() -> dict:
    """Ultralytics' settings with their defaults."""
    return facts("ultralytics")["arguments"]


def read(values: dict, file: Path, batch: int = 0) -> Adoption:
    """What becomes of an args.yaml. Raises `Refused` for tasks without a recipe, and for an automatic batch size."""
    task = values.get("task", known()["task"])
    if task not in ("detect", "classify"):
        way = (
            "mask_rcnn reads outlines from COCO's JSON: convert the data and take --detector mask_rcnn, or put task: detect"
            if task == "segment"
            else "recipes classify images and detect boxes"
        )
        raise Refused(f"{file}: task {task!s:.50} has no successor for these data; {way}")
    adoption = Adoption(TOOL, file, det if task == "detect" else cls, values, known())
    adoption.skip("task", "the recipe")
    _model(adoption, Path(str(adoption["model"] or "")).stem, _batch(adoption, batch))
    _lengths(adoption)
    if task == "detect":
        _boxes(adoption)
    else:
        _images(adoption)
    adoption.finish(NOT_CARRIED, NO_EFFECT)
    return adoption


def read_data(values: dict, file: Path) -> Adoption:
    """A preset for the data that a data.yaml describes, with the proposed detector."""
    if "kpt_shape" in values:
        raise Refused(f"{file}: keypoints (kpt_shape) have no recipe here; without them the boxes train")
    adoption = Adoption(f"{TOOL} (data)", file, det, values)
    adoption.carry(["path", "train", "val", "test"], "all parts", data=str(file.parent))
    adoption.skip(["names", "nc"], "the data give the classes")
    adoption.leave("download", "nothing is downloaded by a script: get the data first")
    adoption.gpus = 1
    sizes: dict[str, Any] = {"global_batch_size": 16, "max_micro_batch_size": 16}
    adoption.carry([], "a proposal", short_sides="640", hflip=0.5, epochs=50, **sizes)
    _propose(adoption, [], "coco_dfine_s", MODEL + RATES, model="ustc-community/dfine-small-coco")
    adoption.finish()
    return adoption


def _propose(adoption: Adoption, names: list[str], preset: str, flags: list[str], **changes) -> None:
    """Settings that a preset of this project has for its model."""
    said = numbers(read_settings(PRESETS / f"{preset}.yaml")) | {"lr_scaling": "sqrt"} | changes
    accumulates = adoption.preset["global_batch_size"][0] > adoption.preset["max_micro_batch_size"][0] * adoption.gpus
    if said.get("batch_norm") == "global" and accumulates:
        said["batch_norm"] = "local"  # statistics over the whole batch can't be had in several micro-steps
    found = {flag: said[flag] for flag in flags if flag in said}
    adoption.carry(names, f"proposed: from recipes/presets/{preset}.yaml", **found)


def _model(adoption: Adoption, stem: str, batch: int) -> None:
    """Carry the model, if it has a successor, and then its optimization; else propose one."""
    names, preset, changes, same = (
        ["model", "pretrained"],
        "coco_dfine_s",
        {"model": "ustc-community/dfine-small-coco"},
        False,
    )
    if adoption["task"] == "classify":
        preset, changes, same = "finetune", {}, timm.is_model(stem)
    elif stem.startswith("rtdetr"):
        preset, changes, same = "coco_rtdetrv2_r18", {"model": RT_DETR.get(stem, "PekingU/rtdetr_v2_r50vd")}, True
    if same and adoption["task"] == "classify":
        adoption.carry(names, model=stem, pretrained=bool(adoption["pretrained"]))
    elif same:
        _propose(adoption, names, preset, MODEL, **changes)
    else:
        adoption.leave(
            names, f"{stem or 'the model'} has no successor here: YOLO's weights and losses are not this project's"
        )
        _propose(adoption, [], preset, MODEL, **changes)
    if same and str(adoption["optimizer"]).lower() in map(str.lower, OPTIMIZERS):
        _optimization(adoption, batch)
        return
    reason = "not among the optimizers here" if same and adoption["optimizer"] != "auto" else "meant for another model"
    reason = "a choice that depends on the data" if same and adoption["optimizer"] == "auto" else reason
    adoption.leave(OPTIMIZATION, f"{reason}; the preset has this project's for its model")
    _propose(adoption, [], preset, RATES)


def _batch(adoption: Adoption, batch: int) -> int:
    size = batch or adoption["batch"]
    if not isinstance(size, int) or size < 1:
        raise Refused(
            f"{adoption.file}: batch {size} is a choice of the moment: give the batch size of a step with --batch N"
        )
    devices = adoption["device"]
    devices = devices if isinstance(devices, list) else str("" if devices is None else devices).split(",")
    adoption.gpus = len(devices)
    accumulated = max(1, round(adoption["nbs"] / size))
    note = f"{size} over all GPUs, accumulated {accumulated} times for nbs {adoption['nbs']}"
    adoption.carry(
        ["batch", "nbs"], note, global_batch_size=size * accumulated, max_micro_batch_size=max(1, size // adoption.gpus)
    )
    return size * accumulated


def _lengths(adoption: Adoption) -> None:
    adoption.carry("epochs", epochs=adoption["epochs"])
    adoption.carry("seed", seed=adoption["seed"])
    adoption.carry("patience", "an evaluation each epoch", "a run trains to its end", patience=adoption["patience"])
    if adoption["time"]:
        adoption.carry("time", otherwise="give the length with --epochs", max_hours=adoption["time"])
    adoption.skip("time", "not limited")
    if adoption["split"] != "val":
        adoption.carry("split", split=adoption["split"])
    adoption.skip("split", "the validation part")
    adoption.launch("amp", {"bf16": "bf16", False: "", "fp32": ""}.get(adoption["amp"], "fp16"))
    if adoption["compile"]:
        adoption.carry("compile", compile=True)
    adoption.skip("compile", "not compiled")
    data = Path(str(adoption["data"] or ""))
    if data.suffix in (".yaml", ".yml") and len(data.parts) > 1:
        adoption.carry("data", "the folder of data.yaml", data=str(data.parent))
    elif data.suffix or not data.name or len(data.parts) == 1:
        adoption.leave("data", "give the folder that holds data.yaml, or the image folder, with --data FOLDER")
    else:
        adoption.carry("data", data=str(data))


def _optimization(adoption: Adoption, batch: int) -> None:
    opt, lr = str(adoption["optimizer"]), float(adoption["lr0"])
    adoption.carry("optimizer", "SGD with Nesterov momentum" if opt == "SGD" else "", opt=opt.lower())
    adoption.carry("lr0", lr=lr, lr_batch_size=batch, lr_scaling="none")
    adoption.carry(
        ["lrf", "cos_lr"], schedule="cosine" if adoption["cos_lr"] else "linear", min_lr_ratio=adoption["lrf"]
    )
    adoption.carry("momentum", "not the first beta of Adam" if opt != "SGD" else "", momentum=adoption["momentum"])
    decay = float(adoption["weight_decay"]) * batch / adoption["nbs"]
    adoption.carry("weight_decay", f"x batch {batch} / nbs {adoption['nbs']}", weight_decay=rounded(decay))
    adoption.carry("warmup_epochs", warmup_epochs=adoption["warmup_epochs"])
    adoption.leave(["warmup_momentum", "warmup_bias_lr"], "the warm-up raises the rate of all parameters from zero")
    adoption.carry([], "fixed in Ultralytics", clip=10.0, ema_decay=0.9999)


def _boxes(adoption: Adoption) -> None:
    """Augmentation of images with boxes; images become squares of `imgsz`."""
    side, share = int(adoption["imgsz"]), float(adoption["multi_scale"] or 0)
    square = -(-side // 32) * 32
    sides = range(square - round(square * share / 32) * 32, square + round(square * share / 32) * 32 + 1, 32)
    note = (
        "squares, as a multiple of 32"
        if square != side
        else "squares; one side is drawn for each step"
        if share
        else "squares"
    )
    adoption.carry(["imgsz", "multi_scale"], note, short_sides=",".join(map(str, sides)), eval_short_side=square)
    adoption.carry("fliplr", hflip=adoption["fliplr"])
    adoption.carry("mosaic", mosaic=adoption["mosaic"])
    adoption.carry("mixup", mixup=adoption["mixup"])
    if any(adoption[f"hsv_{channel}"] for channel in "hsv"):
        adoption.carry(["hsv_h", "hsv_s", "hsv_v"], "its strengths are fixed", photometric=0.5)
    adoption.skip(["hsv_h", "hsv_s", "hsv_v"], "off")
    scale = adoption["scale"]
    low, high = scale if isinstance(scale, list) else (1 - float(scale or 0), 1 + float(scale or 0))
    if low != high:
        adoption.carry("scale", scale_jitter=f"{max(low, 0.01):g}-{high:g}")
    adoption.skip("scale", "off")
    for theirs, ours in (("degrees", "rotate"), ("translate", "translate")):
        if adoption[theirs]:
            adoption.carry(theirs, otherwise="does not exist here for boxes", **{ours: adoption[theirs]})
        adoption.skip(theirs, "off")
    if adoption["copy_paste"]:
        adoption.leave("copy_paste", "needs outlines, which are read from COCO's JSON: --copy_paste")
    adoption.skip("copy_paste", "off")
    off = int(adoption["close_mosaic"] or 0)
    adoption.carry(
        "close_mosaic", "strong augmentation ends", strong_epochs=max(0, adoption["epochs"] - off) if off else 0
    )


def _images(adoption: Adoption) -> None:
    """Augmentation of a classifier's images."""
    adoption.carry("imgsz", image_size=int(adoption["imgsz"]), crop_pct=1.0)
    adoption.carry("fliplr", hflip=adoption["fliplr"])
    adoption.carry("flipud", vflip=adoption["flipud"])
    scale = adoption["scale"]
    adoption.carry(
        "scale", "1 - scale", crop_scale=scale[0] if isinstance(scale, list) else rounded(1 - float(scale or 0))
    )
    policy = {
        "randaugment": ("rand-m3-n2", "torchvision's magnitude 9 of 30 is about 3 of timm's 10"),
        "autoaugment": ("original", ""),
        "augmix": ("augmix-m3-w3", ""),
    }.get(str(adoption["auto_augment"]))
    if policy:
        adoption.carry("auto_augment", policy[1], augment=policy[0])
        adoption.skip(["hsv_h", "hsv_s", "hsv_v"], "Ultralytics turns them off beside auto_augment")
    else:
        adoption.skip("auto_augment", "off")
        adoption.carry("hsv_v", "brightness, contrast and saturation alike", color_jitter=adoption["hsv_v"])
        adoption.leave(["hsv_h", "hsv_s"], "--color_jitter has one strength, and does not change hues")
    adoption.carry("erasing", random_erasing=adoption["erasing"])
    adoption.carry("dropout", drop=adoption["dropout"])
    if adoption["channels_last"] is not False:
        adoption.carry("channels_last", channels_last=True)
    names = "mosaic mixup copy_paste close_mosaic degrees translate multi_scale".split()
    adoption.skip([*names, "shear", "perspective", "bgr", "cutmix", "cls_pw", "box", "cls", "dfl"], "only of boxes")
