"""Reader of MMDetection's configs; becomes a preset of recipes/det.py. These configs are Python, and are not executed.

MMEngine counts iterations, in each of which every GPU takes one micro-batch: with `accumulative_counts`, a step is several.
"""

import re
from pathlib import Path
from typing import Any

from common.errors import Refused
from recipes import det
from tools.adopt import detectors
from tools.adopt.adoption import IMAGES, Adoption, epochs_of, equal, facts, falls, flat, rounded
from tools.adopt.python_values import values_of

TOOL = "MMDetection"
FAMILIES = {  # type of the model: ours, and the part that makes it this family
    "FasterRCNN": ("faster_rcnn", "roi_head.type", "StandardRoIHead"),
    "MaskRCNN": ("mask_rcnn", "roi_head.type", "StandardRoIHead"),
    "RetinaNet": ("retinanet", "bbox_head.type", "RetinaHead"),
    "FCOS": ("fcos", "bbox_head.type", "FCOSHead"),
}
SWIN = {(96, (2, 2, 6, 2)): "tiny", (96, (2, 2, 18, 2)): "small", (128, (2, 2, 18, 2)): "base"}
GPUS = 8  # what MMDetection's files are written for
OPTIMIZERS = {  # torch's own defaults
    "SGD": {"lr": 0.001, "momentum": 0.0, "weight_decay": 0.0},
    "Adam": {"lr": 0.001, "weight_decay": 0.0},
    "AdamW": {"lr": 0.001, "weight_decay": 0.01},
}
NO_EFFECT = {
    "belongs to MMEngine; name the run with --output_dir and --name": "default_scope env_cfg log_level log_processor "
    "visualizer vis_backends work_dir launcher randomness custom_imports _scope_ default_hooks.timer default_hooks.logger "
    "default_hooks.param_scheduler default_hooks.sampler_seed default_hooks.visualization",
    "the data give classes and files: --data FOLDER": "dataset_type data_root backend_args file_client_args metainfo classes",
    "repeated in the loaders": "train_pipeline test_pipeline val_pipeline",
    "evaluation is COCO's, over the validation part of --data": "val_dataloader val_evaluator val_cfg test_dataloader "
    "test_evaluator test_cfg tta_model tta_pipeline",
    "pixels are what timm's weights want, padded for each step": "model.type model.data_preprocessor model._scope_",
    "the same command resumes": "resume",
    "not set": "load_from custom_hooks",
    "the data give the classes": "model.roi_head.bbox_head.num_classes model.roi_head.mask_head.num_classes "
    "model.bbox_head.num_classes",
    "the data are those of --data FOLDER": "train_dataloader",
    "the loop of the recipe": "train_cfg",
    "a checkpoint every epoch; --checkpoint_every": "default_hooks.checkpoint",
}
OWN = (
    "model",
    "optim_wrapper",
    "param_scheduler",
    "auto_scale_lr",
    "default_hooks",
    "data_preprocessor",
    "experiment_name",
)
USUAL = ("LoadImageFromFile", "PackDetInputs", "LoadAnnotations", "Pad", "FilterAnnotations", "DefaultFormatBundle")


def read(file: Path, gpus: int = 0, images: int = 0) -> Adoption:
    """What becomes of a config. Raises `Refused` for other models than the families here, and for configs that do more."""
    adoption = Adoption(TOOL, file, det, flat(values_of(file)))
    _model(adoption)
    _Training(adoption, gpus, images).carry()
    _pipeline(adoption)
    settings = {name for names in NO_EFFECT.values() for name in names.split()} | {*OWN}
    for reason, names in NO_EFFECT.items():
        adoption.skip(names.split(), reason)
    variables = {re.split(r"[.\[]", key)[0] for key in adoption.values} - settings
    adoption.skip(sorted(variables), "a variable, which is reported where it is used")
    adoption.finish()
    return adoption


