"""How do a dataclass, a YAML file and the command line become one checked configuration?

A recipe's `Config` is a flat dataclass with a docstring under each field; what recipes share it inherits from the
dataclasses below. A YAML file is flags written down: both go through the same typed parser, and flags win over the file.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

import tyro
import yaml

from common.durable import replace_file
from common.errors import Refused
from common.files import SMALL, read_yaml
from common.origin import OF_DATA, read_origin
from common.synonyms import hint, other_recipe

C = TypeVar("C")

MOST_PROFILED = 100  # steps in a trace, which has some MB for each
MOST_EPOCHS = 10**6
_MOST = 2**63 - 1  # that a whole number may be for torch


def option(default, *, low=None, high=None, may_change=False, check=None, photographs=None, added=False):
    """A field with limits (both included); `may_change` marks what a resumed run may be given another value for.

    `check(value)` says what is wrong with a text, "" where nothing is. `photographs` is the default for data other than
    digits (`common.defaults`). `added` marks a field that runs of before don't have: they resume with its default.
    """
    limits = {"low": low, "high": high, "check": check}
    others = {"may_change": may_change, "photographs": photographs, "added": added}
    return dataclasses.field(default=default, metadata=limits | others)


def path_option(default: str, *, may_change=False, photographs=None):
    """A field for a path, or for a name that stands in the place of one."""
    return option(default, may_change=may_change, check=_wrong_with_path, photographs=photographs)


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


@dataclass
class RunConfig:
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
class OptimizationConfig:
    """How weights move: optimizer, learning rate, clipping, averaging."""

    opt: str = "adamw"
    """Any optimizer of timm's factory: adamw, sgd, lion, lamb, ..."""
    lr: float = option(4e-3, low=0, high=10**6, photographs=1e-3)
    """Peak learning rate at the reference batch --lr_batch_size (photographs: 1e-3)."""
    lr_batch_size: int = option(64, low=1)
    """Global batch for which --lr is stated."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows global_batch_size / lr_batch_size."""
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_epochs: float = option(0.0, low=0, high=MOST_EPOCHS, photographs=1.0)
    """Linear warm-up from zero, in epochs (photographs: 1)."""
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
class AugmentationConfig:
    """How a training image is varied; each choice is a pure function of the seed and the sample's position."""

    crop_scale: float = option(0.7, low=0, high=1, photographs=0.35)
    """Least area of a random crop as a share of the image (photographs: 0.35, ImageNet: 0.08; 1: cropped to a ratio only)."""
    hflip: float = option(0.0, low=0, high=1, photographs=0.5)
    """Probability of a left-right mirror image (photographs: 0.5; digits and text: 0)."""
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
class ReadingConfig:
    """How training images are read. All but the place changes pixels, so it is part of the run."""

    cache: int = option(0, low=0, high=10**6)
    """Keep training images decoded, scaled to at most the area of a square with this side (0: off)."""
    cache_folder: str = path_option("", may_change=True)
    """Folder with room for --cache: a file without a name there. Default: memory."""
    decode: Literal["worker", "device"] = "worker"
    """Where JPEGs are decoded, cropped and resized: by the data workers, or on the device."""


def parse(
    config_class: type[C],
    argv: list[str] | None = None,
    program: str = "",
    suit: Callable[[C], dict] | None = None,
    _suited: dict | None = None,
) -> C:
    """Defaults of `config_class`, then `--config file.yaml`, then flags. Raises `Refused` for what is unknown or ill-typed.

    With `--eval_only` the configuration of the run that made the weights takes the place of the defaults.
    `argv` is without the program's name (default: the command line). `suit(config)` returns other defaults for some fields,
    as the rest of the configuration demands them (`common.defaults`).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    path, argv = _take_config(words)
    program = program or Path(sys.argv[0]).name
    layers = [(f"--config {path}: ", _read(path))] if path else []
    default = _layered(config_class, layers, program, config_class(**_suited) if _suited else None)
    if {"-h", "--help"} & set(argv):
        _help(config_class, default, program)
    config = _checked(_parse(config_class, argv, default, program))
    if weights := getattr(config, "eval_only", ""):
        return _checked(_for_evaluation(config_class, weights, layers, argv, program))
    suited = suit(config) if suit else {}
    if suited != (_suited or {}):  # until it settles: the model depends on the data, its image size on the model
        return parse(config_class, words, program, suit, suited)
    return config


def _checked(config: C) -> C:
    """`config`, whose values are within their limits. Raises `Refused`."""
    for field in dataclasses.fields(config):
        value, low, high = getattr(config, field.name), field.metadata.get("low"), field.metadata.get("high")
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise Refused(f"--{field.name} {value!a:.100}: holds bytes that are no text (UTF-8); rename what it names")
        if value == "" and field.default != "":
            raise Refused(f"--{field.name} is empty: give it a value, or leave it out for {field.default}")
        if isinstance(value, float) and not math.isfinite(value):
            raise Refused(f"--{field.name} {value}: must be a finite number")
        if (low is not None and value < low) or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"between {low} and {high}"
            raise Refused(f"--{field.name} {value!s:.100}: must be {limit}")
        if isinstance(value, int) and abs(value) > _MOST:
            raise Refused(f"--{field.name} {value!s:.100}: must be at most {_MOST}")
        if wrong := field.metadata.get("check") and field.metadata["check"](value):
            raise Refused(f"--{field.name} {value:.100}: {wrong}")
    return config


def save(config, path: Path) -> None:
    """Write the complete configuration, the recipe's own fields first, as a file for `--config`."""
    own = type(config).__annotations__
    everything = sorted(dataclasses.asdict(config).items(), key=lambda item: item[0] not in own)
    # Line ends of Unicode, which YAML keeps only if they are escaped.
    plain = not re.search("[\x85\u2028\u2029]", "".join(str(value) for _, value in everything))
    replace_file(path, yaml.safe_dump(dict(everything), sort_keys=False, allow_unicode=plain).encode())


