"""Fields of a configuration, and the dataclasses of fields that recipes share.

A recipe's `Config` is a flat dataclass. It inherits the shared fields from the dataclasses below.
The docstring under a field is its help text.
"""

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

MAX_PROFILED_STEPS = 100  # steps in a trace, which takes a few MB per step
MAX_EPOCHS = 10**6


def option(
    default,
    *,
    low=None,
    high=None,
    may_change=False,
    is_new=False,
    check=None,
    heading="",
    required="",
    defaults_from=None,
    origin=None,
    weights_field="",
    is_weights=False,
    is_recorded=False,
    is_common=False,
    reads_data=False,
    not_in_shards="",
):
    """A field of a configuration.

    Args:
        low, high: limits of a number, both included.
        may_change: True if a resumed run may have another value.
        is_new: the field defines a run only with another value than its default: runs that do not
            have it still resume.
        check: check(value) returns what is wrong, as a text, or "" for a valid value.
        heading: title of the group in --help that begins with this field.
        required: an empty value is refused, with this advice.
        defaults_from: defaults_from(value) returns defaults of other fields, from the weights of `value`.
        origin: origin(value, recorded) returns the `Origin` of the weights. The configuration of
            their run replaces the defaults, as far as it is the run's identity, or of the fields
            `recorded`.
        weights_field: of --eval_only, the field that gets an exported model, so that the recipe
            builds it with its weights.
        is_weights: the field says which weights training begins with; with --eval_only it has its default.
        is_recorded: the field may change when a run resumes, but is recorded with its weights,
            whose results depend on it.
        is_common: --help shows the field; the others appear in --help all.
        reads_data: the field says how the data of --data are read; for other data, weights bring no
            value of it.
        not_in_shards: why a sharded run refuses another value than the default.
    """
    args = dict(locals())
    del args["default"]
    metadata = {name: value for name, value in args.items() if _is_set(value)}
    return dataclasses.field(default=default, metadata=metadata)


def _is_set(value: Any) -> bool:
    """False for a default of `option`; a limit of 0 is set."""
    return not (value is None or value is False or value == "")


def path_option(default: str, **options):
    """A field for a path, or for a name that may be given instead of one."""
    return option(default, check=_check_path, **options)


def get_field_names(config_class: type) -> list[str]:
    """The fields of a configuration, the recipe's own first, in its order."""
    names = list(config_class.__annotations__)
    names += [field.name for field in dataclasses.fields(config_class)]
    return list(dict.fromkeys(names))


def get_fields_with(config: Any, key: str) -> list[str]:
    """The fields of a configuration, or of its class, whose `option` has set `key`."""
    return [field.name for field in dataclasses.fields(config) if field.metadata.get(key)]


def split_integers(text: str, separator: str) -> tuple[int, ...]:
    """The integers in a text such as "640,672"; an empty tuple for any other text."""
    items = [item.strip() for item in text.split(separator)]
    return tuple(map(int, items)) if _all_match("[0-9]{1,18}", items) else ()


def _all_match(pattern: str, items: Iterable[str]) -> bool:
    return all(re.fullmatch(pattern, item) for item in items)


def parse_step_range(text: str) -> tuple[int, int] | None:
    """The first and last step of a range, counted from 1; None for any other text.

    "10-14" -> (10, 14), "7" -> (7, 7).
    """
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    if not match:
        return None
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if not 1 <= first <= last:
        return None
    return first, last


def _check_path(text: str) -> str:
    """Why `text` can't be a path, or "" if it can."""
    names = text.split("/")
    sizes = [len(os.fsencode(name)) for name in names]
    if max(sizes) > 255 or len(sizes) > 255 or sum(sizes) + len(sizes) > 4096:
        return (
            "is too long for a path: it has at most 255 names, each of 255 bytes, and 4,095 bytes "
            "in all"
        )
    user = names[0]
    if user.startswith("~") and os.path.expanduser(user) == user:
        return f"there is no user {user[1:]}; a folder of that name is ./{user}"
    return ""


def _check_profile(text: str) -> str:
    if not text:
        return ""
    steps = parse_step_range(text)
    if not steps:
        return "must be FIRST-LAST, two steps counted from 1 such as 10-14, or one step"
    first, last = steps
    if last - first >= MAX_PROFILED_STEPS:
        return f"are more than {MAX_PROFILED_STEPS} steps, a trace that no viewer opens: take fewer"
    return ""


def _check_stages(text: str) -> str:
    if text in ("stem", "all") or re.fullmatch("[0-9]{1,4}", text):
        return ""
    return "must be a number, stem or all"


def _check_unfreezing(text: str) -> str:
    epochs = text.split(",") if text else []
    if not _all_match(r"[0-9]{1,6}(\.[0-9]{1,9})?", epochs):
        return "must be epochs, such as 1 or 1,2,3.5"
    if epochs != sorted(epochs, key=float):
        return "must be epochs in ascending order"
    return ""


