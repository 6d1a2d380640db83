"""Reader of the config.yaml that a run of detectron2 writes to its OUTPUT_DIR; becomes a preset of recipes/det.py."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import Refused
from recipes import det
from tools.adopt import detectors
from tools.adopt.adoption import Adoption, facts, flat, rounded

OTHER_MODELS = {  # groups that belong to other models than the detector
    "retinanet": "MODEL.RPN MODEL.ROI_HEADS MODEL.ROI_BOX_HEAD MODEL.ROI_MASK_HEAD MODEL.PROPOSAL_GENERATOR",
    "faster_rcnn": "MODEL.RETINANET MODEL.ROI_MASK_HEAD",
    "mask_rcnn": "MODEL.RETINANET",
}


def is_mine(keys: Iterable[str]) -> bool:
    """True if a file with these keys is detectron2's."""
    return not {"_BASE_", "MODEL", "SOLVER", "DATASETS", "INPUT", "DATALOADER"}.isdisjoint(keys)


def known() -> dict[str, Any]:
    """detectron2's settings by dotted name, with their defaults."""
    return flat(facts("detectron2")["defaults"])


def family(architecture: str) -> dict[str, Any]:
    """What the published files of a model set, by dotted name."""
    families = facts("detectron2")["families"]
    return families.get(architecture, families["RCNN"])


def read(values: dict, file: Path, gpus: int = 0, images: int = 0) -> Adoption:
    """What becomes of a config. Raises `Refused` for other models than the families here."""
    if "_BASE_" in values:
        raise Refused(
            f"{file}: has _BASE_: take the config.yaml that the run has written to its OUTPUT_DIR, with all values"
        )
    adoption = Adoption("detectron2", file, det, flat(values), known())
    adoption.gpus = gpus
    _model(adoption)
    _solver(adoption, images)
    _input(adoption)
    adoption.finish(facts("detectron2"))
    return adoption


def _model(adoption: Adoption) -> None:
    architecture, backbone = str(adoption["MODEL.META_ARCHITECTURE"]), str(adoption["MODEL.BACKBONE.NAME"])
    expected = family(architecture)
    heads, proposals = adoption["MODEL.ROI_HEADS.NAME"], adoption["MODEL.PROPOSAL_GENERATOR.NAME"]
    shape = ["MODEL.RESNETS.DEPTH", "MODEL.RESNETS.NUM_GROUPS", "MODEL.RESNETS.WIDTH_PER_GROUP"]
    depth, groups, width = (adoption[key] for key in shape)
    name = detectors.resnet(depth, groups, width)
    reasons = {
        "keypoints": adoption["MODEL.KEYPOINT_ON"],
        f"META_ARCHITECTURE {architecture}": architecture not in ("GeneralizedRCNN", "RetinaNet"),
        f"BACKBONE.NAME {backbone} (C4 and DC5 included)": backbone != expected["MODEL.BACKBONE.NAME"],
        f"ROI_HEADS.NAME {heads}": architecture == "GeneralizedRCNN" and heads != "StandardROIHeads",
        f"proposals of {proposals}": proposals != "RPN",
        "a backbone with GroupNorm": adoption["MODEL.RESNETS.NORM"] == "GN",
        f"a backbone of depth {depth} with {groups} groups of {width}": not name,
    }
    if wrong := next((reason for reason, holds in reasons.items() if holds), ""):
        way_out = "start from recipes/presets/coco_fasterrcnn_r50_1x.yaml or coco_rtdetrv2_r18.yaml"
        raise Refused(f"{adoption.file}: {wrong} has no successor here: {way_out}")
    detector = "mask_rcnn" if adoption["MODEL.MASK_ON"] else "faster_rcnn"
    if architecture == "RetinaNet":
        detector = "retinanet"
        adoption.carry_each("MODEL.RETINANET.NUM_CONVS:convolutions")
    levels = "3-7" if detector == "retinanet" else "2-6"
    adoption.carry("MODEL.META_ARCHITECTURE MODEL.MASK_ON", detector=detector, levels=levels)
    adoption.carry(shape, model=name)
    weights = str(adoption["MODEL.WEIGHTS"] or "")
    if weights and "ImageNetPretrained" not in weights:
        reason = "not read; begin with weights of this family by --init, or with timm's backbone as here"
        adoption.leave("MODEL.WEIGHTS", reason)
    note = "timm's weights of ImageNet" if weights else ""
    adoption.carry("MODEL.WEIGHTS", note, pretrained=bool(weights))
    adoption.carry_each("MODEL.FPN.OUT_CHANNELS:width")
    norms = {"FrozenBN": "frozen", "SyncBN": "global", "nnSyncBN": "global"}
    adoption.carry("MODEL.RESNETS.NORM", batch_norm=norms.get(str(adoption["MODEL.RESNETS.NORM"]), "local"))
    if frozen := int(adoption["MODEL.BACKBONE.FREEZE_AT"]):
        stages = str(frozen - 1) if frozen > 1 else "stem"  # the stem is detectron2's first stage
        adoption.carry("MODEL.BACKBONE.FREEZE_AT", freeze_stages=stages)
    adoption.skip(OTHER_MODELS[detector])
    tables = [*facts("detectron2")["not carried"].values(), facts("detectron2")["no effect"]]
    tabled = {*adoption.under(name for names in tables for name in names)}
    keys = [key for key in adoption.under("MODEL") if key not in adoption.mentioned | tabled]
    adoption.family(detector, adoption.defaults | expected, keys, detectors.differences(detector))