def identity(config) -> dict:
    """The fields that make the run what it is: all but those that may change at a resume."""
    fields = {field.name: field for field in dataclasses.fields(config) if not field.metadata.get("may_change")}
    values = {name: value for name, value in dataclasses.asdict(config).items() if name in fields}
    return {
        name: value
        for name, value in values.items()
        if not (fields[name].metadata.get("added") and value == fields[name].default)
    }


def short_hash(values: dict) -> str:
    """Six hex digits that name `values`."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]


def nearest(name: str, names) -> str:
    """`; did you mean X, Y?` or nothing, to end an error about an unknown name."""
    close = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(close)}?" if close else ""


def nearest_path(path: Path) -> str:
    """The same for a path that is not there, of what lies in its folder; nothing if it is there."""
    try:
        if path.exists():
            return ""
        return nearest(path.name, [other.name for other in path.parent.iterdir()])
    except (OSError, ValueError):
        return ""


def _read(path: Path) -> dict:
    try:
        content = read_yaml(path, SMALL)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        found = [
            str(file) for folder in (path.parent, Path("recipes/presets")) for file in sorted(folder.glob("*.yaml"))
        ]
        presets = {Path(file).stem: file for file in found}
        same = presets.get(path.stem, "")
        near = f"; did you mean {same}?" if same else nearest(str(path), found)
        raise Refused(f"--config {path}: {'a folder, not a' if path.is_dir() else 'no such'} file{near}") from None
    except OSError as error:
        raise Refused(f"--config {path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"--config {path}: not readable as YAML: {error}") from None
    if content is None:  # of comments alone
        return {}
    if not isinstance(content, dict):
        raise Refused(f"--config {path}: must hold `key: value` lines, found a {type(content).__name__}")
    return content


def _flags(content: dict, config_class, where: str) -> list[str]:
    """{'lr': 0.1, 'pretrained': True} -> ['--lr=0.1', '--pretrained']; text goes to the same parser as the command line's."""
    fields, recipe = {field.name: field.type for field in dataclasses.fields(config_class)}, _file_of(config_class)
    flags = []
    for key, value in content.items():
        if key not in fields:
            if others := [other for other in content if other not in fields and other_recipe(str(other), recipe)]:
                raise Refused(f"{where}is for {other_recipe(others[0], recipe)}: {recipe.name} has no {others[0]}")
            raise Refused(f"{where}unknown key {key}{hint(str(key), fields, recipe) or nearest(str(key), fields)}")
        if isinstance(value, (dict, list)) or value is None:
            raise Refused(f"{where}{key} must be a single value, not {value and type(value).__name__}")
        if (fields[key] is bool) != isinstance(value, bool):
            raise Refused(
                f"{where}{key}: {value!r} is not {'true or false' if fields[key] is bool else 'of the right type'}"
            )
        flags.append(f"--{key}={value}" if not isinstance(value, bool) else f"--{'' if value else 'no_'}{key}")
    return flags


def _layered(config_class: type[C], layers: list[tuple[str, dict]], program: str, config: C | None = None) -> C | None:
    """What `layers` (where they are from, and their values) make of `config`; a later one wins over those before it."""
    for where, content in layers:
        config = _parse(config_class, _flags(content, config_class, where), config, program, where)
    return config


def _for_evaluation(
    config_class: type[C], weights: str, layers: list[tuple[str, dict]], argv: list[str], program: str
) -> C:
    """What `layers` and the flags in `argv` make of the configuration that the run of these weights had.

    Raises `Refused` where that was a run of another recipe, or where neither it nor a flag says what to evaluate on.
    """
    origin = read_origin(weights)
    fixed = {field.name for field in dataclasses.fields(config_class) if not field.metadata.get("may_change")}
    unknown = [name for name in origin.config if name not in fixed]
    if origin.run and unknown and fixed & config_class.__annotations__.keys() - origin.config.keys():
        named = ", ".join(f"--{name}" for name in unknown[:5])
        raise Refused(
            f"--eval_only {weights}: its run has flags that {program} does not know ({named}); evaluate it with the "
            f"recipe that trained it, {origin.run.get('recipe') or 'another one'}"
        )

    def given(but: Sequence[str] = ()) -> C:
        of_run = {name: value for name, value in origin.config.items() if name in fixed and name not in but}
        bottom = _layered(config_class, [(f"--eval_only {weights}: ", of_run), *layers], program)
        return _parse(config_class, argv, bottom, program)

    config = given()
    if not config.data:
        raise Refused(f"--eval_only {weights}: does not say which data it was trained on; add --data")
    return config if origin.trained_on(config.data) else given(but=OF_DATA)


