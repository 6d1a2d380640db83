"""Reader of the config that a run of MMDetection writes to its work_dir; becomes a preset of recipes/det.py.

It is Python, and is not executed: MMEngine writes values only, without `_base_`.
MMEngine counts iterations, in each of which every GPU takes one micro-batch: with `accumulative_counts`, a step is several.
"""

import ast
import re
from pathlib import Path
from typing import Any

import timm

from common.errors import Refused
from common.files import SMALL, read_text
from recipes import det
from tools.adopt.adoption import Adoption, Line, equal, facts, falls, rounded

_OF_RCNN = (
    "an image's losses are divided by 256 anchors and 512 proposals, not by the number that was sampled",
    "box losses are smooth L1; RoIAlign takes 2 x 2 samples for each of its cells",
)
_OF_ALL = (
    "images without boxes are used",
    "norms and biases have no weight decay; images are downscaled with antialiasing",
)
FAMILIES = {  # type of the model: ours, the part that makes it this family, and what is different for all its configs
    "FasterRCNN": ("faster_rcnn", "roi_head.type", "StandardRoIHead", _OF_RCNN),
    "MaskRCNN": ("mask_rcnn", "roi_head.type", "StandardRoIHead", _OF_RCNN),
    "RetinaNet": (
        "retinanet",
        "bbox_head.type",
        "RetinaHead",
        ("the heads have GroupNorm", "box losses are smooth L1"),
    ),
    "FCOS": (
        "fcos",
        "bbox_head.type",
        "FCOSHead",
        (
            "the head is torchvision's: centerness from the boxes' branch, points within 1.5 strides of a box's centre, GIoU",
            "losses are divided by the number of points in the global batch, not in a GPU's batch",
        ),
    ),
}
SWIN = {(96, (2, 2, 6, 2)): "tiny", (96, (2, 2, 18, 2)): "small", (128, (2, 2, 18, 2)): "base"}
# Weights from ImageNet, by preference.
TAGS = "tv_in1k tv2_in1k gluon_in1k fb_swsl_ig1b_ft_in1k pycls_in1k ms_in1k fb_in1k".split()
NORMS = (None, "BN", "SyncBN", "MMSyncBN")
GPUS = 8  # what MMDetection's files are written for
IMAGES = {
    "instances_train2017": 118287,
    "instances_train2014": 82783,
    "lvis_v0.5_train": 57623,
    "lvis_v1_train": 100170,
}
OPTIMIZERS = {  # torch's own defaults
    "SGD": {"lr": 0.001, "momentum": 0.0, "weight_decay": 0.0},
    "Adam": {"lr": 0.001, "weight_decay": 0.0},
    "AdamW": {"lr": 0.001, "weight_decay": 0.01},
}
NO_EFFECT = (  # what the data, MMEngine's own logs, and evaluation, which is COCO's here, are made of
    "default_scope env_cfg log_level log_processor visualizer vis_backends work_dir launcher randomness custom_imports "
    "_scope_ default_hooks.timer default_hooks.logger default_hooks.param_scheduler default_hooks.sampler_seed "
    "default_hooks.visualization default_hooks.checkpoint dataset_type data_root backend_args file_client_args metainfo "
    "classes train_pipeline test_pipeline val_pipeline val_dataloader val_evaluator val_cfg test_dataloader test_evaluator "
    "test_cfg tta_model tta_pipeline model.type model.data_preprocessor model._scope_ resume load_from custom_hooks "
    "train_dataloader train_cfg"
)
# All others are variables of the file, which are reported where they are used.
SETTINGS = {"model", "optim_wrapper", "param_scheduler", "auto_scale_lr", "default_hooks", *NO_EFFECT.split()}
DATASETS = ("RepeatDataset", "ClassBalancedDataset", "MultiImageMixDataset")  # around another one
USUAL = ("LoadImageFromFile", "PackDetInputs", "LoadAnnotations", "Pad", "FilterAnnotations", "DefaultFormatBundle")
TRANSFORMS = {  # flag and value: a share, where the transform has no `prob`
    "Expand": ("zoom_out", 0.5),
    "Mosaic": ("mosaic", 1.0),
    "MixUp": ("mixup", 1.0),
    "PhotoMetricDistortion": ("photometric", 0.5),
    "MinIoURandomCrop": ("iou_crop", 1.0),
}


