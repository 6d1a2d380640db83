"""Reader of detectron2's YAML files; becomes a preset of recipes/det.py. No tag in them is executed."""

import ast
import re
from pathlib import Path
from typing import Any

import yaml

from common.errors import Refused
from common.files import SMALL, read_text
from recipes import det
from tools.adopt import detectors
from tools.adopt.adoption import IMAGES, Adoption, _equal, epochs_of, facts, flat, numbers

TOOL = "detectron2"
_DEEPEST = 20  # of files that inherit from each other
_POWERS = (
    "[[x, x * 2**(1.0/3), x * 2**(2.0/3) ] for x in [32, 64, 128, 256, 512 ]]"  # what detectron2's own file evaluates
)
# What the families' files set, which the families have here, too.
RCNN = {
    "MODEL.BACKBONE.NAME": "build_resnet_fpn_backbone",
    "MODEL.RESNETS.OUT_FEATURES": ["res2", "res3", "res4", "res5"],
    "MODEL.FPN.IN_FEATURES": ["res2", "res3", "res4", "res5"],
    "MODEL.ANCHOR_GENERATOR.SIZES": [[32], [64], [128], [256], [512]],
    "MODEL.RPN.IN_FEATURES": ["p2", "p3", "p4", "p5", "p6"],
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 2000,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 1000,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 1000,
    "MODEL.ROI_HEADS.NAME": "StandardROIHeads",
    "MODEL.ROI_HEADS.IN_FEATURES": ["p2", "p3", "p4", "p5"],
    "MODEL.ROI_BOX_HEAD.NAME": "FastRCNNConvFCHead",
    "MODEL.ROI_BOX_HEAD.NUM_FC": 2,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7,
    "MODEL.ROI_MASK_HEAD.NUM_CONV": 4,
}
RETINANET = {
    "MODEL.META_ARCHITECTURE": "RetinaNet",
    "MODEL.BACKBONE.NAME": "build_retinanet_resnet_fpn_backbone",
    "MODEL.RESNETS.OUT_FEATURES": ["res3", "res4", "res5"],
    "MODEL.FPN.IN_FEATURES": ["res3", "res4", "res5"],
    "MODEL.ANCHOR_GENERATOR.SIZES": [_POWERS],
    "MODEL.RETINANET.SMOOTH_L1_LOSS_BETA": 0.0,
}
OPTIMIZER = "SOLVER.WEIGHT_DECAY_NORM SOLVER.WEIGHT_DECAY_BIAS SOLVER.BIAS_LR_FACTOR".split()
NOT_CARRIED = {  # only where they differ from detectron2's defaults
    "DATASETS.PROPOSAL_FILES_TRAIN DATASETS.PROPOSAL_FILES_TEST MODEL.LOAD_PROPOSALS": "proposals are the detector's own",
    "DATALOADER.RANDOM_SUBSET_RATIO": "all training images are used",
    "INPUT.CROP": "--iou_crop shows a part that holds an object; --scale_jitter cuts what gets larger than the image",
    "INPUT.MAX_SIZE_TEST": "evaluation has the same --long_side",
    "MODEL.FPN.NORM MODEL.FPN.FUSE_TYPE": "the pyramid is torchvision's",
    "MODEL.RESNETS.RES5_DILATION MODEL.RESNETS.DEFORM_ON_PER_STAGE MODEL.RESNETS.DEFORM_MODULATED "
    "MODEL.RESNETS.DEFORM_NUM_GROUPS MODEL.RESNETS.RES2_OUT_CHANNELS MODEL.RESNETS.STEM_OUT_CHANNELS": (
        "the backbone is timm's; choose one with --model"
    ),
    "SOLVER.BASE_LR_END SOLVER.NUM_DECAYS SOLVER.RESCALE_INTERVAL": "of a schedule that this preset does not have",
    "TEST.AUG TEST.PRECISE_BN TEST.DETECTIONS_PER_IMAGE": "100 detections per image, each image shown once",
}
OTHER_MODELS = {  # groups that belong to other models than the detector
    "retinanet": "MODEL.RPN MODEL.ROI_HEADS MODEL.ROI_BOX_HEAD MODEL.ROI_MASK_HEAD MODEL.PROPOSAL_GENERATOR",
    "faster_rcnn": "MODEL.RETINANET MODEL.ROI_MASK_HEAD",
    "mask_rcnn": "MODEL.RETINANET",
}
NO_EFFECT = {
    "MODEL.ROI_KEYPOINT_HEAD MODEL.SEM_SEG_HEAD MODEL.PANOPTIC_FPN MODEL.ROI_BOX_CASCADE_HEAD MODEL.KEYPOINT_ON": (
        "belongs to other models"
    ),
    "VERSION OUTPUT_DIR CUDNN_BENCHMARK VIS_PERIOD FLOAT32_PRECISION GLOBAL": "name the run with --output_dir and --name",
    "INPUT.FORMAT MODEL.PIXEL_MEAN MODEL.PIXEL_STD MODEL.RESNETS.STRIDE_IN_1X1": "pixels are what timm's weights want",
    "INPUT.MASK_FORMAT": "outlines are read, and drawn as masks",
    "DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST": "proposals are the detector's own",
    "DATALOADER.NUM_WORKERS MODEL.DEVICE": "--workers, and the file given to accelerate launch",
    "DATALOADER.REPEAT_SQRT": "the square root is used",
    "MODEL.ROI_HEADS.NUM_CLASSES MODEL.RETINANET.NUM_CLASSES": "the data give the classes",
    "SOLVER.REFERENCE_WORLD_SIZE": "results don't depend on the number of GPUs",
    "TEST.EXPECTED_RESULTS TEST.KEYPOINT_OKS_SIGMAS": "belongs to detectron2's own tests, and to keypoints",
}