class SharedFields:
    """Base of the dataclasses of fields that recipes share.

    A recipe may state such a field again, to show or change its default: `epochs: float = 10.0`,
    without a docstring. Limits, `may_change` and the help text of the shared field stay.
    """

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls).get("__annotations__", {}):
            shared = _find_shared_field(cls, name)
            if shared:
                field = vars(cls)[name]
                if not isinstance(field, dataclasses.Field):
                    field = option(field)
                metadata = shared.metadata | field.metadata
                setattr(cls, name, dataclasses.field(default=field.default, metadata=metadata))


def _find_shared_field(cls: type, name: str) -> dataclasses.Field | None:
    """The field `name` of a base of `cls`, if one has it."""
    for base in cls.__mro__[1:]:
        fields = getattr(base, "__dataclass_fields__", {})
        if name in fields:
            return fields[name]
    return None


@dataclass
class RunConfig(SharedFields):
    """Settings of every run: reading of the data, length, batch size, folders, cadences, processes."""

    val_share: float = option(0.2, low=0, high=1, heading="data", is_common=True, reads_data=True)
    """Share of the images that is held out for evaluation if the data has no validation split."""
    group_column: str = option("", is_new=True, reads_data=True)
    """Column of patients, videos or sites, whose images are held out together: of a table, or of
    shards; `folder` for the folder that holds an image, in an image folder below its class
    (default: each image alone; copies together)."""
    split: str = option("", is_common=True, reads_data=True)
    """Split of the data to evaluate on, also during training: val, test, or a name that the data
    uses; with --eval_only also train, or all for data without splits. Default: val, or the held-out
    share if there is none."""
    image_column: str = option("", reads_data=True)
    """Tables: column of the images (default: found by its type)."""
    max_broken_share: float = option(0.02, low=0, high=1, may_change=True)
    """Stop if more than this share of about 1,000 consecutive training images can't be read."""
    workers: int = option(-1, low=-1, high=1024, may_change=True, is_common=True)
    """Data-loading processes per rank (0: load in the training process; -1: all cores, divided
    among the ranks)."""
    cache: int = option(0, low=0, high=10**6)
    """Cache decoded training images, scaled down to at most the area of a square with this side in
    pixels (0: off). The cache changes pixels, so a resumed run keeps this value."""
    cache_folder: str = path_option("", may_change=True)
    """Folder with room for the --cache, kept in an unnamed file there. Default: memory."""
    global_batch_size: int = option(64, low=1, high=2**20, heading="training", is_common=True)
    """Samples per optimizer step, over all processes. How they are distributed is derived and does
    not change the result."""
    max_micro_batch_size: int = option(256, low=1, high=2**20, may_change=True, is_common=True)
    """Limit of the samples that one device processes at once; gradients of a larger share are
    accumulated over micro-steps."""
    epochs: float = option(10.0, low=0, high=MAX_EPOCHS, may_change=True, is_common=True)
    """Length of the run in passes over the training set, rounded up to whole steps."""
    max_steps: int = option(0, low=0, high=10**9, may_change=True, is_common=True)
    """Length of the run in steps, instead of --epochs (0: use --epochs)."""
    min_epoch_steps: int = option(0, low=0, high=10**6)
    """Fewest steps that an epoch counts as, for little data: wherever a length or cadence is in
    epochs (0: no minimum)."""
    patience: int = option(0, low=0, may_change=True)
    """Stop after this many evaluations without improvement (0: off)."""
    max_hours: float = option(0.0, low=0, high=10**6, may_change=True)
    """Hours of training after which the run ends, over all starts, without evaluations (0: off)."""
    seed: int = option(0, low=0, high=2**63 - 1, is_common=True)
    """Determines initial weights, order of the samples and augmentation."""
    output_dir: str = path_option("runs", may_change=True, heading="run")
    """Folder in which run folders are created."""
    name: str = path_option("", may_change=True, is_common=True)
    """Name of the run folder (default: the recipe's name and a hash of the configuration, so that
    the same command resumes)."""
    resume: str = path_option("auto", may_change=True)
    """auto: resume from the newest intact checkpoint of the run folder; never: start a new run; or
    a checkpoint folder."""
    allow_changed_source: bool = option(False, may_change=True)
    """Resume although the recipe's source has changed since the checkpoint was made."""
    checkpoint_every: int = option(0, low=0, may_change=True)
    """Steps between checkpoints (0: at the end of every epoch). The last step always has one."""
    keep_checkpoints: int = option(2, low=1, may_change=True)
    """Number of complete checkpoints to keep on disk."""
    keep_for_audit: bool = option(False, may_change=True)
    """Keep the first checkpoint after a quarter of the run in audit/, for tools.audit: later a
    model has memorised wrong labels."""
    dry_run: bool = option(False, may_change=True, is_common=True)
    """Print the start table, then try two steps, an evaluation, and saving and loading a
    checkpoint, in a temporary folder."""
    eval_every: int = option(0, low=0, may_change=True, heading="evaluation")
    """Steps between evaluations (0: at the end of every epoch). The last step always has one."""
    best_metric: str = option("", may_change=True)
    """Result that decides which model is the best, and by which --patience counts: f1_macro,
    mean_class_accuracy, loss, AP50 (default: the recipe's)."""
    tracker: Literal["wandb", "tensorboard", "none"] = option(
        "wandb", may_change=True, heading="dashboard", is_common=True
    )
    """Dashboard; wandb without an API key runs offline. metrics.jsonl is written in any case."""
    project: str = option("vision-recipes", may_change=True)
    """Project name on the dashboard."""
    tags: str = option("", may_change=True)
    """Tags on the dashboard, separated by commas: baseline,night."""
    group: str = option("", may_change=True)
    """Group of runs on the dashboard, such as the trials of a sweep."""
    notes: str = option("", may_change=True)
    """A remark on the dashboard."""
    wandb_entity: str = option("", may_change=True)
    """W&B: team or user that owns the project (default: the account's own)."""
    wandb_artifact: bool = option(False, may_change=True)
    """W&B: upload best/ when the run ends, as an artifact with the run's name and the aliases best
    and step-N."""
    log_every: int = option(10, low=1, may_change=True)
    """Steps between rows of metrics.jsonl and the dashboard."""
    profile: str = option("", may_change=True, check=_check_profile)
    """Steps to profile with torch.profiler, FIRST-LAST as in the log (10-14); one trace per rank in
    the run folder."""
    dtype: Literal["float32", "float64"] = option("float32", heading="processes")
    """Type of weights and activations; float64 is for checking that layouts agree. fp16/bf16: see
    the Accelerate config."""
    deterministic: bool = option(False, may_change=True)
    """GPUs: repeat a run bit for bit on the same layout, with slower kernels; refused if one is
    missing. CPUs always repeat."""
    collective_timeout: int = option(1800, low=10, high=10**7, may_change=True)
    """Seconds that a process may keep the others waiting; then it is reported and all processes end."""
    comm_hook: Literal["none", "fp16", "bf16"] = "none"
    """Compression of gradients between processes: none, or half precision, which changes the result."""


