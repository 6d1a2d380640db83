"""Reader of the args.yaml that timm's train.py writes; becomes a preset of recipes/cls.py."""

import math
from pathlib import Path

import timm

from common.errors import Refused
from recipes import cls
from tools.adopt.adoption import Adoption, facts, falls, known, rounded

SAME = (
    "pretrained channels_last grad_checkpointing momentum weight_decay mixup cutmix smoothing:label_smoothing drop seed"
)
IF_SET = "layer_decay input_key:image_column target_key:label_column drop_path val_split:split"


def read(values: dict, file: Path, gpus: int = 0) -> Adoption:
    """What becomes of an args.yaml. Raises `Refused`, as for an unknown number of GPUs."""
    adoption = Adoption("timm's train.py", file, cls, values, known("timm_train"))
    _data_and_model(adoption)
    _schedule(adoption, _batch(adoption, gpus))
    _optimization(adoption)
    _augmentation(adoption)
    adoption.carry_each(SAME)
    adoption.carry_each(IF_SET, only_if_set=True)
    adoption.finish(facts("timm_train"))
    return adoption


def _data_and_model(adoption: Adoption) -> None:
    dataset, folder = str(adoption["dataset"] or ""), adoption["data_dir"] or adoption["data"]
    if dataset.startswith("hfds/"):
        adoption.carry("dataset", data=dataset.removeprefix("hfds/"))
        adoption.skip("data_dir data")
    elif dataset not in ("", "folder", "image_folder", "ImageFolder"):
        adoption.leave("dataset data_dir data", "this reader does not exist here; give a folder with --data")
    elif folder:
        adoption.carry("dataset data_dir data", data=str(folder))

    name = str(adoption["model"]).replace("hf_hub:", "hf-hub:")
    is_elsewhere = name.startswith(("hf-hub:", "local-dir:"))
    if not is_elsewhere and not timm.is_model(name.split("/")[-1].split(".")[0]):
        is_not = f"model {name:.100} is not one of timm {timm.__version__}"
        raise Refused(f"{adoption.file}: {is_not}: put another name there")
    adoption.carry("model", model=name)
    size, shape = adoption["img_size"], adoption["input_size"]
    if shape and (shape[0] != 3 or shape[1] != shape[2]):
        adoption.leave("input_size", "images here are RGB squares; choose --image_size")
    elif shape:
        size = size or shape[1]
    adoption.carry("img_size input_size", "" if size else "the model's own", image_size=size or 0)
    crop = adoption["crop_pct"]
    adoption.carry("crop_pct", "" if crop else "the model's own", crop_pct=crop or 0.0)


