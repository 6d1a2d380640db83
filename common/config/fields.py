"""Fields of a configuration, and the dataclasses of fields that recipes share.

A recipe's `Config` is a flat dataclass. It inherits the shared fields from the dataclasses below. The docstring under a
field is its help text.
"""

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Literal

MOST_PROFILED = 100  # steps in a trace, which takes a few MB per step
MOST_EPOCHS = 10**6


def option(
    default,
    *,
    low=None,
    high=None,
    may_change=False,
    check=None,
    photographs=None,
    of_evaluation=False,
):
    """A field of a configuration.

    Args:
        low, high: limits of a number, both included.
        may_change: a resumed run may have another value.
        check: check(value) returns what is wrong with a text, or "" if nothing is.
        photographs: the default for data other than digits (`common.training.defaults`).
        of_evaluation: only --eval_only takes it: a run measures the model as it exports it.
    """
    limits = {"low": low, "high": high, "check": check}
    others = {"may_change": may_change, "photographs": photographs, "of_evaluation": of_evaluation}
    return dataclasses.field(default=default, metadata=limits | others)


def path_option(default: str, *, may_change=False, photographs=None):
    """A field for a path, or for a name that may be given instead of one."""
    return option(default, may_change=may_change, check=_wrong_with_path, photographs=photographs)


def field_names(config_class: type) -> list[str]:
    """The fields of a configuration, the recipe's own first, in the order in which the recipe has them."""
    return list(
        dict.fromkeys([*config_class.__annotations__, *(field.name for field in dataclasses.fields(config_class))])
    )


def whole_numbers(text: str, separator: str) -> tuple[int, ...]:
    """The numbers in a text such as "640,672"; an empty tuple if it is anything else."""
    parts = [part.strip() for part in text.split(separator)]
    return tuple(map(int, parts)) if all(re.fullmatch("[0-9]{1,18}", part) for part in parts) else ()


def list_of(text: str) -> list[str]:
    """The names in a text such as "a, b"."""
    return [name.strip() for name in text.split(",")] if text.strip() else []


def steps_between(text: str) -> tuple[int, int] | None:
    """The first and last step of a range, counted from 1: "10-14" -> (10, 14), "7" -> (7, 7); None for any other text."""
    found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    return (first, last) if 1 <= first <= last else None


def _wrong_with_path(text: str) -> str:
    """Why `text` can't be a path, or "" if it can."""
    sizes = [len(os.fsencode(part)) for part in text.split("/")]
    if max(sizes) > 255 or len(sizes) > 255 or sum(sizes) + len(sizes) > 4096:
        return "is too long for a path: it has at most 255 names, each of 255 bytes, and 4,095 bytes in all"
    user = text.split("/")[0]
    if user.startswith("~") and os.path.expanduser(user) == user:
        return f"there is no user {user[1:]}; a folder of that name is ./{user}"
    return ""


def wrong_with_sizes(text: str) -> str:
    """Why `text` can't be the sizes of --eval_sizes, or "" if it can."""
    sizes = whole_numbers(text, ",")
    if text and not (sizes and 1 <= min(sizes) and max(sizes) <= 8192 and len(set(sizes)) == len(sizes) <= 10):
        return "must be up to 10 different lengths in pixels joined by commas, such as 480,640,800, each at most 8192"
    return ""


def _wrong_with_profile(text: str) -> str:
    steps = steps_between(text)
    if text and not steps:
        return "must be FIRST-LAST, two steps counted from 1 such as 10-14, or one step"
    if text and steps[1] - steps[0] >= MOST_PROFILED:
        return f"are more than {MOST_PROFILED} steps, a trace that no viewer opens: take fewer"
    return ""


def _wrong_with_tags(text: str) -> str:
    tags = list_of(text)
    if not all(0 < len(tag) <= 64 for tag in tags) or len(set(tags)) < len(tags):
        return "must be different tags of at most 64 characters, separated by commas, such as baseline,night"
    return ""


def _wrong_with_group(text: str) -> str:
    return "" if len(text) <= 128 else "is longer than W&B takes; give at most 128 characters"


def _wrong_with_stages(text: str) -> str:
    return "" if text in ("stem", "all") or re.fullmatch("[0-9]{1,4}", text) else "must be a number, stem or all"


