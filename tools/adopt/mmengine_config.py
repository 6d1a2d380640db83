"""Reader of MMDetection's configs, by the parser of mmengine; becomes a preset of recipes/det.py.

These configs are Python. mmengine executes them, so each file is checked first: only assignments of plain values may stand in
it. Others are refused, and can be turned into plain values where they are trusted.
"""

import ast
import re
import warnings
from pathlib import Path
from typing import Any

from common.errors import Refused
from common.files import SMALL, read_text
from recipes import det
from tools.adopt import detectors
from tools.adopt.adoption import IMAGES, Adoption, Line, _equal, epochs_of, facts, flat, rounded

TOOL = "MMDetection"
FAMILIES = {"FasterRCNN": "faster_rcnn", "MaskRCNN": "mask_rcnn", "RetinaNet": "retinanet", "FCOS": "fcos"}
HEADS = {  # the part of the model that makes it this family
    "FasterRCNN": ("roi_head.type", "StandardRoIHead"),
    "MaskRCNN": ("roi_head.type", "StandardRoIHead"),
    "RetinaNet": ("bbox_head.type", "RetinaHead"),
    "FCOS": ("bbox_head.type", "FCOSHead"),
}
SWIN = {(96, (2, 2, 6, 2)): "tiny", (96, (2, 2, 18, 2)): "small", (128, (2, 2, 18, 2)): "base"}
GPUS = 8  # what MMDetection's files are written for
NO_EFFECT = {
    "default_scope env_cfg log_level log_processor visualizer vis_backends work_dir launcher randomness custom_imports _scope_ "
    "default_hooks.timer default_hooks.logger default_hooks.param_scheduler default_hooks.sampler_seed "
    "default_hooks.visualization": "belongs to MMEngine; name the run with --output_dir and --name",
    "dataset_type data_root backend_args file_client_args metainfo classes": "the data give classes and files: --data FOLDER",
    "train_pipeline test_pipeline val_pipeline": "repeated in the loaders",
    "val_dataloader val_evaluator val_cfg test_dataloader test_evaluator test_cfg tta_model tta_pipeline": (
        "evaluation is COCO's, over the validation part of --data"
    ),
    "model.type model.data_preprocessor model._scope_": "pixels are what timm's weights want, padded for each step",
    "resume": "the same command resumes",
    "model.roi_head.bbox_head.num_classes model.roi_head.mask_head.num_classes model.bbox_head.num_classes": (
        "the data give the classes"
    ),
    "train_dataloader.num_workers train_dataloader.persistent_workers train_dataloader.pin_memory train_dataloader.sampler "
    "train_dataloader.drop_last train_dataloader.collate_fn train_dataloader.dataset": "the data are those of --data FOLDER",
}
RUNNER = """model train_dataloader train_cfg optim_wrapper param_scheduler auto_scale_lr load_from custom_hooks default_hooks
default_scope env_cfg log_level log_processor visualizer vis_backends work_dir launcher randomness custom_imports resume
val_dataloader val_evaluator val_cfg test_dataloader test_evaluator test_cfg data_preprocessor experiment_name cfg""".split()
_NODES = (  # of a config that can be executed without doing anything but to compute values
    *(
        ast.Module,
        ast.Assign,
        ast.AugAssign,
        ast.Delete,
        ast.Expr,
        ast.Name,
        ast.Load,
        ast.Store,
        ast.Del,
        ast.Constant,
    ),
    *(
        ast.Dict,
        ast.List,
        ast.Tuple,
        ast.Set,
        ast.BinOp,
        ast.UnaryOp,
        ast.operator,
        ast.unaryop,
        ast.Subscript,
        ast.Slice,
    ),
    *(ast.Call, ast.keyword, ast.Attribute, ast.ListComp, ast.DictComp, ast.comprehension, ast.Starred),
    *(ast.JoinedStr, ast.FormattedValue, ast.Compare, ast.cmpop, ast.IfExp, ast.BoolOp, ast.boolop),
)
_FUNCTIONS, _METHODS = {"dict", "len", "range", "enumerate", "list", "tuple"}, {"update", "pop"}