def _solver(adoption: Adoption, images: int) -> None:
    batch, steps = int(adoption["SOLVER.IMS_PER_BATCH"]), int(adoption["SOLVER.MAX_ITER"])
    names = [str(name) for name in adoption["DATASETS.TRAIN"] or []]
    images = images or detectors.images_of(names)
    if not images:
        unknown = f"lengths are in iterations, and the size of {', '.join(names) or 'DATASETS.TRAIN'} is not known"
        raise Refused(f"{adoption.file}: {unknown}: give --images N, the number of training images")
    adoption.leave("DATASETS.TRAIN", f"{images:,} images; give their folder with --data FOLDER")
    adoption.leave("DATASETS.TEST", "the validation part of --data, or --split")
    gpus = adoption.gpus or 8
    sizes = {"global_batch_size": batch, "max_micro_batch_size": max(1, batch // gpus)}
    adoption.carry("SOLVER.IMS_PER_BATCH", f"{batch} on {gpus} GPUs", **sizes)
    adoption.carry("SOLVER.MAX_ITER", f"{steps * batch / images:.4g} epochs of {images:,} images", max_steps=steps)
    rate = adoption["SOLVER.BASE_LR"]
    adoption.carry("SOLVER.BASE_LR", lr=rate, lr_batch_size=batch, lr_scaling="linear")
    adoption.carry("SOLVER.NESTEROV", "SGD", opt="sgd" if adoption["SOLVER.NESTEROV"] else "momentum")
    adoption.carry_each("SOLVER.MOMENTUM:momentum SOLVER.WEIGHT_DECAY:weight_decay")
    kind, drops = adoption["SOLVER.LR_SCHEDULER_NAME"], [step for step in adoption["SOLVER.STEPS"] if step]
    if kind == "WarmupCosineLR":
        ratio = rounded(adoption["SOLVER.BASE_LR_END"] / rate)
        note = "from the end of the warm-up; detectron2 counts from step 0"
        adoption.carry("SOLVER.LR_SCHEDULER_NAME SOLVER.BASE_LR_END", note, schedule="cosine", min_lr_ratio=ratio)
        adoption.skip("SOLVER.STEPS SOLVER.GAMMA")
    elif kind == "WarmupMultiStepLR":
        flags: dict[str, Any] = {"schedule": "constant"}
        if drops:
            epochs = (detectors.epochs_of(step, batch, images) for step in drops)
            text = detectors.falls(epochs, detectors.epochs_of(2 * steps, batch, images))
            flags = {"schedule": "step", "step_epochs": text, "step_factor": adoption["SOLVER.GAMMA"]}
        note = f"steps {', '.join(map(str, drops))}"
        adoption.carry("SOLVER.LR_SCHEDULER_NAME SOLVER.STEPS SOLVER.GAMMA", note, **flags)
    else:
        reason = "schedules here are cosine, linear, step and constant: choose --schedule"
        adoption.leave("SOLVER.LR_SCHEDULER_NAME", reason)
    warmup = int(adoption["SOLVER.WARMUP_ITERS"])
    epochs_of_warmup = detectors.epochs_of(warmup, batch, images)
    adoption.carry("SOLVER.WARMUP_ITERS", f"{warmup:,} steps", warmup_epochs=epochs_of_warmup)
    adoption.leave("SOLVER.WARMUP_FACTOR SOLVER.WARMUP_METHOD", "the warm-up rises linearly from zero")
    limit = "SOLVER.CLIP_GRADIENTS"
    if adoption[f"{limit}.ENABLED"]:
        if adoption[f"{limit}.CLIP_TYPE"] == "full_model" and adoption[f"{limit}.NORM_TYPE"] == 2:
            adoption.carry(limit, clip=adoption[f"{limit}.CLIP_VALUE"])
        adoption.leave(limit, "single values or parameters are not clipped here; --clip limits the whole norm")
    adoption.skip(limit)
    adoption.launch("SOLVER.AMP.ENABLED", "fp16" if adoption["SOLVER.AMP.ENABLED"] else "")
    adoption.carry_each("SOLVER.CHECKPOINT_PERIOD:checkpoint_every TEST.EVAL_PERIOD:eval_every", only_if_set=True)
    if int(adoption["SEED"]) >= 0:
        adoption.carry("SEED", seed=adoption["SEED"])


def _input(adoption: Adoption) -> None:
    sides = adoption["INPUT.MIN_SIZE_TRAIN"]
    ranged = adoption["INPUT.MIN_SIZE_TRAIN_SAMPLING"] == "range" and len(sides) == 2
    note, text = "the range in steps of 32" if ranged else "", detectors.sides_of(sides, ranged)
    adoption.carry("INPUT.MIN_SIZE_TRAIN INPUT.MIN_SIZE_TRAIN_SAMPLING", note, short_sides=text)
    adoption.carry_each("INPUT.MAX_SIZE_TRAIN:long_side")
    if adoption["INPUT.MIN_SIZE_TEST"]:
        adoption.carry_each("INPUT.MIN_SIZE_TEST:eval_short_side")
    adoption.leave("INPUT.MIN_SIZE_TEST", "evaluated images are resized, to --eval_short_side")
    flip = adoption["INPUT.RANDOM_FLIP"]
    if flip in ("horizontal", "none"):
        adoption.carry("INPUT.RANDOM_FLIP", hflip=0.5 if flip == "horizontal" else 0.0)
    adoption.leave("INPUT.RANDOM_FLIP", "images with boxes are mirrored left to right only: --hflip 0.5")
    is_grouped = adoption["DATALOADER.ASPECT_RATIO_GROUPING"]
    adoption.carry("DATALOADER.ASPECT_RATIO_GROUPING", group_window=16 if is_grouped else 0)
    if adoption["DATALOADER.SAMPLER_TRAIN"] == "RepeatFactorTrainingSampler":
        threshold = adoption["DATALOADER.REPEAT_THRESHOLD"]
        adoption.carry("DATALOADER.SAMPLER_TRAIN DATALOADER.REPEAT_THRESHOLD", repeat_threshold=threshold)
    adoption.skip("DATALOADER.REPEAT_THRESHOLD")
    if adoption["DATALOADER.FILTER_EMPTY_ANNOTATIONS"]:
        adoption.leave("DATALOADER.FILTER_EMPTY_ANNOTATIONS", "images without boxes are trained on as background")