def _wrong_with_unfreezing(text: str) -> str:
    epochs = text.split(",") if text else []
    if not all(re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", epoch) for epoch in epochs):
        return "must be epochs, such as 1 or 1,2,3.5"
    return "" if epochs == sorted(epochs, key=float) else "must be epochs in ascending order"


class SharedFields:
    """Base of the dataclasses of fields that recipes share.

    A recipe may state such a field again, to show the default that it has: `epochs: float = 10.0`, without a docstring. Limits,
    `may_change` and the help text stay those of the shared field; `photographs` does not.
    """

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls).get("__annotations__", {}):
            bases = (getattr(base, "__dataclass_fields__", {}) for base in cls.__mro__[1:])
            shared = next((fields[name] for fields in bases if name in fields), None)
            if shared is None:
                continue
            stated = vars(cls)[name]
            if not isinstance(stated, dataclasses.Field):
                stated = option(stated)
            own = {key: value for key, value in stated.metadata.items() if value is not None and value is not False}
            metadata = shared.metadata | {"photographs": None} | own
            setattr(cls, name, dataclasses.field(default=stated.default, metadata=metadata))


@dataclass
class RunConfig(SharedFields):
    """Settings of every run: parts of the data, length, batch size, folders, cadences, processes."""

    val_share: float = option(0.2, low=0, high=1)
    """Share of the images that is held out for evaluation if the data has no validation split."""
    split: str = option("")
    """Split of the data to evaluate on, also during training: val, test, or a name that the data uses; with --eval_only also
    train, or all for data without splits. Default: val, or the held-out share if there is none."""
    eval_flip: bool = option(False, of_evaluation=True)
    """With --eval_only: show each image also mirrored left to right. Probabilities are averaged, detections are merged."""
    image_column: str = ""
    """Tables: column of the images (default: found by its type)."""
    global_batch_size: int = option(64, low=1, high=2**20)
    """Samples per optimizer step, over all processes. How they are distributed is derived and does not change the result."""
    max_micro_batch_size: int = option(256, low=1, high=2**20, may_change=True)
    """Most samples that one device processes at once; gradients of a larger share are accumulated over micro-steps."""
    epochs: float = option(10.0, low=0, high=MOST_EPOCHS, may_change=True)
    """Length of the run in passes over the training set, rounded up to whole steps."""
    max_steps: int = option(0, low=0, high=10**9, may_change=True)
    """Length of the run in steps, instead of --epochs (0: use --epochs)."""
    min_epoch_steps: int = option(0, low=0, high=10**6)
    """Steps that an epoch counts as at least, for little data: wherever a length or cadence is in epochs (0: no minimum)."""
    patience: int = option(0, low=0, may_change=True)
    """Evaluations without a better result after which the run ends (0: off)."""
    max_hours: float = option(0.0, low=0, high=10**6, may_change=True)
    """Hours of training after which the run ends, over all its starts; evaluations and start-up don't count (0: off)."""
    seed: int = option(0, low=0, high=2**63 - 1)
    """Determines initial weights, order of the samples and augmentation."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of weights and activations; float64 is for checking that layouts agree. fp16/bf16: see the Accelerate config."""
    output_dir: str = path_option("runs", may_change=True)
    """Folder in which run folders are created."""
    name: str = path_option("", may_change=True)
    """Name of the run folder (default: the recipe's name and a hash of the configuration, so that the same command resumes)."""
    resume: str = path_option("auto", may_change=True)
    """auto: resume from the newest intact checkpoint of the run folder; never: start a new run; or a checkpoint folder."""
    allow_changed_source: bool = option(False, may_change=True)
    """Resume although the recipe's source has changed since the checkpoint was made."""
    checkpoint_every: int = option(0, low=0, may_change=True)
    """Steps between checkpoints (0: at the end of every epoch). There is always one after the last step."""
    keep_checkpoints: int = option(2, low=1, may_change=True)
    """Number of complete checkpoints to keep on disk."""
    eval_every: int = option(0, low=0, may_change=True)
    """Steps between evaluations (0: at the end of every epoch). There is always one after the last step."""
    log_every: int = option(10, low=1, may_change=True)
    """Steps between rows of metrics.jsonl and the dashboard."""
    collective_timeout: int = option(1800, low=10, high=10**7, may_change=True)
    """Seconds that a process may keep the others waiting; then it is reported and all processes end."""
    deterministic: bool = option(False, may_change=True)
    """GPUs: repeat a run bit for bit on the same layout, with slower kernels; refused if one is missing. CPUs always repeat."""
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compression of gradients between processes: none, half precision, or low rank. All but none change the result."""
    powersgd_rank: int = option(1, low=1, high=2**16)
    """comm_hook powersgd: rank of the approximation; a higher rank is more exact and sends more."""
    bucket_cap_mb: int = option(25, low=1, high=2**16, may_change=True)
    """MiB of gradients that are sent together during the backward pass; changes at most the last bits of the result."""
    workers: int = option(-1, low=-1, high=1024, may_change=True)
    """Data-loading processes per rank (0: load in the training process; -1: all cores, divided among the ranks)."""
    tracker: Literal["wandb", "tensorboard", "trackio", "none"] = option("wandb", may_change=True)
    """Dashboard; wandb without an API key runs offline. metrics.jsonl is written in any case."""
    project: str = option("vision-recipes", may_change=True)
    """Project name on the dashboard."""
    tags: str = option("", may_change=True, check=_wrong_with_tags)
    """Tags on the dashboard, separated by commas: baseline,night."""
    group: str = option("", may_change=True, check=_wrong_with_group)
    """Group of runs on the dashboard, such as the trials of a sweep."""
    notes: str = option("", may_change=True)
    """A remark on the dashboard."""
    profile: str = option("", may_change=True, check=_wrong_with_profile)
    """Steps to profile with torch.profiler, FIRST-LAST as in the log (10-14); one trace per rank in the run folder."""
    max_broken_share: float = option(0.02, low=0, high=1, may_change=True)
    """Stop if more than this share of any 1,000 (or slightly more) consecutive training images can't be read."""
    dry_run: bool = option(False, may_change=True)
    """Print the start table, then try two steps, an evaluation, and saving and loading a checkpoint, in a temporary folder."""