def read(file: Path, gpus: int = 0, images: int = 0) -> Adoption:
    """What becomes of a config. Raises `Refused` for other models than the families here, and for configs that do more."""
    adoption = Adoption(TOOL, file, det, flat(load(file)))
    _model(adoption)
    batch = _batch(adoption, gpus)
    images, repeated = _data(adoption, images)
    _solver(adoption, batch, images, repeated)
    _pipeline(adoption)
    for names, reason in NO_EFFECT.items():
        adoption.skip(names.split(), reason)
    variables = dict.fromkeys(re.split(r"[.\[]", key)[0] for key in adoption.values)
    adoption.skip([name for name in variables if name not in RUNNER], "a variable, which is reported where it is used")
    adoption.finish()
    return adoption


def load(file: Path) -> dict[str, Any]:
    """The settings of a config and its `_base_`, once all these files are checked. Raises `Refused`."""
    check(file)
    try:
        from mmengine.config import Config
    except ImportError:
        raise Refused(f"{file}: configs of MMDetection need its parser: pip install mmengine") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = Config.fromfile(
                str(file),
                use_predefined_variables=False,
                import_custom_modules=False,
                use_environment_variables=False,
                lazy_import=False,
            )
        return _plain(config._cfg_dict)
    except Exception as error:  # what mmengine raises is anything at all
        raise Refused(f"{file}: mmengine can't read it: {type(error).__name__}: {error!s:.200}") from None


def check(file: Path, above: tuple[Path, ...] = ()) -> None:
    """Raise `Refused` if a config or one of its `_base_` does anything but assign values."""
    try:
        text = read_text(file, SMALL)
        tree = ast.parse(text)
    except OSError as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"{file}: not readable as Python: {error!s:.100}") from None
    if file.resolve() in above:
        raise Refused(f"{file}: _base_ leads in a circle")
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if not _harmless(node, assigned):
            raise Refused(
                f"{file}: line {getattr(node, 'lineno', 0)} does more than assign values, and is not executed; where the file "
                'is trusted, write its values out: python -c "from mmengine.config import Config; '
                f"Config.fromfile('{file}').dump('plain.py')\""
            )
    for base in _bases(file, tree):
        check(base, (*above, file.resolve()))


