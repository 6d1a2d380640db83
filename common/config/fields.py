"""Fields of a configuration, and those that all recipes share.

A recipe's `Config` is a flat dataclass with a docstring under each field. What recipes share it inherits from the dataclasses
below.
"""

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Literal

MOST_PROFILED = 100  # steps in a trace, which has some MB for each
MOST_EPOCHS = 10**6


def option(default, *, low=None, high=None, may_change=False, check=None, photographs=None, added=False):
    """A field with limits (both included); `may_change` marks what a resumed run may be given another value for.

    `check(value)` says what is wrong with a text, "" where nothing is. `photographs` is the default for data other than
    digits (`common.training.defaults`). `added` marks a field that runs of before don't have: they resume with its default.
    """
    limits = {"low": low, "high": high, "check": check}
    others = {"may_change": may_change, "photographs": photographs, "added": added}
    return dataclasses.field(default=default, metadata=limits | others)


def path_option(default: str, *, may_change=False, photographs=None):
    """A field for a path, or for a name that stands in the place of one."""
    return option(default, may_change=may_change, check=_wrong_with_path, photographs=photographs)


def field_names(config_class: type) -> list[str]:
    """The fields of a configuration, the recipe's own first, in the order in which the recipe has them."""
    return list(
        dict.fromkeys([*config_class.__annotations__, *(field.name for field in dataclasses.fields(config_class))])
    )


def whole_numbers(text: str, separator: str) -> tuple[int, ...]:
    """The numbers in a text, such as "640,672"; none if it is anything else."""
    parts = [part.strip() for part in text.split(separator)]
    return tuple(map(int, parts)) if all(re.fullmatch("[0-9]{1,18}", part) for part in parts) else ()


def steps_between(text: str) -> tuple[int, int] | None:
    """First and last of some steps, both included and counted from 1: "10-14" -> (10, 14), "7" -> (7, 7); else None."""
    found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    return (first, last) if 1 <= first <= last else None


def _wrong_with_path(text: str) -> str:
    """What keeps `text` from being a path, "" if nothing does."""
    sizes = [len(os.fsencode(part)) for part in text.split("/")]
    if max(sizes) > 255 or len(sizes) > 255 or sum(sizes) + len(sizes) > 4096:
        return "is too long for a path: it has at most 255 names, each of 255 bytes, and 4,095 bytes in all"
    user = text.split("/")[0]
    if user.startswith("~") and os.path.expanduser(user) == user:
        return f"there is no user {user[1:]}; a folder of that name is ./{user}"
    return ""


def _wrong_with_profile(text: str) -> str:
    steps = steps_between(text)
    if text and not steps:
        return "must be FIRST-LAST, two steps counted from 1 such as 10-14, or one step"
    if text and steps[1] - steps[0] >= MOST_PROFILED:
        return f"are more than {MOST_PROFILED} steps, a trace that no viewer opens: take fewer"
    return ""


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
            own = stated.metadata if isinstance(stated, dataclasses.Field) else {}
            default = stated.default if isinstance(stated, dataclasses.Field) else stated
            metadata = shared.metadata | {
                key: value for key, value in own.items() if value is not None and value is not False
            }
            metadata |= {"photographs": own.get("photographs")}
            setattr(cls, name, dataclasses.field(default=default, metadata=metadata))


@dataclass
class RunConfig(SharedFields):
    """What every recipe needs to know about a run: on which part of the data, how long, how spread, where to, how often."""

    val_share: float = option(0.2, low=0, high=1)
    """Share of the images that is held out for evaluation if the data has no part to validate on."""
    split: str = option("", added=True)
    """Part of the data that is evaluated, in training too: val, test, or a name that the data uses; with --eval_only also
    train, or all of data without parts. Default: val, or if there is none the held-out share."""
    image_column: str = ""
    """Tables: column of the images (default: found by its type)."""
    global_batch_size: int = option(64, low=1, high=2**20)
    """Samples per optimizer step over all processes. How they are spread is derived and does not change the result."""
    max_micro_batch_size: int = option(256, low=1, high=2**20, may_change=True)
    """The most samples that one device takes at once; a larger share is accumulated over micro-steps."""
    epochs: float = option(10.0, low=0, high=MOST_EPOCHS, may_change=True)
    """Length of the run in passes over the training set, rounded up to whole steps."""
    max_steps: int = option(0, low=0, high=10**9, may_change=True)
    """Length of the run in steps; wins over --epochs (0: take --epochs)."""
    seed: int = option(0, low=0, high=2**63 - 1)
    """Makes the run: initial weights, order of the samples, augmentation."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of weights and activations; float64 is for proving that layouts agree. fp16/bf16 come from the Accelerate config."""
    output_dir: str = path_option("runs", may_change=True)
    """Folder of run folders."""
    name: str = path_option("", may_change=True)
    """Name of the run folder (default: the recipe's file and a hash of the configuration; the same command resumes)."""
    resume: str = path_option("auto", may_change=True)
    """auto: go on from the newest good checkpoint of the run folder; never: start from nothing; or a checkpoint folder."""
    allow_changed_source: bool = option(False, may_change=True)
    """Resume although the recipe's source is not the one that the checkpoint was made with."""
    checkpoint_every: int = option(0, low=0, may_change=True)
    """Steps between checkpoints (0: at the end of every epoch). The last step always makes one."""
    keep_checkpoints: int = option(2, low=1, may_change=True)
    """How many complete checkpoints stay on disk."""
    eval_every: int = option(0, low=0, may_change=True)
    """Steps between evaluations (0: at the end of every epoch). The last step always makes one."""
    log_every: int = option(10, low=1, may_change=True)
    """Steps between rows of metrics.jsonl and the tracker."""
    collective_timeout: int = option(1800, low=10, high=10**7, may_change=True)
    """Seconds that a process may keep the others waiting before all end and it is named."""
    deterministic: bool = option(False, may_change=True)
    """GPUs: repeat a run bit for bit on the same layout, with slower kernels; refused where one is missing. CPUs always do."""
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """How gradients are sent: as they are, in half precision, or as matrices of low rank. All but none change the result."""
    powersgd_rank: int = option(1, low=1, high=2**16)
    """comm_hook powersgd: rank of these matrices; higher is more exact and sends more."""
    bucket_cap_mb: int = option(25, low=1, high=2**16, may_change=True)
    """MiB of gradients that are sent together, beside the backward pass; moves no more than the last bits."""
    workers: int = option(-1, low=-1, high=1024, may_change=True)
    """Data-loading processes per rank (0: load in the training process; -1: the cores there are, shared by the ranks)."""
    tracker: Literal["wandb", "tensorboard", "trackio", "none"] = option("wandb", may_change=True)
    """Dashboard; wandb without a key runs offline. metrics.jsonl is written in any case."""
    project: str = option("vision-recipes", may_change=True)
    """Project name on the dashboard."""
    profile: str = option("", may_change=True, check=_wrong_with_profile)
    """Steps to profile with torch.profiler, FIRST-LAST as the log counts them (10-14); a trace a rank in the run folder."""
    max_broken_share: float = option(0.02, low=0, high=1, may_change=True)
    """Stop when more than this share of a window of 1,000 training images or more can't be read."""
    dry_run: bool = option(False, may_change=True)
    """Print the start table, do two steps, one evaluation, one save and load in a temporary folder, and end."""