@dataclass
class OptimizationConfig(SharedFields):
    """Settings of the optimization: optimizer, learning rate, clipping, averaging."""

    opt: str = "adamw"
    """Any optimizer of timm's factory: adamw, sgd, lion, lamb, ..."""
    lr: float = option(4e-3, low=0, high=10**6)
    """Peak learning rate for the batch size --lr_batch_size."""
    lr_batch_size: int = option(64, low=1)
    """Global batch size that --lr is meant for; see --lr_scaling."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate scales with global_batch_size / lr_batch_size."""
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """Learning rate schedule after the warm-up."""
    warmup_epochs: float = option(0.0, low=0, high=MOST_EPOCHS)
    """Length of the linear warm-up from zero, in epochs."""
    min_lr_ratio: float = option(0.0, low=0, high=1)
    """Final learning rate of cosine and linear, as a share of the peak."""
    step_epochs: str = "30"
    """schedule step: epochs between two drops of the learning rate, or the epochs of the drops, separated by commas (8,11)."""
    step_factor: float = option(0.1, low=0, high=1)
    """schedule step: factor of the learning rate at each drop."""
    weight_decay: float = option(0.05, low=0, high=10**6)
    """Weight decay; not applied to norms, biases and parameters that the model exempts."""
    momentum: float = option(0.9, low=0, high=1)
    """Momentum of SGD and similar optimizers."""
    layer_decay: float = option(1.0, low=0, high=1)
    """Layer-wise learning rate decay for fine-tuning: factor per layer, from the head down (1: off)."""
    backbone_lr_factor: float = option(1.0, low=0, high=10**6)
    """Factor of the backbone's learning rate (1: off). Of a classifier, all but the head is backbone."""
    neck_lr_factor: float = option(1.0, low=0, high=10**6)
    """Detectors: factor of the learning rate of the feature pyramid, or of a DETR's projections and encoder."""
    head_lr_factor: float = option(1.0, low=0, high=10**6)
    """Factor of the head's learning rate; of a DETR, all behind the encoder is head."""
    freeze_stages: str = option("0", check=_wrong_with_stages)
    """Stages of the backbone that do not train, with their BatchNorm: a number (1: stem and first stage), stem, or all."""
    unfreeze_epochs: str = option("", check=_wrong_with_unfreezing)
    """Epochs after which the frozen stages begin to train, as equal parts, from the last stage to the first (4 stages and
    1,2: two after epoch 1, two and the stem after epoch 2). Default: never."""
    clip: float = option(0.0, low=0)
    """Gradient clipping: largest norm (0: off); see --clip_mode."""
    clip_mode: Literal["norm", "agc"] = "norm"
    """Clip the global gradient norm, or each unit relative to its weights (AGC: Brock et al., 2021)."""
    ema_decay: float = option(0.0, low=0, high=1)
    """Decay of the exponential moving average of the weights, with warm-up (0: off). If on, it is what is exported."""