def _harmless(node: ast.AST, assigned: set[str]) -> bool:
    """Whether a node of a config can only compute values: no import, and no call but those of plain dicts and lists."""
    if isinstance(node, ast.Name):
        if not isinstance(node.ctx, ast.Load):
            return node.id not in _FUNCTIONS and not node.id.startswith("__")
        return node.id in assigned | _FUNCTIONS | {"_base_"}
    if isinstance(node, ast.Call):
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS
        return is_method or (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return "{{$" not in node.value.replace(" ", "")  # text that mmengine would replace before it executes the file
    if isinstance(node, ast.Attribute):
        return not node.attr.startswith("__")
    return isinstance(node, _NODES)


def _bases(file: Path, tree: ast.Module) -> list[Path]:
    found = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_base_"]
    everywhere = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "_base_"]
    if sum(not isinstance(node.ctx, ast.Load) for node in everywhere) != len(found) or len(found) > 1:
        raise Refused(f"{file}: _base_ must be assigned once")
    try:
        named = ast.literal_eval(found[0].value) if found else []
    except ValueError:
        raise Refused(f"{file}: _base_ must be a text, or a list of texts") from None
    paths = []
    for name in [named] if isinstance(named, str) else named:
        path = file.parent / str(name)
        if "::" in str(name) or path.suffix != ".py":
            raise Refused(f"{file}: _base_ {name} is not a config beside this one: copy it there, and name that")
        if not path.is_file():
            raise Refused(f"{file}: _base_ {name} is missing: put it there as {path}")
        paths.append(path)
    return paths


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _model(adoption: Adoption) -> None:
    kind, file = adoption["model.type"], adoption.file
    head, expected = HEADS.get(kind, ("", ""))
    if kind not in FAMILIES or adoption[f"model.{head}"] != expected or adoption["model.neck.type"] != "FPN":
        parts = {name: adoption[f"model.{name}"] for name in ("type", "neck.type", head or "bbox_head.type")}
        named = ", ".join(f"{name} {value}" for name, value in parts.items() if value) or "a config without a model"
        raise Refused(
            f"{file}: {named}: no successor here; families are {', '.join(FAMILIES)} with FPN, and --detector rtdetr_v2 or "
            "dfine (recipes/presets/coco_rtdetrv2_r18.yaml)"
        )
    name, detector = _backbone(adoption), FAMILIES[kind]
    if not name:
        raise Refused(
            f"{file}: the backbone {adoption['model.backbone.type']}, as it is here, has no successor: choose one of timm for "
            f"--detector {detector} (recipes/presets/coco_fasterrcnn_r50_1x.yaml has ResNet-50)"
        )
    one_stage = detector in ("retinanet", "fcos")
    adoption.carry("model.type", detector=detector, levels="3-7" if one_stage else "2-6")
    keys = "type depth groups base_width arch embed_dims depths".split()
    adoption.carry(
        [f"model.backbone.{key}" for key in keys if adoption[f"model.backbone.{key}"] is not None], model=name
    )
    where_from = [
        key for key in adoption.under("model.backbone.init_cfg", "model.backbone.pretrained") if adoption[key]
    ]
    adoption.carry(where_from, "timm's weights" if where_from else "", pretrained=bool(where_from))
    adoption.carry("model.neck.out_channels", width=adoption["model.neck.out_channels"])
    if one_stage:
        adoption.carry("model.bbox_head.stacked_convs", convolutions=adoption["model.bbox_head.stacked_convs"])
    norm = "model.backbone.norm_cfg"
    if adoption["model.backbone.norm_eval"] or adoption[f"{norm}.requires_grad"] is False:
        adoption.carry([norm, "model.backbone.norm_eval"], batch_norm="frozen")
    elif adoption[f"{norm}.type"] in (None, "BN", "SyncBN", "MMSyncBN"):
        norms = [norm, "model.backbone.norm_eval"] if adoption.under(norm) else []
        adoption.carry(norms, batch_norm="global" if "Sync" in str(adoption[f"{norm}.type"]) else "local")
    else:
        adoption.leave([norm, "model.backbone.norm_eval"], "the norms are those of timm's model")
    frozen = adoption["model.backbone.frozen_stages"]
    if frozen is not None and frozen >= 0:
        stages = str(frozen) if frozen else "stem"
        adoption.carry("model.backbone.frozen_stages", otherwise="the whole backbone is trained", freeze_stages=stages)
    if drop := adoption["model.backbone.drop_path_rate"]:
        adoption.carry("model.backbone.drop_path_rate", drop_path=drop)
    usual = {"num_stages": 4, "out_indices": [0, 1, 2, 3], "frozen_stages": -1, "init_cfg": None}
    for key in adoption.under("model.backbone"):
        name = key.removeprefix("model.backbone.")
        if usual.get(name, ()) == adoption[key] or name in ("style", "with_cp", "_scope_"):
            adoption.skip(key, "as in timm's model")
        adoption.leave(key, "the backbone is timm's; choose another one with --model", always=True)
    _family(adoption, kind, detector)


