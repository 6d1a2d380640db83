"""Any value of any field of both recipes' configurations ends in a run that can be planned, or in a
refusal of one line.

In process, through the real parser and through what is made of a configuration before a model:
thousands of cases in seconds. What needs the run itself is in test_refusals.py.
"""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch

from common.classification.augmentation import ColorJitter, Mixing
from common.classification.transforms import EvalTransform, TrainingTransform
from common.config.parsing import compute_short_hash, get_identity, parse
from common.data.batch_plan import BatchPlan
from common.data.decoding import Picture
from common.data.stream import Stream
from common.detection.grouping import build_stream
from common.detection.models.detr_models import TRANSFORMERS_FAMILIES
from common.errors import Refused
from common.segmentation.source import Pair
from common.training import timm_models
from common.training.optimizer import build_optimizer, build_schedule
from recipes import cls, det, seg

NUMBERS = (
    "nan inf -inf -0.0 0 1 -1 2 0.5 1e-300 5e-324 1e-9 1e300 1e400 1_000 0x10 true ² ٣".split()
)
NUMBERS += ["9" * 20, "9" * 5000, str(2**63 - 1), str(2**63), str(-(2**63)), " 1", ""]
TEXTS = (
    "~nosuchuser ~nosuchuser/x .. . / -x --help * [.parquet ?.parquet hf-hub:a/b hf-hub: auto never"
).split()
TEXTS += (
    "rand-m9 rand-m99999 rand-m9-n0 rand-m9-mstdx augmix-m3-w0 original lion resnet50.x".split()
)
TEXTS += "1-2 3-4 5-3 ²-³ 3-99 64,² 640,0 1e-320-1 1e-308,1".split()
TEXTS += [
    "a" * 300,
    f"a/{'b' * 256}",
    "x/" * 3000,
    "x/" * 1500,
    "1" * 30,
    f"{'1' * 5000}-{'2' * 5000}",
]
TEXTS += ["\udcff", "\0", "a\nb", "\x1b[2J", "\u202e"]
CONFIGS = {"cls": cls.Config, "det": det.Config, "seg": seg.Config}
LABELS = np.arange(90) % 3


class Images(list):
    """As much of a source as a plan needs."""

    labels = LABELS
    classes = ("a", "b", "c")
    multi_label = False
    fresh = False
    sizes = np.full((90, 2), 64)
    offsets = np.arange(91)
    crowd = np.zeros(90, bool)
    blocks = None


@pytest.fixture(scope="module")
def model():
    return timm.create_model("test_vit", num_classes=3)


def parse_flag(config_class: type, flag: str):
    """The configuration of a command line with one flag; its data are x if the flag names none."""
    return parse(config_class, ["--data", "x", flag], "x.py")


def refuse_in_one_line(call: Callable, *arguments, **options):
    """What it returns, or None where it is refused, which is said in one line."""
    try:
        return call(*arguments, **options)
    except Refused as refused:
        assert str(refused).strip() and str(refused).isprintable()
    return None