def _batch(adoption: Adoption, gpus: int) -> float:
    """Carry the batch size and the learning rate. Returns the peak rate."""
    adoption.gpus = gpus = gpus or int(adoption["world_size"] or 0)
    per_gpu, accumulated = int(adoption["batch_size"]), max(1, int(adoption["grad_accum_steps"] or 1))
    if not gpus:
        unknown = f"batch_size {per_gpu} is per GPU, and the file does not say how many there were"
        raise Refused(f"{adoption.file}: {unknown}: give --gpus N")
    batch, repeats = per_gpu * gpus * accumulated, int(adoption["aug_repeats"] or 0) or 1
    unit = math.lcm(repeats, 2 if adoption["mixup"] or adoption["cutmix"] or adoption["cutmix_minmax"] else 1)
    ours = max(unit, batch // unit * unit)
    note = f"{per_gpu} x {gpus} GPUs x {accumulated} accumulated"
    if ours != batch:
        note += f"; {batch:,} is no multiple of {unit}, for repeats and pairs that mix"
    sizes = {"global_batch_size": ours, "max_micro_batch_size": per_gpu}
    adoption.carry("batch_size grad_accum_steps world_size", note, **sizes)
    adoption.carry("aug_repeats", repeats=repeats)
    if adoption["sync_bn"] and accumulated > 1:
        reason = "--batch_norm global can't accumulate: raise --max_micro_batch_size with it; local is set"
        adoption.leave("sync_bn", reason)
    else:
        adoption.carry("sync_bn", batch_norm="global" if adoption["sync_bn"] else "local")
    if adoption["lr"] is not None:
        peak = float(adoption["lr"])
        adoption.carry("lr", lr=peak, lr_batch_size=batch, lr_scaling="none")
        adoption.skip("lr_base lr_base_size lr_base_scale")
        return peak
    is_adaptive = any(part in str(adoption["opt"]).lower() for part in ("ada", "lamb"))
    scale = adoption["lr_base_scale"] or ("sqrt" if is_adaptive else "linear")
    base, size = float(adoption["lr_base"]), int(adoption["lr_base_size"])
    adoption.carry("lr lr_base lr_base_size lr_base_scale", lr=base, lr_batch_size=size, lr_scaling=scale)
    return base * (math.sqrt(batch / size) if scale == "sqrt" else batch / size)


def _schedule(adoption: Adoption, peak: float) -> None:
    """Carry length, warm-up and schedule. With warmup_prefix timm warms up before the epochs that it counts."""
    sched, warmup = str(adoption["sched"] or "none"), float(adoption["warmup_epochs"] or 0)
    before = warmup if adoption["warmup_prefix"] else 0.0
    epochs = rounded(float(adoption["epochs"]) + before)
    adoption.carry("epochs warmup_prefix", f"{warmup:g} of them before the others" if before else "", epochs=epochs)
    if sched == "none":
        adoption.carry("sched warmup_epochs", "timm has no warm-up here", schedule="constant", warmup_epochs=0.0)
    else:
        adoption.carry_each("warmup_epochs")
        if warmup:
            adoption.leave("warmup_lr", "the warm-up rises from zero")
    if sched == "cosine" or (sched == "poly" and adoption["decay_rate"] == 1):
        late = "from the end of the warm-up; timm counts from step 0" if warmup and not before else ""
        adoption.carry("sched", late, schedule="cosine" if sched == "cosine" else "linear")
        lowest = float(adoption["min_lr"] or 0)
        ratio = rounded(min(1.0, lowest / peak)) if peak else 0.0
        adoption.carry("min_lr", f"{lowest:g} of the peak, {peak:g}", min_lr_ratio=ratio)
    elif sched in ("step", "multistep"):
        every = float(adoption["decay_epochs"] or 90)
        if sched == "multistep":
            early = 0 if adoption["sched_on_updates"] else 1  # timm compares milestones with the epoch that comes next
            at = [one - early for one in adoption["decay_milestones"]] or [epochs]
        else:
            at = [every * fall for fall in range(1, math.ceil((epochs - before) / every))] or [epochs]
        text = falls([before + epoch for epoch in at], 2 * epochs)
        if sched == "step" and not before:
            text = str(rounded(every))
        names = ["sched", "decay_epochs" if sched == "step" else "decay_milestones", "decay_rate"]
        adoption.carry(names, schedule="step", step_epochs=text, step_factor=adoption["decay_rate"])
    elif sched == "constant":
        adoption.carry("sched", schedule="constant")
    else:
        adoption.leave(
            "sched", "no schedule here: cosine, linear, step or constant; the preset has the default, cosine"
        )
    adoption.skip("decay_epochs decay_milestones decay_rate min_lr warmup_lr")
    if not adoption["sched_on_updates"]:
        adoption.leave("sched_on_updates", "the rate changes with every step, not every epoch")


def _optimization(adoption: Adoption) -> None:
    opt = str(adoption["opt"]).lower()
    if opt in timm.optim.list_optimizers(exclude_filters=["kron*", "adahessian"]):
        adoption.carry("opt", "SGD with Nesterov momentum" if opt == "sgd" else "", opt=opt)
    else:
        adoption.leave("opt", f"no optimizer of timm {timm.__version__} that fits here; choose --opt and its --lr")
    clip, mode = float(adoption["clip_grad"] or 0), adoption["clip_mode"]
    if clip and mode == "value":
        adoption.leave("clip_grad clip_mode", "single values are not clipped here; --clip 1 limits the gradient's norm")
    else:
        adoption.carry("clip_grad clip_mode", clip=clip, clip_mode=mode)
    if adoption["model_ema"]:
        adoption.carry("model_ema model_ema_decay", ema_decay=adoption["model_ema_decay"])
        if not adoption["model_ema_warmup"]:
            adoption.leave("model_ema_warmup", "the decay is always warmed up")
    half = {"bfloat16": "bf16"}.get(str(adoption["amp_dtype"]), "fp16")
    adoption.launch("amp amp_dtype", half if adoption["amp"] else "")
    if adoption["torchcompile"]:  # names a backend
        adoption.carry("torchcompile", compile=True)


def _augmentation(adoption: Adoption) -> None:
    if adoption["no_aug"]:
        flags = {"crop_scale": 1.0, "hflip": 0.0, "vflip": 0.0, "color_jitter": 0.0, "random_erasing": 0.0}
        adoption.carry("no_aug", "the ratio of crops still varies", **flags)
        adoption.skip("scale ratio hflip vflip color_jitter aa reprob")
    else:
        low, high = (adoption["scale"] or [0.08, 1.0])[:2]
        adoption.carry("scale", "" if high == 1 else f"the upper limit {high:g} is 1 here", crop_scale=low)
        adoption.carry_each("hflip vflip reprob:random_erasing")
        if adoption["aa"]:
            adoption.carry("aa", "timm, too, turns color_jitter off beside it", augment=str(adoption["aa"]))
            adoption.skip("color_jitter")
        else:
            adoption.carry("color_jitter", color_jitter=float(adoption["color_jitter"] or 0))
    if adoption["drop_connect"] and adoption["drop_path"] is None:
        adoption.carry("drop_connect", drop_path=adoption["drop_connect"])
    adoption.carry("bce_loss", loss="bce" if adoption["bce_loss"] else "ce")
    adoption.leave("train_interpolation", "the model's own interpolation is used")
    if (adoption["mixup"] or adoption["cutmix"]) and adoption["mixup_mode"] != "pair":
        adoption.leave("mixup_mode", "MixUp or CutMix and its strength are drawn per pair of neighbours")
    # What is still left of these is off, or as it is here.
    adoption.skip("sched_on_updates model_ema model_ema_decay model_ema_warmup drop_connect mixup_mode")
