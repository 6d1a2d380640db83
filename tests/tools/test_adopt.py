"""Adopting configurations of other tools: no setting is dropped silently, and what is carried means the same."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from timm.scheduler import create_scheduler_v2

from common.config.parsing import parse
from common.data.stream import Stream
from common.errors import Refused
from common.training.optimizer import Schedule
from recipes import cls, det
from tools.adopt import __main__ as command
from tools.adopt import mmengine_config, timm_train
from tools.adopt.adoption import Adoption, facts, known
from tools.adopt.readers import read

ROOT = Path(__file__).parents[2]

A2 = """
data_dir: /data/imagenet
model: resnet50
img_size: 224
crop_pct: 0.95
batch_size: 512
epochs: 300
opt: lamb
lr: 5e-3
warmup_epochs: 5
weight_decay: 0.02
aa: rand-m7-mstd0.5-inc1
mixup: 0.1
cutmix: 1.0
aug_repeats: 3
bce_loss: true
bce_target_thresh: 0.2
smoothing: 0.0
drop_path: 0.05
channels_last: true
amp: true
amp_dtype: bfloat16
"""


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return path


def mmdetection(folder: Path, kind: str, more: str = "") -> Path:
    """What a run of a published detector on ResNet-50 in 12 epochs writes, whose config ends with `more`."""
    engine = pytest.importorskip("mmengine")
    published: dict = {}
    for name, value in mmengine_config.family(kind).items():
        *groups, last = name.split(".")
        place = published
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    backbone = {"type": "ResNet", "depth": 50, "num_stages": 4, "out_indices": (0, 1, 2, 3), "frozen_stages": 1}
    backbone |= {"norm_cfg": {"type": "BN", "requires_grad": True}, "norm_eval": True, "style": "pytorch"}
    backbone |= {"init_cfg": {"type": "Pretrained", "checkpoint": "torchvision://resnet50"}}
    model = {"type": kind, "backbone": backbone, **published}
    file = written(
        folder / "config.py",
        f"model = {model!r}\n"
        "pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(1333, 800), keep_ratio=True),\n"
        "            dict(type='RandomFlip', prob=0.5), dict(type='PackDetInputs')]\n"
        "train_dataloader = dict(batch_size=2, batch_sampler=dict(type='AspectRatioBatchSampler'), dataset=dict(\n"
        "    type='CocoDataset', ann_file='annotations/instances_train2017.json', pipeline=pipeline))\n"
        "train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=12, val_interval=1)\n"
        "param_scheduler = [dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),\n"
        "                   dict(type='MultiStepLR', begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1)]\n"
        "optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02, momentum=0.9, weight_decay=0.0001))\n"
        "auto_scale_lr = dict(enable=False, base_batch_size=16)\n" + more,
    )
    engine.Config.fromfile(str(file)).dump(str(file))
    return file


def kinds(adoption: Adoption) -> dict[str, tuple[str, str]]:
    """What became of each setting: kind and text."""
    return {key: (line.kind, line.text) for line in reversed(adoption.lines) for key in line.keys}


def made(adoption: Adoption, folder: Path) -> dict[str, str]:
    """The preset that is written, checked as all presets are, as texts."""
    path = folder / "made.yaml"
    words = shlex.split(adoption.write(path, overwrite=True))
    assert (ROOT / words[3]).is_file()
    assert Path(words[words.index("--config") + 1]) == path
    return {key: str(value) for key, value in yaml.safe_load(path.read_text()).items()}


# --- every setting


SPECIAL = {  # values that differ from the default and are possible, where no rule gives one
    "model": "resnet18",
    "opt": "adamw",
    "sched": "step",
    "dataset": "hfds/owner/name",
    "input_size": [3, 96, 96],
    "amp_dtype": "bfloat16",
    "lr_base_scale": "sqrt",
    "clip_mode": "agc",
    "aa": "original",
    "mixup_mode": "elem",
    "scale": [0.2, 1.0],
}


def other(value: Any) -> Any:
    """A value that differs from a default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1 if value in (0, 1, -1) else value * 2
    if isinstance(value, list):
        return [*value, 0.5] if value else [1]
    return "else" if isinstance(value, str) else {"a": 1} if isinstance(value, dict) else 1