@dataclass
class AugmentationConfig(SharedFields):
    """Augmentation of training images; each draw is a pure function of the seed and the sample's position."""

    crop_scale: float = option(0.7, low=0, high=1)
    """Smallest area of a random crop, as a share of the image (ImageNet: 0.08; 1: only its ratio varies)."""
    hflip: float = option(0.0, low=0, high=1)
    """Probability of a horizontal flip (digits and text: 0)."""
    vflip: float = option(0.0, low=0, high=1)
    """Probability of a vertical flip."""
    color_jitter: float = option(0.0, low=0, high=10)
    """Strength of brightness, contrast and saturation jitter."""
    augment: str = ""
    """Policy in timm's notation: rand-m9-mstd0.5, augmix-m3-w3, original (AutoAugment); empty: none."""
    random_erasing: float = option(0.0, low=0, high=1)
    """Probability of random erasing: a rectangle is replaced by noise."""
    mixup: float = option(0.0, low=0, high=1000)
    """Alpha of MixUp (0: off)."""
    cutmix: float = option(0.0, low=0, high=1000)
    """Alpha of CutMix (0: off); with both MixUp and CutMix, each pair of images gets one of them with equal probability."""
    repeats: int = option(1, low=1)
    """Repeated augmentation: how many times each image occurs in its global batch."""


@dataclass
class BoxAugmentationConfig(SharedFields):
    """Augmentation of training images with boxes; each draw is a pure function of the seed and the sample's position."""

    scale_jitter: str = ""
    """Large-scale jitter: range of a factor of the scale, such as 0.1-2; what gets larger than the whole image is cut."""
    hflip: float = option(0.0, low=0, high=1, photographs=0.5)
    """Probability of a left-right mirror image (photographs: 0.5; digits and text: 0)."""
    photometric: float = option(0.0, low=0, high=1)
    """Probability of each of several distortions of brightness, contrast and colour."""
    iou_crop: float = option(0.0, low=0, high=1)
    """Probability of showing a part that holds an object, as in SSD."""
    zoom_out: float = option(0.0, low=0, high=1)
    """Probability of laying the image on a ground of up to 4 times its sides, as in SSD."""
    mosaic: float = option(0.0, low=0, high=1)
    """Probability of showing parts of four images around a point, as in YOLOX."""
    mixup: float = option(0.0, low=0, high=1)
    """Probability of blending with another image in equal parts, with the objects of both, as in YOLOX."""
    copy_paste: float = option(0.0, low=0, high=1)
    """Probability of pasting some objects of another image over an image (Simple Copy-Paste); needs data with outlines."""
    rotate: float = option(0.0, low=0, high=180)
    """Largest rotation in degrees, drawn uniformly from both directions."""
    translate: float = option(0.0, low=0, high=1)
    """Largest shift as a share of the image's width and height, drawn uniformly from both directions."""
    strong_epochs: float = option(0.0, low=0, high=MOST_EPOCHS)
    """Epochs after which photometric, iou_crop, zoom_out, mosaic, mixup and copy_paste end (0: never)."""


@dataclass
class ReadingConfig(SharedFields):
    """How training images are read. Both --cache and --decode change pixels, so a resumed run keeps them."""

    cache: int = option(0, low=0, high=10**6)
    """Cache decoded training images, scaled down to at most the area of a square with this side in pixels (0: off)."""
    cache_folder: str = path_option("", may_change=True)
    """Folder with room for the --cache, kept in an unnamed file there. Default: memory."""
    decode: Literal["worker", "device"] = "worker"
    """Where JPEGs are decoded, cropped and resized: in the data workers, or on the device."""