def read(file: Path, gpus: int = 0, images: int = 0) -> Adoption:
    """What becomes of a config. Raises `Refused` for other models than the families here."""
    adoption = Adoption("MMDetection", file, det, flat(values_of(file)))
    _model(adoption)
    units = _Units(adoption, gpus, images)
    _length(adoption, units)
    _optimizer(adoption)
    _schedule(adoption, units)
    _hooks(adoption, units)
    _pipeline(adoption)
    adoption.skip(NO_EFFECT)
    variables = {re.split(r"[.\[]", key)[0] for key in adoption.values}
    adoption.skip(sorted(variables - SETTINGS))
    adoption.finish()
    return adoption


class _Dicts(ast.NodeTransformer):
    """Turns dict(a=1) and dict({"a": 1}), as MMEngine writes dicts, into {"a": 1}."""

    def visit_Call(self, call: ast.Call) -> ast.AST:
        self.generic_visit(call)
        match call:
            case ast.Call(func=ast.Name(id="dict"), args=[ast.Dict() as whole], keywords=[]):
                return whole
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words) if all(word.arg for word in words):
                keys: list[ast.expr | None] = [ast.Constant(word.arg) for word in words]
                return ast.Dict(keys, [word.value for word in words])
        return call


def values_of(file: Path) -> dict[str, Any]:
    """The variables of a config of values only. Raises `Refused`."""
    found: dict[str, Any] = {}
    try:
        for statement in ast.parse(read_text(file, SMALL)).body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found[name] = ast.literal_eval(_Dicts().visit(value))
                case _:
                    raise ValueError(f"line {statement.lineno} does more than assign a value to a name")
        if "_base_" in found:
            raise ValueError("it has _base_")
    except OSError as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = f"not the config that a run of MMDetection writes, which has values only ({error!s:.100})"
        raise Refused(f"{file}: {reason}: take the one in its work_dir") from None
    return found


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name: {"a": {"b": [{"c": 1}]}} -> {"a.b[0].c": 1}. Lists of plain values stay whole."""
    found: dict[str, Any] = {}
    if isinstance(values, dict) and values:
        for key, value in values.items():
            found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, (list, tuple)) and any(isinstance(value, dict) for value in values):
        for place, value in enumerate(values):
            found |= flat(value, f"{prefix}[{place}]")
    else:
        found[prefix] = values
    return found


def _model(adoption: Adoption) -> None:
    kind, place = adoption["model.type"], "model.backbone"
    detector, head, expected, differences = FAMILIES.get(kind, ("", "bbox_head.type", "", ()))
    if not detector or adoption[f"model.{head}"] != expected or adoption["model.neck.type"] != "FPN":
        parts = {name: adoption[f"model.{name}"] for name in ("type", "neck.type", head)}
        named = ", ".join(f"{name} {value}" for name, value in parts.items() if value) or "a config without a model"
        ours = "--detector rtdetr_v2 or dfine (recipes/presets/coco_rtdetrv2_r18.yaml)"
        has_none = f"no successor here; families are {', '.join(FAMILIES)} with FPN, and {ours}"
        raise Refused(f"{adoption.file}: {named}: {has_none}")
    if not (name := _backbone(adoption, place)):
        way_out = f"choose one of timm for --detector {detector} (recipes/presets/coco_fasterrcnn_r50_1x.yaml has one)"
        is_other = f"the backbone {adoption[f'{place}.type']}, as it is here, has no successor"
        raise Refused(f"{adoption.file}: {is_other}: {way_out}")
    is_one_stage = detector in ("retinanet", "fcos")
    adoption.carry("model.type", detector=detector, levels="3-7" if is_one_stage else "2-6")
    keys = [f"{place}.{key}" for key in "type depth groups base_width arch embed_dims depths".split()]
    adoption.carry([key for key in keys if adoption[key] is not None], model=name)
    weights = [key for key in adoption.under(f"{place}.init_cfg {place}.pretrained") if adoption[key]]
    adoption.carry(weights, "timm's weights" if weights else "", pretrained=bool(weights))
    adoption.carry_each("model.neck.out_channels:width")
    if is_one_stage:
        adoption.carry_each("model.bbox_head.stacked_convs:convolutions")
    norm, is_trained, is_fixed = adoption.at(place, "norm_cfg.type norm_cfg.requires_grad norm_eval")
    names = adoption.under(f"{place}.norm_cfg {place}.norm_eval")
    if is_fixed or is_trained is False:
        adoption.carry(names, batch_norm="frozen")
    elif norm in NORMS:
        adoption.carry(names, batch_norm="global" if "Sync" in str(norm) else "local")
    adoption.leave(names, "the norms are timm's")
    frozen, drop_path = adoption.at(place, "frozen_stages drop_path_rate")
    if frozen is not None and frozen >= 0:
        adoption.carry(f"{place}.frozen_stages", freeze_stages=str(frozen) if frozen else "stem")
    if drop_path:
        adoption.carry_each(f"{place}.drop_path_rate:drop_path")
    usual = {"num_stages": 4, "out_indices": (0, 1, 2, 3), "frozen_stages": -1, "init_cfg": None}
    same = [name for name, value in usual.items() if equal(adoption[f"{place}.{name}"], value)]
    adoption.skip(f"{place}.{name}" for name in ("style", "with_cp", "_scope_", *same))
    for key in adoption.under(place):
        adoption.leave([key], "the backbone is timm's; choose another one with --model")
    _parts(adoption, kind, detector, differences)


def _parts(adoption: Adoption, kind: str, detector: str, differences: tuple[str, ...]) -> None:
    """Settings of a detector's parts: the published model's are the family's, others are named."""
    published = {f"model.{key}": value for key, value in family(kind).items()}
    adoption.skip(key for key in adoption.under("model") if key.endswith(".num_classes"))
    adoption.skip("model.data_preprocessor model._scope_")
    keys = [key for key in adoption.under("model") if key not in adoption.mentioned]
    kept = [key for key in keys if key in published and equal(adoption[key], published[key])]
    adoption.lines.append(Line("carried", kept, f"-> detector = {detector}", f"{len(kept)} settings of the family"))
    adoption.mentioned |= {*kept}
    for key in keys:
        adoption.leave([key], f"the family has {published.get(key, 'no such setting here')}")
    missing = [key for key in published if key not in adoption.values]
    texts = [f"{key}: the family has {published[key]}, the file has none" for key in missing]
    adoption.lines += [Line("not carried", [], text, "(the detector)") for text in (*texts, *differences, *_OF_ALL)]