def _model(adoption: Adoption) -> None:
    kind, file = adoption["model.type"], adoption.file
    detector, head, expected = FAMILIES.get(kind, ("", "", ""))
    if not detector or adoption[f"model.{head}"] != expected or adoption["model.neck.type"] != "FPN":
        parts = {name: adoption[f"model.{name}"] for name in ("type", "neck.type", head or "bbox_head.type")}
        named = ", ".join(f"{name} {value}" for name, value in parts.items() if value) or "a config without a model"
        raise Refused(
            f"{file}: {named}: no successor here; families are {', '.join(FAMILIES)} with FPN, and --detector rtdetr_v2 or "
            "dfine (recipes/presets/coco_rtdetrv2_r18.yaml)"
        )
    name, place = _backbone(adoption), "model.backbone"
    if not name:
        raise Refused(
            f"{file}: the backbone {adoption[f'{place}.type']}, as it is here, has no successor: choose one of timm for "
            f"--detector {detector} (recipes/presets/coco_fasterrcnn_r50_1x.yaml has ResNet-50)"
        )
    one_stage = detector in ("retinanet", "fcos")
    adoption.carry("model.type", detector=detector, levels="3-7" if one_stage else "2-6")
    keys = [f"{place}.{key}" for key in "type depth groups base_width arch embed_dims depths".split()]
    adoption.carry([key for key in keys if adoption[key] is not None], model=name)
    where_from = [key for key in adoption.under(f"{place}.init_cfg", f"{place}.pretrained") if adoption[key]]
    adoption.carry(where_from, "timm's weights" if where_from else "", pretrained=bool(where_from))
    adoption.carry_each({"model.neck.out_channels": "width"})
    if one_stage:
        adoption.carry_each({"model.bbox_head.stacked_convs": "convolutions"})
    norm = adoption[f"{place}.norm_cfg.type"]
    names = adoption.under(f"{place}.norm_cfg", f"{place}.norm_eval")
    if adoption[f"{place}.norm_eval"] or adoption[f"{place}.norm_cfg.requires_grad"] is False:
        adoption.carry(names, batch_norm="frozen")
    elif norm in (None, "BN", "SyncBN", "MMSyncBN"):
        adoption.carry(names, batch_norm="global" if "Sync" in str(norm) else "local")
    else:
        adoption.leave(names, "the norms are those of timm's model")
    frozen = adoption[f"{place}.frozen_stages"]
    if frozen is not None and frozen >= 0:
        adoption.carry(f"{place}.frozen_stages", freeze_stages=str(frozen) if frozen else "stem")
    if adoption[f"{place}.drop_path_rate"]:
        adoption.carry_each({f"{place}.drop_path_rate": "drop_path"})
    usual = {"num_stages": 4, "out_indices": (0, 1, 2, 3), "frozen_stages": -1, "init_cfg": None}
    for key in adoption.under(place):
        name = key.removeprefix(f"{place}.")
        if name in ("style", "with_cp", "_scope_") or (name in usual and equal(adoption[key], usual[name])):
            adoption.skip(key, "as in timm's model")
        adoption.leave(key, "the backbone is timm's; choose another one with --model")
    _family(adoption, kind, detector)


def _backbone(adoption: Adoption) -> str:
    """timm's name of the backbone; "" if it has none."""
    kind, depth, groups, width, arch, dims, depths, norm = (
        adoption[f"model.backbone.{name}"]
        for name in "type depth groups base_width arch embed_dims depths norm_cfg.type".split()
    )
    changes = "dcn plugins gen_attention conv_cfg sac deep_stem avg_down dilations strides num_stages".split()
    changed = adoption.under(*(f"model.backbone.{name}" for name in changes))
    plain = all(adoption[key] in (None, 4) for key in changed) and norm in (None, "BN", "SyncBN", "MMSyncBN", "LN")
    if kind in ("ResNet", "ResNeXt") and plain:
        return detectors.resnet(depth, groups or 1, width or 64)
    if kind == "RegNet" and plain and (found := re.fullmatch(r"regnet([xy])_([\d.]+)([mg])f", str(arch))):
        millions = round(float(found[2]) * (1000 if found[3] == "g" else 1))
        return detectors.pretrained(f"regnet{found[1]}_{millions // 100:03d}")
    if kind == "SwinTransformer" and (size := SWIN.get((dims, tuple(depths or ())))):
        return detectors.pretrained(f"swin_{size}_patch4_window7_224")
    return ""


def family(kind: str) -> dict[str, Any]:
    """Settings of the published model of this type, by dotted name."""
    published = facts("mmdet_models")
    return (flat(published["FasterRCNN"]) if kind == "MaskRCNN" else {}) | flat(published[kind])