def test_every_setting_of_timm_is_carried_or_named() -> None:
    """Each setting of the tables, with another value than timm's own, is known."""
    file = Path("args.yaml")
    values = {"batch_size": 8, "mixup": 0.1, "amp": True, "warmup_epochs": 5, "model_ema": True}
    defaults = known("timm_train")
    for key in {**dict.fromkeys(facts("timm_train")["no effect"]), **defaults}:
        adoption = timm_train.read(values | {key: SPECIAL.get(key, other(defaults.get(key)))}, file, gpus=2)
        lines = [line for line in adoption.lines if key in line.keys]
        assert lines and not any("not known" in line.text for line in lines), key
        assert not any(line.kind == "no effect here" and line.text for line in lines), f"{key}: taken for a default"
    adoption = timm_train.read({"batch_size": 8, "of_tomorrow": 3}, file, gpus=1)
    assert kinds(adoption)["of_tomorrow"] == ("not carried", "not known as a setting of timm's train.py")
    assert {key for line in adoption.lines for key in line.keys} == {*adoption.values}


# --- meaning


def test_what_a_timm_file_leaves_out_is_timms_default_and_not_ours(tmp_path) -> None:
    adoption = timm_train.read({"batch_size": 64, "grad_accum_steps": 2, "min_lr": 1e-4}, Path("args.yaml"), gpus=4)
    preset = made(adoption, tmp_path)
    wanted = {"model": "resnet50", "opt": "sgd", "schedule": "cosine", "epochs": "300", "weight_decay": "2e-05"}
    wanted |= {"hflip": "0.5", "crop_scale": "0.08", "color_jitter": "0.4", "label_smoothing": "0.1", "seed": "42"}
    wanted |= {"global_batch_size": "512", "max_micro_batch_size": "64", "warmup_epochs": "5"}
    wanted |= {"lr": "0.1", "lr_batch_size": "256", "lr_scaling": "linear"}
    wanted |= {"min_lr_ratio": "0.0005"}  # of the peak, 0.1 * 512 / 256
    assert {key: preset.get(key) for key in wanted} == wanted
    adaptive = timm_train.read({"batch_size": 64, "opt": "adamw"}, Path("args.yaml"), gpus=4)
    assert adaptive.preset["lr_scaling"][0] == "sqrt"