def _backbone(adoption: Adoption, place: str) -> str:
    """timm's name of the backbone; "" if it has none."""
    words = "type depth groups base_width arch embed_dims depths norm_cfg.type"
    kind, depth, groups, width, arch, dims, depths, norm = adoption.at(place, words)
    changes = "dcn plugins gen_attention conv_cfg sac deep_stem avg_down dilations strides num_stages"
    changed = adoption.under(f"{place}.{name}" for name in changes.split())
    is_plain = all(adoption[key] in (None, 4) for key in changed) and norm in (*NORMS, "LN")
    name = ""
    if kind in ("ResNet", "ResNeXt") and is_plain:
        name = f"resnext{depth}_{groups}x{width or 64}d" if (groups or 1) > 1 else f"resnet{depth}"
    elif kind == "RegNet" and is_plain and (found := re.fullmatch(r"regnet([xy])_([\d.]+)([mg])f", str(arch))):
        millions = round(float(found[2]) * (1000 if found[3] == "g" else 1))
        name = f"regnet{found[1]}_{millions // 100:03d}"
    elif kind == "SwinTransformer" and (size := SWIN.get((dims, tuple(depths or ())))):
        name = f"swin_{size}_patch4_window7_224"
    if not timm.is_model(name):
        return ""
    tag = next((tag for tag in TAGS if f"{name}.{tag}" in timm.list_pretrained(f"{name}.*")), "")
    return f"{name}.{tag}" if tag else name


def family(kind: str) -> dict[str, Any]:
    """Settings of the published model of this type, by dotted name."""
    published = facts("mmdet_models")
    return (flat(published["FasterRCNN"]) if kind == "MaskRCNN" else {}) | flat(published[kind])