def _family(adoption: Adoption, kind: str, detector: str) -> None:
    """Settings of neck, heads and matching."""
    same = {f"model.{key}": value for key, value in family(kind).items()}
    other = [
        key for key in adoption.under("model") if key not in adoption.mentioned and not key.endswith(".num_classes")
    ]
    other = [key for key in other if not key.startswith(("model.data_preprocessor", "model._scope_"))]
    missing = [f"{key}: the family has {same[key]}, the file has none" for key in same if key not in adoption.values]
    adoption.family(detector, same, other, (*missing, *detectors.differences(detector)))


class _Training:
    """Batch, length, optimizer and schedule, in steps of the global batch and epochs of `images`."""

    def __init__(self, adoption: Adoption, gpus: int, images: int) -> None:
        self.adoption = adoption
        self.accumulated = int(adoption["optim_wrapper.accumulative_counts"] or 1)
        self.batch = self._batch(gpus)
        self.images, self.repeated = self._data(images)
        self.length = 0.0  # in epochs; 0 if iterations of an unknown number of images

    def carry(self) -> None:
        self._length()
        self._optimizer()
        self._schedule()
        self._hooks()

    def _batch(self, gpus: int) -> int:
        """Carry the batch size: per GPU times --gpus, or the one that `auto_scale_lr` says the rate is meant for."""
        adoption = self.adoption
        per_gpu = int(adoption["train_dataloader.batch_size"] or 0)
        base = int(adoption["auto_scale_lr.base_batch_size"] or 0)
        per_gpu = per_gpu or base // GPUS
        if not per_gpu or not (gpus or base):
            raise Refused(
                f"{adoption.file}: batch_size {per_gpu or 'missing'} is per GPU, and nothing says how many there were: "
                "give --gpus N"
            )
        adoption.gpus = gpus or max(1, base // per_gpu)
        batch = per_gpu * adoption.gpus * self.accumulated
        # MMEngine compares the batch without accumulation with the one that the rate is meant for.
        reference = base * self.accumulated if base and adoption["auto_scale_lr.enable"] else batch
        names = ["train_dataloader.batch_size", "optim_wrapper.accumulative_counts", "auto_scale_lr"]
        note = f"{per_gpu} x {adoption.gpus} GPUs"
        note += f" x {self.accumulated} accumulated" if self.accumulated > 1 else ""
        flags = {"max_micro_batch_size": per_gpu, "lr_batch_size": reference, "lr_scaling": "linear"}
        adoption.carry(adoption.under(*names), note, global_batch_size=batch, **flags)
        if adoption.preset.get("batch_norm", ("",))[0] == "global" and self.accumulated > 1:
            adoption.preset["batch_norm"] = ("local", "--batch_norm global can't accumulate")
        return batch

    def _data(self, images: int) -> tuple[int, int]:
        """Training images (0: unknown), and how often an epoch shows each."""
        adoption, place, repeated = self.adoption, "train_dataloader.dataset", 1
        while adoption[f"{place}.type"] in ("RepeatDataset", "ClassBalancedDataset", "MultiImageMixDataset"):
            if adoption[f"{place}.type"] == "RepeatDataset":
                repeated *= int(adoption[f"{place}.times"])
            if threshold := adoption[f"{place}.oversample_thr"]:
                adoption.carry(f"{place}.oversample_thr", repeat_threshold=threshold)
            place += ".dataset"
        keys = [key for key in adoption.under(place) if key.endswith("ann_file")]
        names = [Path(str(adoption[key])).stem for key in keys]
        if keys and "VOC20" in str(adoption[keys[0]]):
            found = [(key, re.findall(r"VOC(20\d\d)", adoption[key])) for key in keys]
            names = [f"voc_{years[0]}_{Path(adoption[key]).stem}" for key, years in found if years]
        images = images or (sum(IMAGES[name] for name in names) if names and {*names} <= {*IMAGES} else 0)
        known = f"{images:,} images" if images else "their number is not known"
        adoption.leave(keys, f"{known}; give them with --data FOLDER")
        if adoption["train_dataloader.batch_sampler.type"] == "AspectRatioBatchSampler":
            adoption.carry("train_dataloader.batch_sampler", group_window=16)
        filters = [key for key in adoption.under(place) if ".filter_cfg." in key]
        adoption.leave(filters, "images without boxes are trained on as background, small ones are used")
        return images, repeated

    def _steps(self, iterations: int, up: bool = False) -> int:
        """Iterations in steps. A rate that changes at an iteration does so within a step, which already has the new rate."""
        return -(-iterations // self.accumulated) if up else iterations // self.accumulated

    def _epochs(self, count: float, by_epoch: bool, up: bool = False) -> float | int:
        """A number of epochs or iterations of the file, in epochs of the images."""
        if by_epoch:
            return count * self.repeated
        if not self.images:
            raise Refused(
                f"{self.adoption.file}: {count:g} iterations are how many epochs? Give --images N, the number of training "
                "images"
            )
        return epochs_of(self._steps(int(count), up), self.batch, self.images)

    def _length(self) -> None:
        adoption = self.adoption
        epochs, iterations = adoption["train_cfg.max_epochs"], adoption["train_cfg.max_iters"]
        repeats = [key for key in adoption.under("train_dataloader.dataset") if key.endswith(".times")]
        between = int(adoption["train_cfg.val_interval"] or 1)
        if epochs is not None:
            self.length = epochs * self.repeated
            note = f"{epochs} x {self.repeated} times the data" if self.repeated > 1 else ""
            adoption.carry(["train_cfg.max_epochs", *repeats], note, epochs=self.length)
            if between > 1 and self.images:
                adoption.carry(
                    "train_cfg.val_interval", eval_every=-(-between * self.repeated * self.images // self.batch)
                )
            elif between > 1:
                adoption.leave("train_cfg.val_interval", "--eval_every counts steps: give --images N")
        elif iterations:
            note = f"{iterations} iterations, {self.accumulated} per step" if self.accumulated > 1 else ""
            adoption.carry("train_cfg.max_iters", note, max_steps=self._steps(iterations, up=True))
            self.length = self._epochs(iterations, False) if self.images else 0.0
            if adoption.under("train_cfg.val_interval"):
                adoption.carry("train_cfg.val_interval", eval_every=max(1, self._steps(between)))
        else:
            raise Refused(f"{adoption.file}: has no train_cfg.max_epochs or max_iters: nothing to train")
        dynamic = [key for key in adoption.under("train_cfg") if "dynamic" in key]
        adoption.leave(dynamic, "evaluations are equally far apart")

    def _optimizer(self) -> None:
        adoption, place = self.adoption, "optim_wrapper.optimizer"
        kind, nesterov = str(adoption[f"{place}.type"]), adoption[f"{place}.nesterov"]
        if kind in OPTIMIZERS:
            opt = kind.lower() if kind != "SGD" else "sgd" if nesterov else "momentum"
            note = "without Nesterov momentum" if opt == "momentum" else ""
            adoption.carry(adoption.under(f"{place}.type", f"{place}.nesterov"), note, opt=opt)
        else:
            adoption.leave(f"{place}.type", "choose --opt and its --lr")
        for name, default in OPTIMIZERS.get(kind, OPTIMIZERS["SGD"]).items():
            value = adoption[f"{place}.{name}"]
            if value is not None:
                adoption.carry(f"{place}.{name}", **{name: value})
            else:
                adoption.carry([], "torch's default", **{name: default})
        adoption.leave(place, "the optimizer's own defaults are used")
        wrapper = "optim_wrapper.paramwise_cfg"
        if adoption[f"{wrapper}.custom_keys.backbone.lr_mult"] is not None:
            adoption.carry_each({f"{wrapper}.custom_keys.backbone.lr_mult": "backbone_lr_factor"})
        same = (
            "norm_decay_mult bias_decay_mult absolute_pos_embed relative_position_bias_table .norm. bypass_dup".split()
        )
        for key in adoption.under(wrapper):
            if any(part in key for part in same) and adoption[key] in (0, True):
                adoption.skip(key, "norms, biases and what the model exempts have no weight decay")
            adoption.leave(
                key, "rates here: --backbone_lr_factor, --layer_decay; norms and biases have no weight decay"
            )
        limit = "optim_wrapper.clip_grad"
        if adoption[f"{limit}.max_norm"] and adoption[f"{limit}.norm_type"] in (None, 2):
            adoption.carry(limit, clip=adoption[f"{limit}.max_norm"])
        adoption.leave([key for key in adoption.under(limit) if adoption[key] is not None], "--clip limits the norm")
        adoption.skip(limit, "not clipped")
        precision = {None: "fp16", "float16": "fp16", "bfloat16": "bf16"}.get(adoption["optim_wrapper.dtype"], "")
        half = adoption["optim_wrapper.type"] == "AmpOptimWrapper"
        adoption.launch(adoption.under("optim_wrapper.type", "optim_wrapper.dtype"), precision if half else "")
        adoption.skip("optim_wrapper.loss_scale", "the file given to accelerate launch decides")

    def _schedule(self) -> None:
        adoption, schedule, warmup = self.adoption, "", 0.0
        places = sorted({key.split("]")[0] + "]" for key in adoption.under("param_scheduler") if "[" in key})
        for place in places or ["param_scheduler"] * bool(adoption["param_scheduler.type"]):
            kind, end, by_epoch = (adoption[f"{place}.{name}"] for name in ("type", "end", "by_epoch"))
            begin, by_epoch = adoption[f"{place}.begin"] or 0, by_epoch is not False
            rises = kind == "LinearLR" and not begin and not warmup and (adoption[f"{place}.end_factor"] or 1) == 1
            if rises and end:
                warmup = self._epochs(end, by_epoch, up=True)
                names = adoption.under(*(f"{place}.{name}" for name in ("type", "by_epoch", "end", "end_factor")))
                adoption.carry(names, f"until {end}", warmup_epochs=warmup)
                adoption.leave([f"{place}.start_factor", f"{place}.begin"], "the warm-up rises from zero")
            elif kind == "MultiStepLR" and not schedule:
                schedule = "step"  # milestones count from begin, and those after end are not reached
                at = [begin + one for one in adoption[f"{place}.milestones"] if end is None or begin + one < end]
                epochs = falls((self._epochs(one, by_epoch) for one in at), 2 * self.length or 10**6)
                factor = adoption[f"{place}.gamma"]
                flags: dict[str, Any] = (
                    {"step_epochs": epochs, "step_factor": 0.1 if factor is None else factor} if at else {}
                )
                adoption.carry(place, schedule="step" if at else "constant", **flags)
            elif kind == "CosineAnnealingLR" and not schedule and self._whole(place, warmup):
                schedule, peak = "cosine", adoption["optim_wrapper.optimizer.lr"] or 1
                ratio = adoption[f"{place}.eta_min_ratio"] or (adoption[f"{place}.eta_min"] or 0) / peak
                note = "from the end of the warm-up to the end of the run"
                adoption.carry(place, note, schedule="cosine", min_lr_ratio=rounded(ratio))
            else:
                reason = "a warm-up and one of the schedules cosine, linear, step and constant, over the whole run"
                adoption.leave(place, f"{reason}: choose --schedule")
            adoption.skip(place, "the schedule's place in the run")
        if not warmup:
            adoption.carry([], "no linear warm-up in the file", warmup_epochs=0.0)
        if not schedule:
            adoption.carry([], "no schedule in the file that exists here", schedule="constant")

    def _whole(self, place: str, warmup: float) -> bool:
        """Whether a scheduler goes from the end of the warm-up, or before it, to the end of the run."""
        begin, end, by_epoch, span = (
            self.adoption[f"{place}.{name}"] for name in ("begin", "end", "by_epoch", "T_max")
        )
        counts = by_epoch is not False
        early = not begin or self._epochs(begin, counts) <= warmup * 1.01
        ends = [begin or 0, span] if span else [end] if end else []
        return early and (not ends or abs(self._epochs(sum(ends), counts) - self.length) <= 0.02 * self.length)

    def _hooks(self) -> None:
        adoption, kept = self.adoption, self.adoption["default_hooks.checkpoint.max_keep_ckpts"]
        if kept and kept > 0:
            adoption.carry_each({"default_hooks.checkpoint.max_keep_ckpts": "keep_checkpoints"})
        if adoption["load_from"]:
            adoption.leave("load_from", "not read; --init begins with weights of this family")
        if adoption["randomness.seed"] is not None:
            adoption.carry_each({"randomness.seed": "seed"})
        if adoption["randomness.deterministic"]:
            adoption.carry_each({"randomness.deterministic": "deterministic"})
        for place in sorted({key.split("]")[0] + "]" for key in adoption.under("custom_hooks") if "[" in key}):
            average = str(adoption[f"{place}.ema_type"] or "ExponentialMovingAverage")
            if adoption[f"{place}.type"] == "EMAHook" and average in ("ExponentialMovingAverage", "ExpMomentumEMA"):
                momentum = adoption[f"{place}.momentum"] or 0.0002
                decay = (1 - momentum) ** (self.accumulated / (adoption[f"{place}.interval"] or 1))
                note = "1 - momentum" + (f", for each of {self.accumulated} iterations" if self.accumulated > 1 else "")
                begins = adoption.under(f"{place}.begin_iter", f"{place}.begin_epoch")
                adoption.leave(begins, "the average begins with the run")
                rest = [key for key in adoption.under(place) if key not in begins]
                adoption.carry(rest, note, ema_decay=rounded(decay))
            else:
                adoption.leave(place, "hooks don't exist here; see docs/change_it.md")


def _pipeline(adoption: Adoption) -> None:
    """Transforms of training images, and the size of evaluated ones."""
    found = [key for key in adoption.under("train_dataloader.dataset") if re.search(r"pipeline\[\d+\]\.type$", key)]
    unsaid = "not said in the file"
    adoption.preset |= {"hflip": (0.0, ""), "short_sides": ("800", unsaid), "long_side": (1333, unsaid)}
    for key in found:
        _transform(adoption, key.removesuffix(".type"), str(adoption[key]).rsplit(".", 1)[-1])
    for key in adoption.under("val_dataloader"):
        if key.endswith(".scale") and adoption[key.removesuffix("scale") + "type"] == "Resize":
            adoption.carry(key, eval_short_side=min(adoption[key]))
            break


def _transform(adoption: Adoption, place: str, kind: str) -> None:
    scale, probability, factors, directions = (
        adoption[f"{place}.{name}"] for name in ("scale", "prob", "ratio_range", "direction")
    )
    keeps = adoption[f"{place}.keep_ratio"] is not False
    one = isinstance(scale, (list, tuple)) and len(scale) == 2 and isinstance(scale[0], int)
    sides = adoption[f"{place}.scales"] or ([scale] if one else scale)
    if kind in USUAL:
        adoption.skip(place, "what the recipe does with images")
    elif kind in ("Resize", "RandomChoiceResize", "RandomResize") and sides and keeps and not factors:
        shorts, long = sorted({min(side) for side in sides}), max(max(side) for side in sides)
        ranged = kind == "RandomResize" and len(shorts) == 2
        text = detectors.steps_between(*shorts) if ranged else ",".join(map(str, shorts))
        adoption.carry(place, "the range in steps of 32" if ranged else "", short_sides=text, long_side=long)
    elif kind == "RandomResize" and factors and one:
        flags = {
            "scale_jitter": f"{factors[0]:g}-{factors[1]:g}",
            "short_sides": str(min(scale)),
            "long_side": max(scale),
        }
        adoption.carry(place, **flags)
    elif kind == "RandomCrop" and "scale_jitter" in adoption.preset:
        adoption.skip(place, "--scale_jitter cuts what gets larger than the whole image")
    elif kind == "RandomFlip" and probability is not None:
        _flip(adoption, place, probability, directions or "horizontal")
    elif kind in ("Expand", "Mosaic", "MixUp"):
        flag, usual = {"Expand": ("zoom_out", 0.5), "Mosaic": ("mosaic", 1.0), "MixUp": ("mixup", 1.0)}[kind]
        share: Any = usual if probability is None else probability
        adoption.carry(place, **{flag: share})
    elif kind in ("PhotoMetricDistortion", "MinIoURandomCrop", "CopyPaste"):
        flags = {"PhotoMetricDistortion": {"photometric": 0.5}, "MinIoURandomCrop": {"iou_crop": 1.0}}
        adoption.carry(place, **flags.get(kind, {"copy_paste": 1.0}))
    elif kind == "RandomAffine":
        adoption.leave(place, "--rotate, --translate and --scale_jitter do its parts; shear does not exist here")
    else:
        adoption.leave(place, "does not exist here; see docs/change_it.md for an augmentation of your own")


def _flip(adoption: Adoption, place: str, probability: Any, directions: Any) -> None:
    """Carry the left-right part. One probability is shared equally by the directions, as MMCV does."""
    directions = [directions] if isinstance(directions, str) else list(directions)
    if not isinstance(probability, (list, tuple)):
        probability = [probability / len(directions)] * len(directions)
    share = sum(one for one, way in zip(probability, directions, strict=True) if way == "horizontal")
    before = adoption.preset["hflip"][0]  # of an earlier flip: two of them cancel each other
    if "horizontal" in directions:
        note = "" if {*directions} == {"horizontal"} else "other directions don't exist here for boxes"
        adoption.carry(place, note, hflip=rounded(before * (1 - share) + share * (1 - before)))
    adoption.leave(place, "images with boxes are mirrored left to right only: --hflip")