@pytest.mark.parametrize(
    "options",
    [
        {"sched": "cosine", "warmup_prefix": True, "min_lr": 1e-3},
        {"sched": "cosine", "warmup_epochs": 0},
        {"sched": "poly", "decay_rate": 1.0, "warmup_prefix": True},
        {"sched": "step", "decay_epochs": 2.4, "decay_rate": 0.5},
        {"sched": "step", "decay_epochs": 2.4, "decay_rate": 0.5, "warmup_prefix": True},
        {"sched": "multistep", "decay_milestones": [4], "decay_rate": 0.5},
        {"sched": "multistep", "decay_milestones": [2, 5], "warmup_prefix": True},
        {"sched": "multistep", "decay_milestones": [2], "warmup_prefix": True},
        {"sched": "constant", "warmup_prefix": True},
        {"sched": "none", "warmup_prefix": True},
    ],
    ids=str,
)
def test_rates_and_length_are_those_of_timms_own_schedules(options) -> None:
    """timm's factory, run on the options that train.py gives it, at each of 10 updates per epoch."""
    values = {"batch_size": 8, "epochs": 10, "warmup_epochs": 3, "lr": 0.4, "sched_on_updates": True} | options
    is_by_epoch = options["sched"] == "multistep"  # and then warm-up and falls are those of whole epochs
    values |= {"sched_on_updates": not is_by_epoch}
    preset = timm_train.read(values, Path("args.yaml"), gpus=1).preset
    config = parse(cls.Config, ["--data", "x"])
    flags = "lr lr_batch_size lr_scaling global_batch_size schedule epochs warmup_epochs min_lr_ratio step_epochs step_factor"
    for flag in flags.split():
        setattr(config, flag, preset.get(flag, (getattr(config, flag), ""))[0])
    arguments = known("timm_train") | values
    names = "sched decay_epochs decay_milestones decay_rate min_lr warmup_lr warmup_epochs warmup_prefix".split()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    by = {} if is_by_epoch else {"step_on_epochs": False, "updates_per_epoch": 10}
    theirs, epochs = create_scheduler_v2(optimizer, num_epochs=10, **by, **{name: arguments[name] for name in names})
    assert config.epochs == epochs
    ours = Schedule(config, Stream(80, 8, 0), 10 * epochs)
    for step in range(int(config.warmup_epochs) * 10, 10 * epochs):
        expected = theirs._get_lr(step // (10 if is_by_epoch else 1))[0] if theirs else 0.4
        assert ours(step) == pytest.approx(expected, rel=1e-6), step


def test_settings_of_timm_keep_their_meaning() -> None:
    for theirs, ours in (
        ({"sync_bn": True}, {"batch_norm": "global"}),
        ({"no_aug": True, "reprob": 0.5}, {"crop_scale": 1.0, "hflip": 0.0, "color_jitter": 0.0}),
        ({"aa": "rand-m9", "color_jitter": 0.3}, {"augment": "rand-m9"}),
        ({"model_ema": True, "model_ema_decay": 0.999}, {"ema_decay": 0.999}),
        ({"clip_grad": 2.0, "clip_mode": "agc"}, {"clip": 2.0, "clip_mode": "agc"}),
        ({"drop_connect": 0.2}, {"drop_path": 0.2}),
        ({"input_size": [3, 96, 96]}, {"image_size": 96}),
        ({"dataset": "hfds/owner/name"}, {"data": "owner/name"}),
        ({"mixup": 0.2, "aug_repeats": 3, "batch_size": 16}, {"global_batch_size": 12, "repeats": 3}),
    ):
        adoption = timm_train.read({"batch_size": 8} | theirs, Path("args.yaml"), gpus=1)
        assert {key: adoption.preset[key][0] for key in ours} == ours
        assert not adoption.preset["random_erasing"][0]
        assert "aa" not in theirs or "color_jitter" not in adoption.preset, "timm turns it off beside aa"


RUNS = [  # of MMEngine: counts 4 iterations per step, 40 per epoch
    "train_cfg = dict(by_epoch=True, max_epochs=3)\nparam_scheduler = [dict(type='MultiStepLR', milestones=[1, 2])]\n",
    "train_cfg = dict(by_epoch=False, max_iters=100)\nparam_scheduler = [dict(type='LinearLR', start_factor=0.1, end=10, "
    "by_epoch=False), dict(type='MultiStepLR', by_epoch=False, begin=10, milestones=[32, 60])]\n",
    "train_cfg = dict(by_epoch=False, max_iters=102)\nparam_scheduler = [dict(type='MultiStepLR', by_epoch=False, "
    "milestones=[22], gamma=0.5)]\n",
    "train_cfg = dict(by_epoch=True, max_epochs=2)\nparam_scheduler = [dict(type='MultiStepLR', end=1, milestones=[1])]\n"
    "auto_scale_lr = dict(enable=True, base_batch_size=16)\n",
]


@pytest.mark.parametrize("text", RUNS)
def test_steps_and_rates_are_those_of_mmengines_own_runner(text, tmp_path, monkeypatch) -> None:
    """A runner of MMEngine trains with gradient accumulation; the preset has its number of steps and its rate in each."""
    engine = pytest.importorskip("mmengine")
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, images, mode="tensor"):
            return {"loss": self.layer(images).mean()}

    wrapper = "dict(type='OptimWrapper', accumulative_counts=4, optimizer=dict(type='SGD', lr=0.02))"
    file = mmdetection(tmp_path, "FasterRCNN", more=f"{text}optim_wrapper = {wrapper}\n")
    found = engine.Config.fromfile(str(file))
    rates: list[float] = []
    plain = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda own: (rates.append(own.param_groups[0]["lr"]), plain(own))[1])
    options = {name: found[name] for name in ("train_cfg", "param_scheduler", "optim_wrapper", "auto_scale_lr")}
    options |= {"work_dir": str(tmp_path / "work"), "experiment_name": tmp_path.name, "log_level": "ERROR"}
    data = torch.utils.data.DataLoader([{"images": torch.ones(1)}] * 80, batch_size=2)
    Runner(Model(), train_dataloader=data, **options).train()

    adoption = read(file, gpus=1, images=80)
    config = parse(det.Config, ["--data", "x"])
    for flag, (value, _) in adoption.preset.items():
        setattr(config, flag, value)
    assert config.global_batch_size == 8 and config.momentum == 0.0 == config.weight_decay
    stream = Stream(80, 8, 0)
    steps = adoption.preset["max_steps"][0] if "max_steps" in adoption.preset else stream.steps(config.epochs)
    assert steps == len(rates)
    ours = Schedule(config, stream, steps)
    warmup = stream.steps(config.warmup_epochs)
    assert [ours(step) for step in range(warmup, steps)] == pytest.approx(rates[warmup:], rel=1e-6)