class _Loader(yaml.SafeLoader):
    """Reads tags for Python objects as the texts behind them."""


def _as_text(loader: yaml.SafeLoader, _suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_mapping(node, deep=True) if isinstance(node, yaml.MappingNode) else node.value


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", _as_text)


def is_mine(file: Path) -> bool:
    """Whether a file has detectron2's keys."""
    return bool(re.search(r"^(_BASE_|MODEL|SOLVER|DATASETS|INPUT|DATALOADER):", _text(file), re.MULTILINE))


def known() -> dict[str, Any]:
    """detectron2's settings by dotted name, with their defaults."""
    return flat(facts("detectron2"))


def load(file: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's settings by dotted name, over those of its `_BASE_`."""
    if file.resolve() in above or len(above) > _DEEPEST:
        raise Refused(f"{file}: _BASE_ leads in a circle, or over more than {_DEEPEST} files")
    try:
        text = _text(file)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise Refused(f"{file}: has aliases (*name), which are not read; write the values out")
        content = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (yaml.YAMLError, RecursionError) as error:
        raise Refused(f"{file}: not readable as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise Refused(f"{file}: must hold `KEY: value` lines")
    base = content.pop("_BASE_", None)
    values: dict[str, Any] = {}
    for one in base if isinstance(base, list) else [base] if base else []:
        if "://" in str(one):
            raise Refused(f"{file}: _BASE_ {one} is not a file here: download it, and name it there")
        path = file.parent / Path(str(one)).expanduser()
        if not path.is_file():
            raise Refused(f"{file}: _BASE_ {one} is missing: put it there as {path}")
        values |= load(path, (*above, file.resolve()))
    return values | {key: _value(value) for key, value in flat(content).items()}


def read(file: Path, gpus: int = 0, images: int = 0) -> Adoption:
    """What becomes of a config. Raises `Refused` for other models than the families here."""
    adoption = Adoption(TOOL, file, det, load(file), known())
    adoption.gpus = gpus
    _model(adoption)
    _solver(adoption, images)
    _input(adoption)
    adoption.finish(NOT_CARRIED, NO_EFFECT)
    return adoption


def _text(file: Path) -> str:
    try:
        return read_text(file, SMALL)
    except OSError as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except ValueError:
        raise Refused(f"{file}: not a text (UTF-8)") from None


def _value(value: Any) -> Any:
    """As detectron2 reads it: "(640, 672)" is a tuple; here it becomes a list."""
    if isinstance(value, str) and value[:1] in ("(", "["):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
    return numbers([*value] if isinstance(value, tuple) else value)


def _model(adoption: Adoption) -> None:
    architecture, backbone = adoption["MODEL.META_ARCHITECTURE"], str(adoption["MODEL.BACKBONE.NAME"])
    expected = RETINANET if architecture == "RetinaNet" else RCNN
    heads, proposals = adoption["MODEL.ROI_HEADS.NAME"], adoption["MODEL.PROPOSAL_GENERATOR.NAME"]
    reasons = {
        "keypoints": adoption["MODEL.KEYPOINT_ON"],
        f"META_ARCHITECTURE {architecture}": architecture not in ("GeneralizedRCNN", "RetinaNet"),
        f"BACKBONE.NAME {backbone} (C4 and DC5 included)": backbone != expected["MODEL.BACKBONE.NAME"],
        f"ROI_HEADS.NAME {heads}": architecture == "GeneralizedRCNN" and heads != "StandardROIHeads",
        f"proposals of {proposals}": proposals != "RPN",
        "a backbone with GroupNorm": adoption["MODEL.RESNETS.NORM"] == "GN",
    }
    depth, groups, width = (adoption[f"MODEL.RESNETS.{name}"] for name in ("DEPTH", "NUM_GROUPS", "WIDTH_PER_GROUP"))
    name = detectors.resnet(depth, groups, width)
    reasons[f"a backbone of depth {depth} with {groups} groups of {width}"] = not name
    if wrong := next((reason for reason, holds in reasons.items() if holds), ""):
        raise Refused(
            f"{adoption.file}: {wrong} has no successor here: "
            "start from recipes/presets/coco_fasterrcnn_r50_1x.yaml or coco_rtdetrv2_r18.yaml"
        )
    detector = (
        "retinanet" if architecture == "RetinaNet" else "mask_rcnn" if adoption["MODEL.MASK_ON"] else "faster_rcnn"
    )
    names = ["MODEL.META_ARCHITECTURE", "MODEL.MASK_ON"]
    adoption.carry(names, detector=detector, levels="3-7" if detector == "retinanet" else "2-6")
    adoption.carry([f"MODEL.RESNETS.{name}" for name in ("DEPTH", "NUM_GROUPS", "WIDTH_PER_GROUP")], model=name)
    weights = str(adoption["MODEL.WEIGHTS"] or "")
    if weights and "ImageNetPretrained" not in weights:
        adoption.leave(
            "MODEL.WEIGHTS", "not read; begin with weights of this family by --init, or with timm's backbone as here"
        )
        adoption.preset["pretrained"] = (True, "weights of ImageNet")
    else:
        adoption.carry("MODEL.WEIGHTS", "timm's weights of ImageNet" if weights else "", pretrained=bool(weights))
    adoption.carry("MODEL.FPN.OUT_CHANNELS", width=adoption["MODEL.FPN.OUT_CHANNELS"])
    if detector == "retinanet":
        adoption.carry("MODEL.RETINANET.NUM_CONVS", convolutions=adoption["MODEL.RETINANET.NUM_CONVS"])
    norm = {"FrozenBN": "frozen", "SyncBN": "global", "nnSyncBN": "global"}.get(
        str(adoption["MODEL.RESNETS.NORM"]), "local"
    )
    adoption.carry("MODEL.RESNETS.NORM", batch_norm=norm)
    frozen = int(adoption["MODEL.BACKBONE.FREEZE_AT"])
    if frozen:
        stages = str(frozen - 1) if frozen > 1 else "stem"  # the stem is detectron2's first stage
        adoption.carry("MODEL.BACKBONE.FREEZE_AT", otherwise="the whole backbone is trained", freeze_stages=stages)
    adoption.skip("MODEL.BACKBONE.FREEZE_AT", "the whole backbone is trained")
    for group in OTHER_MODELS[detector].split():
        adoption.skip(group, f"belongs to other models than {detector}")
    same, tabled = adoption.defaults | expected, {*adoption.under(*_tabled())}
    other = [key for key in adoption.under("MODEL") if key not in adoption.mentioned | tabled]
    kept = [key for key in other if key in same and _equal(adoption[key], same[key])]
    if kept:
        adoption.lines.append(
            detectors.Line("carried", kept, f"-> detector = {detector}", f"{len(kept)} settings of the family")
        )
        adoption.mentioned |= {*kept}
    for key in other:
        if key not in kept:
            adoption.leave(key, f"the family has {same.get(key, 'no such setting')}; change it in a copy of its module")
    detectors.differences(adoption, detector)


def _tabled() -> set[str]:
    return {name for table in (NOT_CARRIED, NO_EFFECT) for names in table for name in names.split()}


def _solver(adoption: Adoption, images: int) -> None:
    batch, steps = int(adoption["SOLVER.IMS_PER_BATCH"]), int(adoption["SOLVER.MAX_ITER"])
    names = adoption["DATASETS.TRAIN"] or []
    names = names if isinstance(names, list) else [names]
    images = images or (sum(IMAGES[name] for name in names) if names and {*names} <= {*IMAGES} else 0)
    if not images:
        raise Refused(
            f"{adoption.file}: lengths are in iterations, and the size of {', '.join(map(str, names)) or 'DATASETS.TRAIN'} "
            "is not known: give --images N, the number of training images"
        )
    adoption.leave("DATASETS.TRAIN", f"{images:,} images; give their folder with --data FOLDER")
    adoption.leave("DATASETS.TEST", "the validation part of --data, or --split")
    micro = max(1, batch // (adoption.gpus or 8))
    note = f"{batch} on {adoption.gpus or 8} GPUs"
    adoption.carry("SOLVER.IMS_PER_BATCH", note, global_batch_size=batch, max_micro_batch_size=micro)
    adoption.carry("SOLVER.MAX_ITER", f"{steps * batch / images:.4g} epochs of {images:,} images", max_steps=steps)
    adoption.carry("SOLVER.BASE_LR", lr=adoption["SOLVER.BASE_LR"], lr_batch_size=batch, lr_scaling="linear")
    nesterov = adoption["SOLVER.NESTEROV"]
    adoption.carry("SOLVER.NESTEROV", "SGD", opt="sgd" if nesterov else "momentum")
    adoption.carry("SOLVER.MOMENTUM", momentum=adoption["SOLVER.MOMENTUM"])
    adoption.carry("SOLVER.WEIGHT_DECAY", weight_decay=adoption["SOLVER.WEIGHT_DECAY"])
    adoption.leave(OPTIMIZER, "norms and biases have no weight decay and the rate of the others", always=False)
    if adoption["SOLVER.LR_SCHEDULER_NAME"] == "WarmupCosineLR":
        adoption.carry("SOLVER.LR_SCHEDULER_NAME", schedule="cosine")
        adoption.skip(["SOLVER.STEPS", "SOLVER.GAMMA"], "of the other schedule")
    elif adoption["SOLVER.LR_SCHEDULER_NAME"] == "WarmupMultiStepLR":
        drops = adoption["SOLVER.STEPS"] if isinstance(adoption["SOLVER.STEPS"], list) else [adoption["SOLVER.STEPS"]]
        drops = [step for step in drops if step]
        epochs = ",".join(str(epochs_of(step, batch, images)) for step in drops)
        names = ["SOLVER.LR_SCHEDULER_NAME", "SOLVER.STEPS", "SOLVER.GAMMA"]
        flags = {"schedule": "step", "step_epochs": epochs, "step_factor": adoption["SOLVER.GAMMA"]}
        adoption.carry(names, f"steps {', '.join(map(str, drops))}", **(flags if drops else {"schedule": "constant"}))
    else:
        adoption.leave(
            "SOLVER.LR_SCHEDULER_NAME", "schedules here are cosine, linear, step and constant: choose --schedule"
        )
    warmup = int(adoption["SOLVER.WARMUP_ITERS"])
    adoption.carry("SOLVER.WARMUP_ITERS", f"{warmup:,} steps", warmup_epochs=epochs_of(warmup, batch, images))
    adoption.leave(["SOLVER.WARMUP_FACTOR", "SOLVER.WARMUP_METHOD"], "the warm-up rises linearly from zero")
    clip = adoption["SOLVER.CLIP_GRADIENTS.CLIP_VALUE"]
    if adoption["SOLVER.CLIP_GRADIENTS.ENABLED"] and adoption["SOLVER.CLIP_GRADIENTS.CLIP_TYPE"] == "full_model":
        adoption.carry("SOLVER.CLIP_GRADIENTS", clip=clip)
    elif adoption["SOLVER.CLIP_GRADIENTS.ENABLED"]:
        adoption.leave(
            "SOLVER.CLIP_GRADIENTS", "single values or parameters are not clipped here; --clip limits the whole norm"
        )
    adoption.skip("SOLVER.CLIP_GRADIENTS", "gradients are not clipped")
    adoption.launch("SOLVER.AMP.ENABLED", "fp16" if adoption["SOLVER.AMP.ENABLED"] else "")
    for name, flag in (("SOLVER.CHECKPOINT_PERIOD", "checkpoint_every"), ("TEST.EVAL_PERIOD", "eval_every")):
        if adoption.changed(name) and adoption[name]:
            adoption.carry(name, **{flag: adoption[name]})
        adoption.skip(name, "every epoch")
    if int(adoption["SEED"]) >= 0:
        adoption.carry("SEED", seed=adoption["SEED"])
    adoption.skip("SEED", "0")


def _input(adoption: Adoption) -> None:
    sides = adoption["INPUT.MIN_SIZE_TRAIN"]
    sides = sides if isinstance(sides, list) else [sides]
    ranged = adoption["INPUT.MIN_SIZE_TRAIN_SAMPLING"] == "range" and len(sides) == 2
    text = detectors.steps_between(*sides) if ranged else ",".join(map(str, sides))
    names = ["INPUT.MIN_SIZE_TRAIN", "INPUT.MIN_SIZE_TRAIN_SAMPLING"]
    adoption.carry(names, "the range in steps of 32" if ranged else "", short_sides=text)
    adoption.carry("INPUT.MAX_SIZE_TRAIN", long_side=adoption["INPUT.MAX_SIZE_TRAIN"])
    if adoption["INPUT.MIN_SIZE_TEST"]:
        adoption.carry("INPUT.MIN_SIZE_TEST", eval_short_side=adoption["INPUT.MIN_SIZE_TEST"])
    else:
        adoption.leave("INPUT.MIN_SIZE_TEST", "evaluated images are resized, to --eval_short_side")
    flip = adoption["INPUT.RANDOM_FLIP"]
    if flip in ("horizontal", "none"):
        adoption.carry("INPUT.RANDOM_FLIP", hflip=0.5 if flip == "horizontal" else 0.0)
    else:
        adoption.leave("INPUT.RANDOM_FLIP", "images with boxes are mirrored left to right only: --hflip 0.5")
    grouped = adoption["DATALOADER.ASPECT_RATIO_GROUPING"]
    adoption.carry("DATALOADER.ASPECT_RATIO_GROUPING", group_window=16 if grouped else 0)
    if adoption["DATALOADER.SAMPLER_TRAIN"] == "RepeatFactorTrainingSampler":
        names = ["DATALOADER.SAMPLER_TRAIN", "DATALOADER.REPEAT_THRESHOLD"]
        adoption.carry(names, repeat_threshold=adoption["DATALOADER.REPEAT_THRESHOLD"])
    adoption.leave("DATALOADER.SAMPLER_TRAIN", "each image is shown once per epoch", always=False)
    adoption.skip("DATALOADER.REPEAT_THRESHOLD", "images are not repeated")
    if adoption["DATALOADER.FILTER_EMPTY_ANNOTATIONS"]:
        adoption.leave("DATALOADER.FILTER_EMPTY_ANNOTATIONS", "images without boxes are trained on as background")
    adoption.skip("DATALOADER.FILTER_EMPTY_ANNOTATIONS", "images without boxes are used")