def _take_config(argv: list[str]) -> tuple[Path | None, list[str]]:
    rest, paths = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            paths.append(next(words, ""))
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
        else:
            rest.append(word)
    if len(paths) > 1:
        raise Refused(f"--config is given {len(paths)} times: name one file and set the rest by flags")
    if paths and not paths[0]:
        raise Refused("--config needs the path of a YAML file")
    return (Path(paths[0]) if paths else None), rest


def _parse(config_class: type[C], argv: list[str], default: C | None, program: str, where: str = "") -> C:
    kinds = {field.name: field.type for field in dataclasses.fields(config_class)}
    for word, following in zip(argv, [*argv[1:], ""], strict=False):  # no words at all: no pair
        flag, _, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        switch = name if name in kinds else name.removeprefix("no_")
        if flag.startswith("--") and switch not in kinds:
            meant = hint(name, kinds, _file_of(config_class)) or nearest(name, [*kinds, "config"])
            raise Refused(f"{where}unknown flag {flag}{meant}")
        valued = value or following.lower() in ("true", "false", "0", "1")
        if flag.startswith("--") and kinds[switch] is bool and valued:
            raise Refused(f"{where}{flag} takes no value: give --{switch} or --no_{switch}")
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(config_class, prog=program, args=argv, default=default, use_underscores=True)
    except SystemExit:
        said = _one_line(captured.getvalue())
        raise Refused(where + said + _stray(said.partition("Unrecognized options: ")[2], config_class)) from None


def _stray(words: str, config_class: type) -> str:
    """What is to be said of words that belong to no flag, as tyro names them; "" if there are none."""
    first, fields = words.split(",")[0], config_class.__dataclass_fields__
    name, is_assignment, value = first.lstrip("-").partition("=")
    if first.startswith("-"):
        return hint(name, fields, _file_of(config_class)) or "; a flag begins with two dashes"
    if is_assignment:
        return f"; a flag begins with two dashes: --{name} {value}" + hint(name, fields, _file_of(config_class))
    return "; each value stands behind its flag, as in --data FOLDER" if first else ""


def _file_of(config_class: type) -> Path:
    """The recipe that a configuration belongs to."""
    return Path(getattr(sys.modules[config_class.__module__], "__file__", ""))


@dataclass
class _ConfigFlag:
    config: str = ""
    """YAML file of flags without their dashes, such as a preset or a run's config.yaml; flags win over it."""


def _help(config_class: type, default, program: str) -> NoReturn:
    """Print the flags, the recipe's own first, with the values they have without and end; one process a machine prints."""
    own, fields = config_class.__annotations__, config_class.__dataclass_fields__
    shown = type(config_class.__name__, (config_class, _ConfigFlag), {"__doc__": config_class.__doc__})
    shown.__dataclass_fields__ = _ConfigFlag.__dataclass_fields__ | dict(
        sorted(fields.items(), key=lambda item: item[0] not in own)
    )
    default = shown(**dataclasses.asdict(default)) if default else None
    others = os.environ.get("LOCAL_RANK", "0") != "0"
    try:
        with contextlib.redirect_stdout(io.StringIO()) if others else contextlib.nullcontext():
            tyro.cli(shown, prog=program, args=["--help"], default=default, use_underscores=True)
    except BrokenPipeError:  # as by `--help | head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its end
    raise SystemExit


_PLAINER = {  # what tyro says, and how the other refusals would say it
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: '(.*)'": "{0} {1}: must be a whole number",
    r"Error parsing (\S+): could not convert string to float: '(.*)'": "{0} {1}: must be a number",
    r"invalid choice '(.*)' for argument '(\S+)'. Expected one of \((.*)\).": "{1} {0}: must be one of {2}",
    r"Missing value for argument '(\S+)'.*": "{0} needs a value",
}


def _one_line(box: str) -> str:
    """The message below the title of the box that tyro draws, in lines or where there is no UTF-8 in dashes, up to a rule."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ") for line in box.splitlines()[1:]]
    message = []
    for line in lines:
        if set(line) - set("─╰╯-"):
            message.append(line)
        elif message:
            break
    said = " ".join(message)
    for theirs, ours in _PLAINER.items():
        if found := re.fullmatch(theirs, said):
            return ours.format(*(group.replace("'", "") for group in found.groups()))
    return said