def test_settings_of_mmdetection_keep_their_meaning(tmp_path) -> None:
    more = (
        "optim_wrapper = dict(optim_wrapper, type='AmpOptimWrapper', clip_grad=dict(max_norm=35, norm_type=2),\n"
        "    accumulative_counts=2, paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult=0.1)), norm_decay_mult=0.))\n"
        "custom_hooks = [dict(type='EMAHook', momentum=0.001), dict(type='Other')]\n"
        "train_dataloader = dict(batch_size=2, dataset=dict(type='RepeatDataset', times=3, dataset=dict(\n"
        "    ann_file='mine.json', pipeline=[dict(type='RandomResize', scale=[(1333, 640), (1333, 800)], keep_ratio=True),\n"
        "    dict(type='PhotoMetricDistortion'), dict(type='Strange', p=1), dict(type='RandomFlip', prob=0.5,\n"
        "    direction='vertical'), dict(type='RandomResize', scale=(640, 640), ratio_range=(0.1, 2.0)),\n"
        "    dict(type='RandomFlip', prob=0.5)])))\n"
    )
    file = mmdetection(tmp_path, "MaskRCNN", more=more)
    with pytest.raises(Refused, match=r"500 iterations are how many epochs\? Give --images N"):
        read(file, gpus=4)
    adoption = read(file, gpus=4, images=1000)
    preset = made(adoption, tmp_path)
    wanted = {"detector": "mask_rcnn", "global_batch_size": "16", "clip": "35", "backbone_lr_factor": "0.1"}
    wanted |= {"epochs": "36", "step_epochs": "24,33", "photometric": "0.5"}
    wanted |= {"short_sides": "640,672,704,736,768,800"}
    wanted |= {"ema_decay": "0.998001", "warmup_epochs": "3.99984"}  # 500 iterations, two of them per step
    assert {key: preset.get(key) for key in wanted} == wanted
    became = kinds(adoption)
    place = "train_dataloader.dataset.dataset.pipeline"
    for key in (f"{place}[2].type", f"{place}[3].prob", f"{place}[4].ratio_range", "custom_hooks[1].type"):
        assert became[key][0] == "not carried"
    assert preset["hflip"] == "0.5"
    more = "randomness = dict(seed=7, deterministic=True)\n"
    more += "optim_wrapper = dict(type='AmpOptimWrapper', dtype={!r}, optimizer=dict(type='AdamW'))\n"
    for dtype, precision in (("bfloat16", "bf16"), (None, "fp16"), ("float32", "")):
        adoption = read(mmdetection(tmp_path, "FasterRCNN", more=more.format(dtype)), gpus=8)
        assert adoption.precision == precision
    flags = {"seed": 7, "deterministic": True, "lr": 0.001, "weight_decay": 0.01}  # torch's own defaults
    assert {flag: adoption.preset[flag][0] for flag in flags} == flags


def test_a_changed_part_of_a_detector_is_named(tmp_path) -> None:
    more = (
        "model['rpn_head']['anchor_generator']['scales'] = [4]\nmodel['rpn_head']['loss_bbox'] = dict(type='IoULoss')\n"
    )
    said = read(mmdetection(tmp_path, "FasterRCNN", more)).table()
    assert "model.rpn_head.anchor_generator.scales = [4] -> not carried: the family has [8]" in said
    assert "model.rpn_head.loss_bbox.type = IoULoss -> not carried: the family has L1Loss" in said
    assert "model.rpn_head.loss_bbox.loss_weight: the family has 1.0, the file has none" in said