@dataclass
class OptimizationConfig(SharedFields):
    """Settings of the optimization: optimizer, learning rate, clipping, averaging."""

    opt: str = option("adamw", heading="optimization", is_common=True)
    """Any optimizer of timm's factory: adamw, sgd, lion, lamb, ..."""
    lr: float = option(1e-3, low=0, high=10**6, is_common=True)
    """Peak learning rate for the batch size --lr_batch_size."""
    lr_batch_size: int = option(64, low=1)
    """Global batch size that --lr is meant for; see --lr_scaling."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate scales with global_batch_size / lr_batch_size."""
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """Learning rate schedule after the warm-up."""
    warmup_epochs: float = option(1.0, low=0, high=MAX_EPOCHS, is_common=True)
    """Length of the linear warm-up from zero, in epochs."""
    min_lr_ratio: float = option(0.0, low=0, high=1)
    """Final learning rate of cosine and linear, as a share of the peak."""
    step_epochs: str = "30"
    """schedule step: epochs between two drops of the learning rate, or the epochs of the drops,
    separated by commas (8,11)."""
    step_factor: float = option(0.1, low=0, high=1)
    """schedule step: factor of the learning rate at each drop."""
    weight_decay: float = option(0.05, low=0, high=10**6)
    """Weight decay; not applied to norms, biases and parameters that the model exempts."""
    momentum: float = option(0.9, low=0, high=1)
    """Momentum of SGD and similar optimizers."""
    layer_decay: float = option(1.0, low=0, high=1)
    """Fine-tuning: factor of the learning rate per layer, from the head down (1: off)."""
    backbone_lr_factor: float = option(1.0, low=0, high=10**6)
    """Factor of the backbone's learning rate (1: off). In a classifier, all but the head is backbone."""
    neck_lr_factor: float = option(1.0, low=0, high=10**6)
    """Detectors: factor of the feature pyramid's learning rate, or of a DETR's projections and encoder."""
    head_lr_factor: float = option(1.0, low=0, high=10**6)
    """Factor of the head's learning rate; in a DETR, everything after the encoder is head."""
    freeze_stages: str = option("0", check=_check_stages)
    """Stages of the backbone that do not train, with their BatchNorm: a number (1: stem and first
    stage), stem, or all."""
    unfreeze_epochs: str = option("", check=_check_unfreezing)
    """Epochs after which the frozen stages begin to train, as equal parts, from the last stage to
    the first (4 stages and 1,2: two after epoch 1, two and the stem after epoch 2). Default:
    never."""
    clip: float = option(0.0, low=0)
    """Gradient clipping: largest norm (0: off); see --clip_mode."""
    clip_mode: Literal["norm", "agc"] = "norm"
    """Clip the global norm, or each unit relative to its weights (AGC: Brock et al., 2021)."""
    ema_decay: float = option(0.0, low=0, high=1, is_common=True)
    """Decay of the moving average of the weights, with warm-up (0: off). If on, the average is exported."""