def try_plan(config, model) -> None:
    """Everything that is cheap to make of a configuration."""
    recipe = next(recipe for recipe in (cls, det, seg) if isinstance(config, recipe.Config))
    images = Images(range(len(LABELS)))
    unit = config.norm_batch_size if config.batch_norm == "group" else 1
    if cut := refuse_in_one_line(
        BatchPlan, config.global_batch_size, 1, config.max_micro_batch_size, max(1, unit)
    ):
        assert str(cut) and cut.get_span(0, cut.micro_steps - 1)[1] <= config.global_batch_size
    if recipe is det:
        stream = refuse_in_one_line(build_stream, config, images)
    else:
        repeats = getattr(config, "repeats", 1)
        stream = refuse_in_one_line(Stream.from_config, config, len(images), repeats=repeats)
    if stream and (schedule := refuse_in_one_line(build_schedule, config, stream)):
        steps = schedule.total_steps
        assert (
            math.isfinite(stream.count_epochs(steps))
            and stream.get_positions(steps, (0, 1))[0] >= 0
        )
        assert all(math.isfinite(schedule(step)) for step in (0, 1, steps // 2, max(0, steps - 1)))
    if recipe is det:
        detector = SimpleNamespace(
            stride=32,
            needs_squares=config.detector in TRANSFORMERS_FAMILIES,
            pretrained_cfg={"mean": (0.5,) * 3, "std": (0.5,) * 3},
        )
        transforms = refuse_in_one_line(det.build_transforms, config, detector, torch.device("cpu"))
        for augmentation in (transforms.augment, transforms.resize) if transforms else ():
            sizes = augmentation.compute_sizes(
                np.arange(3), np.array([[64, 48], [1, 1], [89_000_000, 1]])
            )
            assert (sizes > 0).all() and (sizes <= 8192).all()
    if recipe is seg:
        segmenter = SimpleNamespace(
            stride=32, pretrained_cfg={"mean": (0.5,) * 3, "std": (0.5,) * 3}
        )
        transforms = refuse_in_one_line(
            seg.build_transforms, config, segmenter, torch.device("cpu")
        )
        for size in ((64, 48), (1, 1)) if transforms and config.crop_size < 600 else ():
            pair = Pair(Picture(torch.zeros(3, *size, dtype=torch.uint8)), np.zeros(size, np.int16))
            image, mask = transforms.augment(pair, 0)
            assert image.shape[1:] == mask.shape and max(mask.shape) <= config.crop_size
    if recipe is cls:
        resize = refuse_in_one_line(
            timm_models.resolve_data_config, model, config.image_size, config.crop_pct
        )
        if resize:
            refuse_in_one_line(TrainingTransform, config, resize)
            refuse_in_one_line(EvalTransform, resize)
            if config.mixup or config.cutmix:
                mixing = Mixing(config.seed, config.mixup, config.cutmix, resize["input_size"][1:])
                assert np.isfinite(mixing.sample(np.arange(4))).all()
            assert np.isfinite(
                ColorJitter(config.seed, config.color_jitter).sample(np.arange(4))
            ).all()
        refuse_in_one_line(cls.class_weights, config.class_weights, LABELS, 3)
    refuse_in_one_line(build_optimizer, config, model)
    assert len(compute_short_hash(get_identity(config))) == 6


def format_flag(field: dataclasses.Field, word: str) -> str:
    return (
        f"--{field.name}={word}"
        if field.type is not bool
        else f"--{'no_' * (len(word) % 2)}{field.name}"
    )


@pytest.mark.parametrize("recipe", CONFIGS)
def test_every_field_takes_or_refuses_every_odd_value(recipe: str, model) -> None:
    shared = {field.name for field in dataclasses.fields(cls.Config)} if recipe != "cls" else set()
    parsed = 0
    recipe_fields = [
        field for field in dataclasses.fields(CONFIGS[recipe]) if field.name not in shared
    ]
    for index, field in enumerate(recipe_fields):
        means_much = (
            field.type is str and field.name != "project" and not field.name.endswith("_column")
        )
        values = NUMBERS if field.type in (int, float) else TEXTS if means_much else TEXTS[::9]
        for word in values[index % 3 :: 3]:  # a third for each field, for the time that it takes
            config = refuse_in_one_line(parse_flag, CONFIGS[recipe], format_flag(field, word))
            if config and getattr(config, field.name) != field.default:
                parsed += 1
                try_plan(config, model)
    assert parsed > {"cls": 25, "det": 25, "seg": 10}[recipe]


@pytest.mark.parametrize(
    "flag, word, message",
    [
        ("--data", "a/" + "é" * 128, "too long for a path"),  # a name of 256 bytes
        ("--model", "abcdefg/" * 512, "too long for a path"),  # 4,096 bytes
        ("--resume", "x/" * 256, "too long for a path"),  # 256 folders
        (
            "--eval_only",
            "~nosuchuser/x",
            "there is no user nosuchuser; a folder of that name is ./~nosuchuser",
        ),
        ("--output_dir", "a\udcffb", "bytes that are no text"),
        ("--name", "a\0b", "bytes that are no text"),
    ],
    ids=lambda value: value[:12],
)
def test_what_can_be_no_path_is_refused_by_the_parser(flag: str, word: str, message: str) -> None:
    with pytest.raises(Refused, match=message) as raised:
        parse_flag(cls.Config, f"{flag}={word}")
    assert str(raised.value).startswith(f"{flag} ") and len(str(raised.value)) < 300