# --- the same sources as this project's presets

# Ours are torchvision's: 26 epochs and half the rate, with a longer warm-up.
TORCHVISION = {
    "epochs": (12, 26),
    "step_epochs": ("8,11", "16,22"),
    "lr": (0.02, 0.01),
    "warmup_epochs": (0.0676308, 0.135),
}


@pytest.mark.parametrize(
    "kind, preset, changed",
    [
        ("timm", "imagenet_resnet50_a2", {"seed": (42, 0)}),  # timm's default
        ("FasterRCNN", "coco_fasterrcnn_r50_1x", {"warmup_epochs": (0.0676308, 0.0677)}),
        ("RetinaNet", "coco_retinanet_r50", TORCHVISION),
        ("FCOS", "coco_fcos_r50", TORCHVISION),
    ],
)
def test_what_others_published_becomes_our_preset_of_the_same_source(kind, preset, changed, tmp_path) -> None:
    """Less our own freezing."""
    is_timm = kind == "timm"
    file = written(tmp_path / "args.yaml", A2) if is_timm else mmdetection(tmp_path, kind)
    adoption = read(file, gpus=4 if is_timm else 0)
    made(adoption, tmp_path)
    files = [tmp_path / "made.yaml", ROOT / "recipes" / "presets" / f"{preset}.yaml"]
    one, other = (dataclasses.asdict(parse(adoption.recipe.Config, ["--config", str(file)])) for file in files)
    unlike = {flag: (one[flag], other[flag]) for flag in one if one[flag] != other[flag] and flag != "freeze_stages"}
    same = {"data": ("FOLDER", "/data/coco"), "group_window": (16, 0), "max_micro_batch_size": (2, 4)}
    assert unlike == changed | ({} if is_timm else same)
    assert not [line for line in adoption.lines if line.kind == "not carried" and "not known" in line.text]


# --- what is refused

REFUSED = {  # what a file holds: what is said
    "batch_size: 8\nmodel: resnet50\nopt: sgd\n": "batch_size 8 is per GPU.*give --gpus N",
    "batch_size: 8\nmodel: resnext1\nopt: sgd\nworld_size: 2\n": "model resnext1 is not one of timm",
    "batch_size: 8\nmodel: resnet50\nlr: [1, 2]\nworld_size: 2\n": "a value of another kind than its tool",
    "model: yolo11n.pt\nepochs: 9\nbatch: 8\nimgsz: 640\nlr0: 0.1\n": "not args.yaml of timm",  # Ultralytics'
    "MODEL: {META_ARCHITECTURE: RetinaNet}\nSOLVER: {MAX_ITER: 9}\nVERSION: 2\n": "not args.yaml of timm",  # detectron2's
    "path: x\ntrain: a\nval: b\nnames: [cat]\n": "not args.yaml of timm",
    "- 1\n": "must hold `key: value` lines",
    "a: [\n": "not readable as plain YAML",
}


def test_what_can_t_become_a_preset_is_refused_in_one_line(tmp_path) -> None:
    for text, said in REFUSED.items():
        with pytest.raises(Refused, match=said):
            read(written(tmp_path / "a.yaml", text))
    with pytest.raises(Refused, match=r"b.yaml: no such file"):
        read(tmp_path / "b.yaml")


ATTACKS = [  # each would make the file `mark`, or never end, if it were executed
    "import os\nos.system('touch {mark}')",
    "dict = eval\nx = dict('open({mark!r}, \"w\")')",
    "x = dict(a=open({mark!r}, 'w'))",
    "x = f'{{open({mark!r}, 1)}}'",
    "x: open({mark!r}, 'w') = 1",
    "x = 9**9**9",
    "x = " + "[" * 90 + "open({mark!r}, 'w')" + "]" * 90,
    "x = " + "-" * 10_000 + "1",
    "_base_ = ['bad.py']",
]