@dataclass
class OptimizationConfig(SharedFields):
    """How weights move: optimizer, learning rate, clipping, averaging."""

    opt: str = "adamw"
    """Any optimizer of timm's factory: adamw, sgd, lion, lamb, ..."""
    lr: float = option(4e-3, low=0, high=10**6)
    """Peak learning rate at the reference batch --lr_batch_size."""
    lr_batch_size: int = option(64, low=1)
    """Global batch for which --lr is stated."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows global_batch_size / lr_batch_size."""
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_epochs: float = option(0.0, low=0, high=MOST_EPOCHS)
    """Linear warm-up from zero, in epochs."""
    min_lr_ratio: float = option(0.0, low=0, high=1)
    """Where cosine and linear end, as a share of the peak."""
    step_epochs: str = "30"
    """schedule step: epochs between two falls, or joined by commas the epochs at which it falls (8,11)."""
    step_factor: float = option(0.1, low=0, high=1)
    """schedule step: factor of each fall."""
    weight_decay: float = option(0.05, low=0, high=10**6)
    """Weight decay; norms, biases and what the model exempts have none."""
    momentum: float = option(0.9, low=0, high=1)
    """Momentum of SGD and its kin."""
    layer_decay: float = option(1.0, low=0, high=1)
    """Factor of the learning rate per layer from the head down (1: off), for fine-tuning."""
    backbone_lr_factor: float = option(1.0, low=0, high=10**6)
    """Factor of the learning rate in the backbone (1: off): a detector's features, all of a classifier but its head."""
    clip: float = option(0.0, low=0)
    """Limit of gradient clipping (0: off)."""
    clip_mode: Literal["norm", "agc"] = "norm"
    """Clip the global gradient norm, or adaptively per unit (AGC: Brock et al., 2021)."""
    ema_decay: float = option(0.0, low=0, high=1)
    """Decay of the exponential moving average of the weights, warmed up (0: off). Evaluated and exported when on."""


@dataclass
class AugmentationConfig(SharedFields):
    """How a training image is varied; each choice is a pure function of the seed and the sample's position."""

    crop_scale: float = option(0.7, low=0, high=1)
    """Least area of a random crop as a share of the image (ImageNet: 0.08; 1: cropped to a ratio only)."""
    hflip: float = option(0.0, low=0, high=1)
    """Probability of a left-right mirror image (digits and text: 0)."""
    vflip: float = option(0.0, low=0, high=1)
    """Probability of an upside-down image."""
    color_jitter: float = option(0.0, low=0, high=10)
    """Strength of brightness, contrast and saturation jitter."""
    augment: str = ""
    """Policy in timm's notation: rand-m9-mstd0.5, augmix-m3-w3, original (AutoAugment); empty: none."""
    random_erasing: float = option(0.0, low=0, high=1)
    """Probability that a rectangle is replaced by noise."""
    mixup: float = option(0.0, low=0, high=1000)
    """Alpha of MixUp (0: off)."""
    cutmix: float = option(0.0, low=0, high=1000)
    """Alpha of CutMix (0: off); with both on, each pair takes one of them at even odds."""
    repeats: int = option(1, low=1)
    """Repeated augmentation: how often each image of a global batch stands in it."""


@dataclass
class ReadingConfig(SharedFields):
    """How training images are read. All but the place changes pixels, so it is part of the run."""

    cache: int = option(0, low=0, high=10**6)
    """Keep training images decoded, scaled to at most the area of a square with this side (0: off)."""
    cache_folder: str = path_option("", may_change=True)
    """Folder with room for --cache: a file without a name there. Default: memory."""
    decode: Literal["worker", "device"] = "worker"
    """Where JPEGs are decoded, cropped and resized: by the data workers, or on the device."""