class _Units:
    """Iterations and epochs of a file in ours; carries batch and data."""

    def __init__(self, adoption: Adoption, gpus: int, images: int) -> None:
        self.adoption = adoption
        self.accumulated = int(adoption["optim_wrapper.accumulative_counts"] or 1)
        self.batch = self._batch(gpus)
        self.images, self.repeated = self._data(images)  # images: 0 if unknown; how often an epoch shows each
        self.length = 0.0  # of the run in epochs; 0 if iterations of an unknown number of images

    def steps(self, iterations: int, up: bool = False) -> int:
        """Iterations in steps, `up` to whole ones."""
        return -(-iterations // self.accumulated) if up else iterations // self.accumulated

    def epochs(self, count: float, by_epoch: bool, up: bool = False) -> float | int:
        """A number of epochs or iterations of the file, in epochs of the images; these round up to steps."""
        if by_epoch:
            return count * self.repeated
        if not self.images:
            unknown = f"{count:g} iterations are how many epochs? Give --images N, the number of training images"
            raise Refused(f"{self.adoption.file}: {unknown}")
        steps = self.steps(int(count), up)
        return rounded((steps - 0.01 * (steps > 1)) * self.batch / self.images)

    def _batch(self, gpus: int) -> int:
        """Carry the batch size: per GPU times --gpus, or `auto_scale_lr`'s."""
        adoption = self.adoption
        base = int(adoption["auto_scale_lr.base_batch_size"] or 0)
        per_gpu = int(adoption["train_dataloader.batch_size"] or 0) or base // GPUS
        if not per_gpu or not (gpus or base):
            unknown = f"batch_size {per_gpu or 'missing'} is per GPU, and nothing says how many there were"
            raise Refused(f"{adoption.file}: {unknown}: give --gpus N")
        adoption.gpus = gpus or max(1, base // per_gpu)
        batch = per_gpu * adoption.gpus * self.accumulated
        # MMEngine compares the batch without accumulation with the one that the rate is meant for.
        reference = base * self.accumulated if base and adoption["auto_scale_lr.enable"] else batch
        note = f"{per_gpu} x {adoption.gpus} GPUs x {self.accumulated} accumulated"
        sizes = {"global_batch_size": batch, "max_micro_batch_size": per_gpu, "lr_batch_size": reference}
        names = adoption.under("train_dataloader.batch_size optim_wrapper.accumulative_counts auto_scale_lr")
        adoption.carry(names, note, lr_scaling="linear", **sizes)
        if self.accumulated > 1 and adoption.preset.get("batch_norm", ("",))[0] == "global":
            adoption.preset["batch_norm"] = ("local", "--batch_norm global can't accumulate")
        return batch

    def _data(self, images: int) -> tuple[int, int]:
        adoption, place, repeated = self.adoption, "train_dataloader.dataset", 1
        while adoption[f"{place}.type"] in DATASETS:
            repeated *= int(adoption[f"{place}.times"] or 1)
            if threshold := adoption[f"{place}.oversample_thr"]:
                adoption.carry(f"{place}.oversample_thr", repeat_threshold=threshold)
            place += ".dataset"
        files = [key for key in adoption.under(place) if key.endswith("ann_file")]
        known = [IMAGES.get(Path(str(adoption[key])).stem, 0) for key in files]
        images = images or (sum(known) if all(known) else 0)
        number = f"{images:,} images" if images else "their number is not known"
        adoption.leave(files, f"{number}; give them with --data FOLDER")
        if adoption["train_dataloader.batch_sampler.type"] == "AspectRatioBatchSampler":
            adoption.carry("train_dataloader.batch_sampler", group_window=16)
        filters = [key for key in adoption.under(place) if ".filter_cfg." in key]
        adoption.leave(filters, "images without boxes are trained on as background, small ones are used")
        return images, repeated


def _length(adoption: Adoption, units: _Units) -> None:
    epochs, iterations, between = adoption.at("train_cfg", "max_epochs max_iters val_interval")
    if epochs is not None:
        units.length = epochs * units.repeated
        repeats = [key for key in adoption.under("train_dataloader.dataset") if key.endswith(".times")]
        note = f"{epochs} x {units.repeated} times the data" if units.repeated > 1 else ""
        adoption.carry(["train_cfg.max_epochs", *repeats], note, epochs=units.length)
    elif iterations:
        note = f"{iterations} iterations, {units.accumulated} per step" if units.accumulated > 1 else ""
        adoption.carry("train_cfg.max_iters", note, max_steps=units.steps(iterations, up=True))
        units.length = units.epochs(iterations, False) if units.images else 0.0
    else:
        raise Refused(f"{adoption.file}: has no train_cfg.max_epochs or max_iters: nothing to train")
    odd = [key for key in adoption.under("train_cfg") if "dynamic" in key]
    every = ["train_cfg.val_interval"] if epochs is None or (between or 1) > 1 else []
    adoption.leave([*odd, *every], "evaluations are --eval_every steps apart, by default an epoch")


def _optimizer(adoption: Adoption) -> None:
    place = "optim_wrapper.optimizer"
    kind, nesterov = adoption.at(place, "type nesterov")
    if kind in OPTIMIZERS:
        opt = kind.lower() if kind != "SGD" else "sgd" if nesterov else "momentum"
        note = "without Nesterov momentum" if opt == "momentum" else ""
        adoption.carry(adoption.under(f"{place}.type {place}.nesterov"), note, opt=opt)
    adoption.leave(f"{place}.type", "choose --opt and its --lr")
    for name, default in OPTIMIZERS.get(kind, OPTIMIZERS["SGD"]).items():
        value = adoption[f"{place}.{name}"]
        note = "torch's default" if value is None else ""
        adoption.carry(f"{place}.{name}", note, **{name: default if value is None else value})
    adoption.leave(place, "the optimizer's own defaults are used")
    place = "optim_wrapper.paramwise_cfg"
    if adoption[f"{place}.custom_keys.backbone.lr_mult"] is not None:
        adoption.carry_each(f"{place}.custom_keys.backbone.lr_mult:backbone_lr_factor")
    without_decay = "norm_decay_mult bias_decay_mult absolute_pos_embed relative_position_bias_table .norm. bypass_dup"
    keys = [key for key in adoption.under(place) if any(part in key for part in without_decay.split())]
    adoption.skip(key for key in keys if adoption[key] in (0, True))
    adoption.leave(place, "rates here: --backbone_lr_factor, --layer_decay; norms and biases have no weight decay")
    place = "optim_wrapper.clip_grad"
    limit, norm = adoption.at(place, "max_norm norm_type")
    if limit and norm in (None, 2):
        adoption.carry(place, clip=limit)
    adoption.leave([key for key in adoption.under(place) if adoption[key] is not None], "--clip limits the norm")
    adoption.skip([place, "optim_wrapper.loss_scale"])
    kind, dtype = adoption.at("optim_wrapper", "type dtype")
    half = {None: "fp16", "float16": "fp16", "bfloat16": "bf16"}.get(dtype, "")
    adoption.launch(adoption.under("optim_wrapper.type optim_wrapper.dtype"), half if kind == "AmpOptimWrapper" else "")


def _schedule(adoption: Adoption, units: _Units) -> None:
    schedule, warmup = "", 0.0
    for place in adoption.items("param_scheduler"):
        kind, begin, end, by_epoch, last = adoption.at(place, "type begin end by_epoch end_factor")
        begin, by_epoch = begin or 0, by_epoch is not False
        if kind == "LinearLR" and end and not begin and not warmup and last in (None, 1):
            warmup = units.epochs(end, by_epoch, up=True)
            names = adoption.under(f"{place}.{name}" for name in ("type", "by_epoch", "end", "end_factor"))
            adoption.carry(names, f"until {end}", warmup_epochs=warmup)
            adoption.leave([f"{place}.start_factor", f"{place}.begin"], "the warm-up rises from zero")
        elif kind == "MultiStepLR" and not schedule:
            schedule = "step"  # milestones count from begin, and those after end are not reached
            at = [begin + one for one in adoption[f"{place}.milestones"] if end is None or begin + one < end]
            text = falls((units.epochs(one, by_epoch) for one in at), 2 * units.length or 10**6)
            factor = adoption[f"{place}.gamma"]
            flags: dict[str, Any] = {"step_epochs": text, "step_factor": 0.1 if factor is None else factor}
            adoption.carry(place, schedule="step" if at else "constant", **(flags if at else {}))
        elif kind == "CosineAnnealingLR" and not schedule and _is_whole(adoption, units, place, warmup):
            schedule, peak = "cosine", adoption["optim_wrapper.optimizer.lr"] or 1
            ratio, lowest = adoption.at(place, "eta_min_ratio eta_min")
            note = "from the end of the warm-up to the end of the run"
            adoption.carry(place, note, schedule="cosine", min_lr_ratio=rounded(ratio or (lowest or 0) / peak))
        else:
            reason = "a warm-up and one of the schedules cosine, linear, step and constant, over the whole run"
            adoption.leave(place, f"{reason}: choose --schedule")
        adoption.skip(place)
    if not warmup:
        adoption.carry([], "no linear warm-up in the file", warmup_epochs=0.0)
    if not schedule:
        adoption.carry([], "no schedule in the file that exists here", schedule="constant")


def _is_whole(adoption: Adoption, units: _Units, place: str, warmup: float) -> bool:
    """True if a scheduler goes from the end of the warm-up, or before it, to the end of the run."""
    begin, end, by_epoch, span = adoption.at(place, "begin end by_epoch T_max")
    counts = by_epoch is not False
    if begin and units.epochs(begin, counts) > warmup * 1.01:
        return False
    last = (begin or 0) + span if span else end
    return not last or abs(units.epochs(last, counts) - units.length) <= 0.02 * units.length


def _hooks(adoption: Adoption, units: _Units) -> None:
    if adoption["load_from"]:
        adoption.leave("load_from", "not read; --init begins with weights of this family")
    if adoption["randomness.seed"] is not None:
        adoption.carry_each("randomness.seed:seed")
    adoption.carry_each("randomness.deterministic:deterministic", only_if_set=True)
    for place in adoption.items("custom_hooks"):
        kind, average, momentum, interval = adoption.at(place, "type ema_type momentum interval")
        if kind == "EMAHook" and average in (None, "ExponentialMovingAverage", "ExpMomentumEMA"):
            adoption.leave([f"{place}.begin_iter", f"{place}.begin_epoch"], "the average begins with the run")
            decay = (1 - (momentum or 0.0002)) ** (units.accumulated / (interval or 1))
            note = "1 - momentum" + (f", for each of {units.accumulated} iterations" if units.accumulated > 1 else "")
            rest = [key for key in adoption.under(place) if key not in adoption.mentioned]
            adoption.carry(rest, note, ema_decay=rounded(decay))
        adoption.leave(place, "hooks don't exist here; see docs/change_it.md")


def _pipeline(adoption: Adoption) -> None:
    """Transforms of training images, and the size of evaluated ones."""
    unsaid = "not said in the file"
    adoption.preset |= {"hflip": (0.0, ""), "short_sides": ("800", unsaid), "long_side": (1333, unsaid)}
    for key in adoption.under("train_dataloader.dataset"):
        if re.search(r"pipeline\[\d+\]\.type$", key):
            _transform(adoption, key.removesuffix(".type"), str(adoption[key]).rsplit(".", 1)[-1])
    for key in adoption.under("val_dataloader"):
        if key.endswith(".scale") and adoption[key.removesuffix("scale") + "type"] == "Resize":
            adoption.carry(key, eval_short_side=min(adoption[key]))
            break


def _transform(adoption: Adoption, place: str, kind: str) -> None:
    names = "scale scales prob ratio_range direction keep_ratio"
    scale, scales, probability, factors, directions, keeps = adoption.at(place, names)
    is_one = isinstance(scale, (list, tuple)) and len(scale) == 2 and isinstance(scale[0], int)
    sides = scales or ([scale] if is_one else scale)
    if kind in USUAL:
        adoption.skip(place)
    elif kind in ("Resize", "RandomChoiceResize", "RandomResize") and sides and keeps is not False and not factors:
        shorts, long = sorted({min(side) for side in sides}), max(max(side) for side in sides)
        ranged = kind == "RandomResize" and len(shorts) == 2
        shorts = sorted({*range(shorts[0], shorts[1], 32), shorts[1]}) if ranged else shorts
        note = "the range in steps of 32" if ranged else ""
        adoption.carry(place, note, short_sides=",".join(map(str, shorts)), long_side=long)
    elif kind == "RandomFlip" and directions in (None, "horizontal") and isinstance(probability, (int, float)):
        adoption.carry(place, hflip=probability)
    elif kind == "RandomFlip":
        adoption.leave(place, "images with boxes are mirrored left to right only: --hflip")
    elif kind in TRANSFORMS:
        flag, usual = TRANSFORMS[kind]
        values: dict[str, Any] = {flag: usual if probability is None else probability}
        adoption.carry(place, **values)
    adoption.leave(place, "does not exist here; see docs/change_it.md for an augmentation of your own")