def _backbone(adoption: Adoption) -> str:
    """timm's name of the backbone; "" if it has none."""
    settings = {key: adoption[f"model.backbone.{key}"] for key in ("type", "depth", "groups", "base_width", "arch")}
    changes = (
        "dcn",
        "plugins",
        "gen_attention",
        "conv_cfg",
        "sac",
        "deep_stem",
        "avg_down",
        "dilations",
        "strides",
        "num_stages",
    )
    plain = not any(
        adoption[key] not in (None, 4) for key in adoption.under(*(f"model.backbone.{name}" for name in changes))
    )
    plain &= adoption["model.backbone.norm_cfg.type"] in (None, "BN", "SyncBN", "MMSyncBN", "LN")
    kind, depth = str(settings["type"]), settings["depth"]
    if kind in ("ResNet", "ResNeXt") and plain:
        return detectors.resnet(depth, settings["groups"] or 1, settings["base_width"] or 64)
    if kind == "RegNet" and plain and (found := re.fullmatch(r"regnet([xy])_([\d.]+)([mg])f", str(settings["arch"]))):
        millions = round(float(found[2]) * (1000 if found[3] == "g" else 1))
        return detectors.pretrained(f"regnet{found[1]}_{millions // 100:03d}")
    if kind == "SwinTransformer":
        size = SWIN.get((adoption["model.backbone.embed_dims"], tuple(adoption["model.backbone.depths"] or ())))
        return detectors.pretrained(f"swin_{size}_patch4_window7_224") if size else ""
    return ""


def _family(adoption: Adoption, kind: str, detector: str) -> None:
    """Settings of neck, heads and matching: those of the published model are the family's, others are named."""
    same = {f"model.{key}": value for key, value in flat(facts("mmdet_models")[kind]).items()}
    classes = {key for key in adoption.under("model") if key.endswith(".num_classes")}
    other = [key for key in adoption.under("model") if key not in adoption.mentioned | classes]
    other = [key for key in other if not key.startswith(("model.data_preprocessor", "model._scope_"))]
    kept = [key for key in other if key in same and _equal(adoption[key], same[key])]
    adoption.lines.append(Line("carried", kept, f"-> detector = {detector}", f"{len(kept)} settings of the family"))
    adoption.mentioned |= {*kept}
    for key in other:
        if key not in kept:
            adoption.leave(key, f"the family has {same[key]}" if key in same else "no such setting of the family here")
    for key in same.keys() - adoption.values.keys():
        adoption.lines.append(Line("not carried", [], f"the family has {same[key]}, the file has none", key))
    detectors.differences(adoption, detector)