def test_nothing_in_a_file_is_executed(tmp_path) -> None:
    mark = str(tmp_path / "mark")
    written(tmp_path / "bad.py", ATTACKS[0].format(mark=mark))
    for attack in ATTACKS:
        with pytest.raises(Refused, match=r"not the config that a run of MMDetection writes.*its work_dir") as refused:
            read(written(tmp_path / "config.py", attack.format(mark=mark)))
        assert "\n" not in str(refused.value)
    tag = f"!!python/object/apply:os.system ['touch {mark}']"
    with pytest.raises(Refused, match="not readable as plain YAML"):
        read(written(tmp_path / "args.yaml", f"batch_size: 8\nmodel: {tag}\nopt: sgd\n"))
    assert not Path(mark).exists()


# --- the command


def test_a_preset_says_what_it_was_made_from_is_not_replaced_and_trains(
    run_several, tmp_path, monkeypatch, capsys
) -> None:
    """A world takes three steps with its mixing, repeats, averaging and schedule."""
    monkeypatch.chdir(tmp_path)
    text = A2.replace("resnet50", "test_resnet").replace("224", "32").replace("512", "16") + "model_ema: true\n"
    file = written(tmp_path / "run" / "args.yaml", text)
    command.main([str(file), "--gpus", "2"])
    said, preset = capsys.readouterr().out, tmp_path / "args.yaml"
    assert "  opt = lamb -> opt = lamb\n" in said
    assert "  bce_target_thresh = 0.2 -> not carried: change build_loss in a copy of the recipe\n" in said
    assert "  no effect here, or at the defaults of timm's train.py: " in said and " jsd_loss," in said
    made_text = preset.read_text()
    for line in (
        "# Made from args.yaml of timm's train.py by tools/adopt. Nothing was measured with it.",
        "#   accelerate launch --config_file accelerate_configs/multi_gpu_bf16.yaml recipes/cls.py --config args.yaml",
        "# - bce_target_thresh = 0.2: change build_loss in a copy of the recipe",
    ):
        assert line in made_text.splitlines()
    with pytest.raises(Refused, match=r"args.yaml exists: give another name with -o, or --overwrite"):
        command.main([str(file), "--gpus", "8"])
    assert preset.read_text() == made_text
    with pytest.raises(Refused, match=r"no/such.yaml: can't be written: No such file or directory"):
        command.main([str(file), "--gpus", "8", "-o", "no/such.yaml"])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["args.yaml"]
    monkeypatch.undo()

    words = ["--config", preset, "--data", "digits", "--max_steps", 3]
    run = run_several(2, {"made": words})["made"].folder
    config = yaml.safe_load((run / "config.yaml").read_text())
    expected = {"global_batch_size": 30, "repeats": 3, "opt": "lamb", "ema_decay": 0.9998}
    assert {flag: config[flag] for flag in expected} == expected and (run / "best" / "model.safetensors").is_file()


# --- all of MMDetection's


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return [*map(plain, value)] if isinstance(value, (list, tuple)) else value


@pytest.mark.long
def test_every_config_of_mmdetection_becomes_a_preset_or_is_refused_in_one_line(tmp_path, mmdetection_configs) -> None:
    """As a run writes it; docs/coming_from_elsewhere.md has these figures."""
    engine = pytest.importorskip("mmengine")
    options = {"use_predefined_variables": False, "import_custom_modules": False, "use_environment_variables": False}
    counts: dict[str, int] = {}
    for file in mmdetection_configs:
        try:
            config = engine.Config.fromfile(str(file), lazy_import=False, **options)
        except Exception:  # what it names is in no package here
            counts["not readable"] = counts.get("not readable", 0) + 1
            continue
        config.dump(tmp_path / "config.py")
        assert plain(mmengine_config.values_of(tmp_path / "config.py")) == plain(config._cfg_dict), file
        try:
            adoption = read(tmp_path / "config.py", gpus=8, images=20_000)
            made(adoption, tmp_path)
            assert {key for line in adoption.lines for key in line.keys} == {*adoption.values}, file
            result = "preset"
        except Refused as error:
            result = "no successor" if "no successor" in str(error) else "refused"
        counts[result] = counts.get(result, 0) + 1
    assert counts == {"preset": 215, "no successor": 642, "refused": 3, "not readable": 9}