def _batch(adoption: Adoption, gpus: int) -> int:
    """Carry the batch size: per GPU times --gpus, or the one that `auto_scale_lr` says the rate is meant for."""
    per_gpu, base = (
        int(adoption["train_dataloader.batch_size"] or 0),
        int(adoption["auto_scale_lr.base_batch_size"] or 0),
    )
    per_gpu = per_gpu or (base // GPUS if base else 0)
    accumulated = int(adoption["optim_wrapper.accumulative_counts"] or 1)
    if not per_gpu or not (gpus or base):
        raise Refused(
            f"{adoption.file}: batch_size {per_gpu or 'missing'} is per GPU, and nothing says how many there were: "
            "give --gpus N"
        )
    batch = per_gpu * gpus * accumulated if gpus else base
    adoption.gpus = gpus or max(1, base // (per_gpu * accumulated))
    names = ["train_dataloader.batch_size", "optim_wrapper.accumulative_counts", "auto_scale_lr"]
    note = f"{per_gpu} x {adoption.gpus} GPUs" + (f" x {accumulated} accumulated" if accumulated > 1 else "")
    named = [name for name in names if adoption.under(name)]
    scaled = not gpus or adoption["auto_scale_lr.enable"]  # else MMDetection leaves the rate as it is
    flags: dict[str, Any] = {"lr_batch_size": base if base and scaled else batch, "lr_scaling": "linear"}
    adoption.carry(named, note, global_batch_size=batch, max_micro_batch_size=per_gpu, **flags)
    if adoption.preset.get("batch_norm", ("",))[0] == "global" and accumulated > 1:
        adoption.preset["batch_norm"] = ("local", "--batch_norm global can't accumulate")
    return batch


def _data(adoption: Adoption, images: int) -> tuple[int, int]:
    """Training images (0: unknown), and how often an epoch shows each."""
    place, repeated = "train_dataloader.dataset", 1
    while adoption[f"{place}.type"] in ("RepeatDataset", "ClassBalancedDataset", "MultiImageMixDataset"):
        if adoption[f"{place}.type"] == "RepeatDataset":
            repeated *= int(adoption[f"{place}.times"])
        if threshold := adoption[f"{place}.oversample_thr"]:
            adoption.carry(f"{place}.oversample_thr", repeat_threshold=threshold)
        place += ".dataset"
    files = [adoption[key] for key in adoption.under(place) if key.endswith("ann_file")]
    names = [Path(str(file)).stem for file in files]
    if str(files[:1]).count("VOC20"):
        names = [f"voc_{year}_{Path(file).stem}" for file in files for year in re.findall(r"VOC(20\d\d)", file)[:1]]
    images = images or (sum(IMAGES[name] for name in names) if names and {*names} <= {*IMAGES} else 0)
    known = f"{images:,} images" if images else "their number is not known"
    adoption.leave(
        [key for key in adoption.under(place) if key.endswith("ann_file")], f"{known}; give them with --data FOLDER"
    )
    if adoption["train_dataloader.batch_sampler.type"] == "AspectRatioBatchSampler":
        adoption.carry("train_dataloader.batch_sampler", group_window=16)
    filters = [key for key in adoption.under(place) if ".filter_cfg." in key]
    if filters:
        adoption.leave(filters, "images without boxes are trained on as background, small ones are used")
    return images, repeated


def _epochs(adoption: Adoption, steps: float, batch: int, images: int) -> float | int:
    if not images:
        raise Refused(
            f"{adoption.file}: {steps:g} iterations are how many epochs? Give --images N, the number of training images"
        )
    return epochs_of(steps, batch, images)


def _solver(adoption: Adoption, batch: int, images: int, repeated: int) -> None:
    by_epoch = adoption["train_cfg.max_epochs"] is not None
    repeats = [key for key in adoption.under("train_dataloader.dataset") if key.endswith(".times")]
    if by_epoch:
        note = f"{adoption['train_cfg.max_epochs']} x {repeated} times the data" if repeated > 1 else ""
        adoption.carry(["train_cfg.max_epochs", *repeats], note, epochs=adoption["train_cfg.max_epochs"] * repeated)
    elif adoption["train_cfg.max_iters"]:
        adoption.carry("train_cfg.max_iters", max_steps=adoption["train_cfg.max_iters"])
    else:
        raise Refused(f"{adoption.file}: has no train_cfg.max_epochs or max_iters: nothing to train")
    between = int(adoption["train_cfg.val_interval"] or 1)
    if by_epoch and between == 1:
        adoption.skip("train_cfg.val_interval", "every epoch")
    elif by_epoch and images:
        adoption.carry("train_cfg.val_interval", eval_every=-(-between * repeated * images // batch))
    elif by_epoch:
        adoption.leave("train_cfg.val_interval", "--eval_every counts steps: give --images N")
    elif adoption.under("train_cfg.val_interval"):
        adoption.carry("train_cfg.val_interval", eval_every=between)
    adoption.leave(
        [key for key in adoption.under("train_cfg") if "dynamic" in key], "evaluations are equally far apart"
    )
    adoption.skip("train_cfg", "the loop of the recipe")
    _optimizer(adoption)
    _schedule(adoption, batch, images, repeated)
    hook = "default_hooks.checkpoint"
    if adoption[f"{hook}.max_keep_ckpts"] and adoption[f"{hook}.max_keep_ckpts"] > 0:
        adoption.carry(f"{hook}.max_keep_ckpts", keep_checkpoints=adoption[f"{hook}.max_keep_ckpts"])
    adoption.skip(hook, "a checkpoint every epoch; --checkpoint_every")
    if adoption["load_from"]:
        adoption.leave("load_from", "not read; --init begins with weights of this family")
    adoption.skip("load_from", "not set")
    for place in sorted({key.split("]")[0] + "]" for key in adoption.under("custom_hooks") if "[" in key}):
        if adoption[f"{place}.type"] == "EMAHook":
            momentum = adoption[f"{place}.momentum"] or 0.0002
            adoption.carry(adoption.under(place), "1 - momentum", ema_decay=rounded(1 - momentum))
        else:
            adoption.leave(place, "hooks don't exist here; see docs/change_it.md")
    adoption.skip("custom_hooks", "none")


def _optimizer(adoption: Adoption) -> None:
    place = "optim_wrapper.optimizer"
    kind = str(adoption[f"{place}.type"])
    nesterov = adoption[f"{place}.nesterov"]
    if kind == "SGD":
        names = [name for name in (f"{place}.type", f"{place}.nesterov") if adoption.under(name)]
        adoption.carry(names, "" if nesterov else "without Nesterov", opt="sgd" if nesterov else "momentum")
    elif kind in ("Adam", "AdamW"):
        adoption.carry(f"{place}.type", opt=kind.lower())
    else:
        adoption.leave(f"{place}.type", "choose --opt and its --lr")
    for name in ("lr", "momentum", "weight_decay"):
        if adoption[f"{place}.{name}"] is not None:
            adoption.carry(f"{place}.{name}", **{name: adoption[f"{place}.{name}"]})
    if adoption[f"{place}.weight_decay"] is None:
        adoption.carry([], "torch's default for its SGD", weight_decay=0.01 if kind == "AdamW" else 0.0)
    adoption.leave(place, "the optimizer's own defaults are used")
    factor = "optim_wrapper.paramwise_cfg.custom_keys.backbone.lr_mult"
    if adoption[factor] is not None:
        adoption.carry(factor, backbone_lr_factor=adoption[factor])
    same = (
        "norm_decay_mult",
        "bias_decay_mult",
        "absolute_pos_embed",
        "relative_position_bias_table",
        ".norm.",
        "bypass_dup",
    )
    for key in adoption.under("optim_wrapper.paramwise_cfg"):
        if any(part in key for part in same) and (adoption[key] in (0, True)):
            adoption.skip(key, "norms, biases and what the model exempts have no weight decay")
        adoption.leave(key, "rates here: --backbone_lr_factor, --layer_decay; norms and biases have no weight decay")
    limit = "optim_wrapper.clip_grad"
    if adoption[f"{limit}.max_norm"] and adoption[f"{limit}.norm_type"] in (None, 2):
        adoption.carry(limit, clip=adoption[f"{limit}.max_norm"])
    adoption.leave([key for key in adoption.under(limit) if adoption[key] is not None], "--clip limits the norm")
    adoption.skip(limit, "not clipped")
    adoption.launch("optim_wrapper.type", "fp16" if adoption["optim_wrapper.type"] == "AmpOptimWrapper" else "")
    adoption.skip(["optim_wrapper.loss_scale", "optim_wrapper.dtype"], "the file given to accelerate launch decides")
    adoption.skip("optim_wrapper.accumulative_counts", "1")


def _schedule(adoption: Adoption, batch: int, images: int, repeated: int) -> None:
    places = sorted({key.split("]")[0] + "]" for key in adoption.under("param_scheduler") if "[" in key})
    places = places or ["param_scheduler"] * bool(adoption["param_scheduler.type"])
    schedule = warmup = None
    for place in places:
        kind, end = adoption[f"{place}.type"], adoption[f"{place}.end"]
        epochs = (
            (lambda x: x * repeated)
            if adoption[f"{place}.by_epoch"] is not False
            else (lambda x: _epochs(adoption, x, batch, images))
        )
        begin = adoption[f"{place}.begin"] or 0
        if kind == "LinearLR" and not begin and not warmup and (adoption[f"{place}.end_factor"] or 1) == 1:
            warmup = epochs(end)
            adoption.carry([f"{place}.type", f"{place}.by_epoch", f"{place}.end"], f"until {end}", warmup_epochs=warmup)
            adoption.leave([f"{place}.start_factor", f"{place}.begin"], "the warm-up rises from zero")
        elif kind == "MultiStepLR" and not schedule:
            schedule = ",".join(str(epochs(at)) for at in adoption[f"{place}.milestones"])
            factor = adoption[f"{place}.gamma"] or 0.1
            adoption.carry(place, schedule="step", step_epochs=schedule, step_factor=factor)
        elif kind == "CosineAnnealingLR" and not schedule:
            schedule, peak = "cosine", adoption["optim_wrapper.optimizer.lr"] or 1
            ratio = adoption[f"{place}.eta_min_ratio"] or (adoption[f"{place}.eta_min"] or 0) / peak
            adoption.carry(
                place, "from the end of the warm-up to the end of the run", schedule="cosine", min_lr_ratio=ratio
            )
        else:
            adoption.leave(
                place, "a warm-up and one of the schedules cosine, linear, step and constant: choose --schedule"
            )
        adoption.skip(place, "the schedule's place in the run")
    if not warmup:
        adoption.carry([], "no linear warm-up in the file", warmup_epochs=0.0)
    if not schedule:
        adoption.carry([], "no schedule in the file that exists here", schedule="constant")


def _pipeline(adoption: Adoption) -> None:
    """Transforms of training images, and the size of evaluated ones."""
    found = [key for key in adoption.under("train_dataloader.dataset") if re.search(r"pipeline\[\d+\]\.type$", key)]
    unsaid = "not said in the file"
    adoption.preset |= {"hflip": (0.0, ""), "short_sides": ("800", unsaid), "long_side": (1333, unsaid)}
    for key in found:
        place, kind = key.removesuffix(".type"), str(adoption[key])
        _transform(adoption, place, kind.rsplit(".", 1)[-1])
    for key in adoption.under("val_dataloader"):
        if key.endswith(".scale") and adoption[key.removesuffix("scale") + "type"] == "Resize":
            adoption.carry(key, eval_short_side=min(adoption[key]))
            break


def _transform(adoption: Adoption, place: str, kind: str) -> None:
    scale, probability = adoption[f"{place}.scale"], adoption[f"{place}.prob"]
    keeps = adoption[f"{place}.keep_ratio"] is not False
    flags: dict[str, Any] = {}
    sides = adoption[f"{place}.scales"] or ([scale] if scale and not isinstance(scale[0], list) else scale)
    factors = adoption[f"{place}.ratio_range"]
    if kind in (
        "LoadImageFromFile",
        "PackDetInputs",
        "LoadAnnotations",
        "Pad",
        "FilterAnnotations",
        "DefaultFormatBundle",
    ):
        adoption.skip(place, "what the recipe does with images")
    elif kind in ("Resize", "RandomChoiceResize", "RandomResize") and sides and keeps and not factors:
        shorts, long = sorted({min(side) for side in sides}), max(max(side) for side in sides)
        ranged = kind == "RandomResize" and len(shorts) == 2
        text = detectors.steps_between(*shorts) if ranged else ",".join(map(str, shorts))
        adoption.carry(place, "the range in steps of 32" if ranged else "", short_sides=text, long_side=long)
    elif kind == "RandomResize" and factors and isinstance(scale, list):
        low, high = factors
        flags = {"scale_jitter": f"{low:g}-{high:g}", "short_sides": str(min(scale)), "long_side": max(scale)}
        adoption.carry(place, **flags)
    elif kind == "RandomCrop" and "scale_jitter" in adoption.preset:
        adoption.skip(place, "--scale_jitter cuts what gets larger than the whole image")
    elif kind == "RandomFlip" and adoption[f"{place}.direction"] in (None, "horizontal"):
        adoption.carry(place, hflip=0.5 if probability is None else probability)
    elif kind in ("PhotoMetricDistortion", "Expand", "MinIoURandomCrop"):
        flag = {"PhotoMetricDistortion": "photometric", "Expand": "zoom_out", "MinIoURandomCrop": "iou_crop"}[kind]
        flags = {flag: {"photometric": 0.5, "zoom_out": probability or 0.5, "iou_crop": 1.0}[flag]}
        adoption.carry(place, **flags)
    elif kind in ("Mosaic", "MixUp"):
        flags = {kind.lower(): 1.0 if probability is None else probability}
        adoption.carry(place, **flags)
    elif kind == "CopyPaste":
        adoption.carry(place, otherwise="does not exist here", copy_paste=1.0)
    else:
        adoption.leave(place, "does not exist here; see docs/change_it.md for an augmentation of your own")
