"""Reader of the args.yaml that timm's train.py writes; becomes a preset of recipes/cls.py."""

import math
from pathlib import Path

import timm

from common.errors import Refused
from recipes import cls
from tools.adopt.adoption import Adoption, facts, rounded

TOOL = "timm's train.py"
SAME = {  # same meaning, another name
    "pretrained": "pretrained",
    "channels_last": "channels_last",
    "grad_checkpointing": "grad_checkpointing",
    "momentum": "momentum",
    "weight_decay": "weight_decay",
    "epochs": "epochs",
    "warmup_epochs": "warmup_epochs",
    "mixup": "mixup",
    "cutmix": "cutmix",
    "smoothing": "label_smoothing",
    "reprob": "random_erasing",
    "drop": "drop",
    "seed": "seed",
}
IF_CHANGED = {"log_interval": "log_every", "checkpoint_hist": "keep_checkpoints"}
IF_SET = {
    "layer_decay": "layer_decay",
    "input_key": "image_column",
    "target_key": "label_column",
    "drop_path": "drop_path",
}
NOT_CARRIED = {  # only where they differ from timm's defaults
    "train_split": "the training part of --data is used; give --data a folder with the wanted part as train/",
    "train_num_samples val_num_samples": "streams are not read; download the data, and give the folder with --data",
    "dataset_trust_remote_code": "no data set's code is executed",
    "input_img_mode": "images are read as RGB",
    "pretrained_path initial_checkpoint": "give a timm folder (config.json and model.safetensors) with --model FOLDER",
    "pretrained_cfg_overlay": "change it in config.json of a timm folder, and give that with --model FOLDER",
    "gp model_kwargs bn_momentum bn_eps drop_block head_init_scale head_init_bias fast_norm": (
        "the model is timm's own; pass it to timm.create_model in build_model of a copy of the recipe"
    ),
    "in_chans": "models see RGB",
    "mean std interpolation": "the model's own are used; change them in build_model of a copy of the recipe",
    "torchscript fuser": "--compile is the compiler here",
    "torchcompile_mode": "torch's default mode is used",
    "model_dtype": "weights stay in float32; half precision comes from the file given to accelerate launch",
    "opt_eps opt_betas opt_kwargs layer_decay_min_scale layer_decay_no_opt_scale": (
        "the optimizer's own defaults are used; pass it to create_optimizer_v2 in a copy of common/training/optimizer.py"
    ),
    "lr_noise lr_noise_pct lr_noise_std lr_cycle_mul lr_cycle_decay lr_cycle_limit lr_k_decay": (
        "schedules here have no noise and no cycles; change Schedule in a copy"
    ),
    "epoch_repeats": "an epoch is one pass; multiply --epochs",
    "cooldown_epochs": "the schedule ends with the run: these epochs at the lowest rate are left out",
    "stop_epoch": "--max_steps ends a run earlier, but also shortens its schedule",
    "train_crop_mode": "crops are random resized crops",
    "ratio": "the ratio of crops is drawn from 3/4 to 4/3",
    "color_jitter_prob grayscale_prob gaussian_blur_prob": "add an augmentation in build_augmentation of a copy",
    "aug_splits jsd_loss resplit split_bn": "augmentation splits and their loss do not exist here",
    "bce_sum bce_target_thresh bce_pos_weight": "change build_loss in a copy of the recipe",
    "loss loss_pos_weight loss_class_weight loss_weight_power class_stats poly_gamma poly_epsilon": (
        "losses are ce and bce, with --class_weights balanced; another one is build_loss of a copy"
    ),
    "remode recount": "one rectangle of noise per pixel is drawn",
    "cutmix_minmax mixup_prob mixup_switch_prob mixup_off_epoch": (
        "mixing is on for all steps and pairs, and MixUp and CutMix share them equally"
    ),
    "train_size_schedule": "give the side with --image_size",
    "naflex_loader naflex_train_seq_lens naflex_max_seq_len naflex_patch_sizes naflex_patch_size_probs naflex_loss_scale": (
        "variable sequence lengths do not exist here; all images become squares of --image_size"
    ),
    "kd_model_name kd_distill_type kd_loss_type distill_loss_weight task_loss_weight kd_temperature kd_student_feature_dim "
    "kd_teacher_feature_dim kd_token_distill_type": "distillation does not exist here; add the teacher in losses_of of a copy",
    "eval_metric": "best/ is the one with the highest top1 (multi-label: mAP)",
    "tta": "evaluation shows each image once",
    "save_epochs": "--checkpoint_every, in steps; all but the newest --keep_checkpoints are deleted",
}
NO_EFFECT = {
    "dataset_download": "a Hugging Face data set is downloaded at the first start",
    "class_map num_classes": "the data give the classes",
    "target_format task": "the data say whether images have several labels",
    "resume no_resume_opt start_epoch": "the same command resumes",
    "validation_batch_size": "results don't depend on it",
    "device device_modules local_rank no_ddp_bb synchronize_step": "accelerate launch places the processes",
    "patience_epochs": "belongs to --sched plateau",
    "lr_base_scale": "only with lr_base",
    "dist_bn": "running statistics always come from all processes",
    "worker_seeding": "each draw is a function of the seed and the sample's position",
    "workers pin_mem no_prefetcher use_multi_epochs_loader": "--workers uses all cores unless it is given",
    "output experiment": "name the run with --output_dir and --name",
    "save_images": "the start shows what is fed: --dry_run",
    "wandb_tags wandb_resume_id": "the run folder keeps the dashboard's run",
    "sweep_locks sweep_attempt": "belongs to timm's sweep.py",
    "model_ema_force_cpu": "the average is kept on the device",
}


def known() -> dict:
    """timm's arguments with their defaults."""
    listed = facts("timm_train")
    return listed["arguments"] | listed["newer"]


def read(values: dict, file: Path, gpus: int = 0, images: int = 0) -> Adoption:
    """What becomes of an args.yaml. Raises `Refused` if nothing says on how many GPUs `batch_size` was used."""
    adoption = Adoption(TOOL, file, cls, values, known())
    _data_and_model(adoption)
    batch, peak = _batch(adoption, gpus)
    _optimization(adoption, batch, peak, images)
    _augmentation(adoption)
    for theirs, ours in SAME.items():
        if theirs not in adoption.mentioned:
            adoption.carry(theirs, **{ours: adoption[theirs]})
    for theirs, ours in (IF_SET | IF_CHANGED).items():
        if adoption.changed(theirs) and adoption[theirs] not in (None, ""):
            adoption.carry(theirs, **{ours: adoption[theirs]})
        else:
            adoption.skip(theirs, "not set")
    adoption.finish(NOT_CARRIED, NO_EFFECT)
    return adoption


def _data_and_model(adoption: Adoption) -> None:
    dataset, folder = str(adoption["dataset"] or ""), adoption["data_dir"] or adoption["data"]
    if dataset.startswith("hfds/"):
        adoption.carry("dataset", data=dataset.removeprefix("hfds/"))
        adoption.skip("data_dir data".split(), "the cache of Hugging Face is used")
    elif dataset and dataset not in ("folder", "image_folder", "ImageFolder"):
        adoption.leave("dataset data_dir data".split(), "this reader does not exist here; give a folder with --data")
    elif folder:
        adoption.carry(["dataset", "data_dir", "data"], data=str(folder))
    else:
        adoption.skip("dataset data_dir data".split(), "give --data")
    if adoption.changed("val_split"):
        adoption.carry("val_split", split=str(adoption["val_split"]))
    else:
        adoption.skip("val_split", "the validation part of --data is used")

    name = str(adoption["model"])
    where_from = name.startswith(("hf-hub:", "hf_hub:", "local-dir:"))
    if not where_from and not timm.is_model(name.split("/")[-1].split(".")[0]):
        raise Refused(
            f"{adoption.file}: model {name:.100} is not one of timm {timm.__version__}: put another name there"
        )
    adoption.carry("model", model=name.replace("hf_hub:", "hf-hub:"))
    size, shape = adoption["img_size"], adoption["input_size"]
    if not size and shape and len(shape) == 3 and shape[0] == 3 and shape[1] == shape[2]:
        size = shape[1]
    if shape and (shape[0] != 3 or shape[1] != shape[2]):
        adoption.leave("input_size", "images here are RGB squares; choose --image_size")
    adoption.carry(["img_size", "input_size"], "" if size else "the model's own", image_size=size or 0)
    crop = adoption["crop_pct"]
    adoption.carry("crop_pct", "" if crop else "the model's own", crop_pct=crop or 0.0)


def _batch(adoption: Adoption, gpus: int) -> tuple[int, float]:
    """Carry the batch size and the learning rate. Returns the global batch size and the peak rate."""
    gpus = gpus or int(adoption["world_size"] or 0)
    if not gpus:
        raise Refused(
            f"{adoption.file}: batch_size {adoption['batch_size']} is per GPU, and the file does not say how many there were: "
            "give --gpus N"
        )
    adoption.gpus = gpus
    per_gpu, accumulated = int(adoption["batch_size"]), max(1, int(adoption["grad_accum_steps"] or 1))
    batch, repeats = per_gpu * gpus * accumulated, int(adoption["aug_repeats"] or 0) or 1
    unit = math.lcm(repeats, 2 if adoption["mixup"] or adoption["cutmix"] or adoption["cutmix_minmax"] else 1)
    ours = max(unit, batch // unit * unit)
    note = f"{per_gpu} x {gpus} GPUs x {accumulated} accumulated" + (
        f"; {batch:,} is no multiple of {unit}, for repeats and pairs that mix" if ours != batch else ""
    )
    adoption.carry(
        ["batch_size", "grad_accum_steps", "world_size"], note, global_batch_size=ours, max_micro_batch_size=per_gpu
    )
    adoption.carry("aug_repeats", repeats=repeats)
    if adoption["lr"] is not None:
        adoption.carry("lr", lr=float(adoption["lr"]), lr_batch_size=batch, lr_scaling="none")
        adoption.skip(["lr_base", "lr_base_size", "lr_base_scale"], "lr is given")
        return batch, float(adoption["lr"])
    adaptive = any(part in str(adoption["opt"]).lower() for part in ("ada", "lamb"))
    scale = adoption["lr_base_scale"] or ("sqrt" if adaptive else "linear")
    base, size = float(adoption["lr_base"]), int(adoption["lr_base_size"])
    adoption.carry(["lr", "lr_base", "lr_base_size", "lr_base_scale"], lr=base, lr_batch_size=size, lr_scaling=scale)
    return batch, base * (math.sqrt(batch / size) if scale == "sqrt" else batch / size)


def _optimization(adoption: Adoption, batch: int, peak: float, images: int) -> None:
    opt = str(adoption["opt"]).lower()
    if opt in timm.optim.list_optimizers(exclude_filters=["kron*", "adahessian"]):
        adoption.carry("opt", "SGD with Nesterov momentum" if opt == "sgd" else "", opt=opt)
    else:
        adoption.leave("opt", f"no optimizer of timm {timm.__version__} that fits here; choose --opt and its --lr")
    clip, mode = adoption["clip_grad"], adoption["clip_mode"]
    if clip and mode == "value":
        adoption.leave(
            ["clip_grad", "clip_mode"], "single values are not clipped here; --clip 1 limits the gradient's norm"
        )
    else:
        adoption.carry(["clip_grad", "clip_mode"], clip=float(clip or 0), clip_mode=mode)
    sched = str(adoption["sched"] or "none")
    if sched == "cosine":
        adoption.carry("sched", schedule="cosine")
    elif sched in ("step", "multistep"):
        drops = adoption["decay_epochs"] if sched == "step" else adoption["decay_milestones"]
        drops = ",".join(map(str, drops)) if isinstance(drops, list) else str(rounded(float(drops)))
        named = ["sched", "decay_epochs" if sched == "step" else "decay_milestones", "decay_rate"]
        adoption.carry(named, schedule="step", step_epochs=drops, step_factor=adoption["decay_rate"])
    elif sched == "none":
        adoption.carry("sched", schedule="constant")
    elif sched == "poly" and adoption["decay_rate"] == 1:
        adoption.carry(["sched", "decay_rate"], schedule="linear")
    else:
        adoption.leave(
            "sched", "no schedule here: cosine, linear, step or constant; the preset leaves the default, cosine"
        )
    if sched in ("cosine", "poly"):
        least = float(adoption["min_lr"] or 0)
        note = f"{least:g} of the peak, {peak:g}"
        adoption.carry("min_lr", note, min_lr_ratio=rounded(min(1.0, least / peak)) if peak else 0.0)
    adoption.skip(["decay_epochs", "decay_milestones", "decay_rate", "min_lr"], f"not used by sched {sched}")
    if not adoption["sched_on_updates"]:
        adoption.leave("sched_on_updates", "the rate changes with every step, not every epoch")
    adoption.skip("sched_on_updates", "the rate changes with every step")
    if adoption["warmup_epochs"]:
        adoption.leave("warmup_lr", "the warm-up rises from zero")
        if sched == "cosine":
            adoption.leave("warmup_prefix", "the cosine begins after the warm-up and ends with the run")
    adoption.skip(["warmup_lr", "warmup_prefix"], "without effect on this schedule")
    if not adoption["model_ema"]:
        adoption.skip("model_ema model_ema_decay model_ema_warmup".split(), "no moving average")
    else:
        adoption.carry(["model_ema", "model_ema_decay"], ema_decay=adoption["model_ema_decay"])
        if not adoption["model_ema_warmup"]:
            adoption.leave("model_ema_warmup", "the decay is always warmed up")
        adoption.skip("model_ema_warmup", "always on")
    precision = {"bfloat16": "bf16"}.get(str(adoption["amp_dtype"]), "fp16") if adoption["amp"] else ""
    adoption.launch(["amp", "amp_dtype"], precision)
    if adoption["sync_bn"] and int(adoption["grad_accum_steps"] or 1) > 1:
        adoption.leave(
            "sync_bn", "--batch_norm global can't accumulate: raise --max_micro_batch_size with it; local is set"
        )
    else:
        adoption.carry("sync_bn", batch_norm="global" if adoption["sync_bn"] else "local")
    if adoption["torchcompile"]:
        adoption.carry("torchcompile", compile=True)
    adoption.skip("torchcompile", "not compiled")
    accumulated, between = int(adoption["grad_accum_steps"] or 1), int(adoption["val_interval"] or 1)
    if adoption["recovery_interval"]:
        adoption.carry("recovery_interval", checkpoint_every=max(1, int(adoption["recovery_interval"]) // accumulated))
    if between > 1 and images:
        adoption.carry("val_interval", eval_every=math.ceil(between * images / batch))
    elif between > 1:
        adoption.leave("val_interval", "--eval_every counts steps: give --images N, the number of training images")
    adoption.skip(["recovery_interval", "val_interval"], "every epoch")
    if adoption["log_wandb"]:
        adoption.carry("log_wandb", tracker="wandb")
    adoption.skip("log_wandb", "wandb without a key runs offline")
    if adoption["wandb_project"]:
        adoption.carry("wandb_project", project=str(adoption["wandb_project"]))
    adoption.skip("wandb_project", "not set")


def _augmentation(adoption: Adoption) -> None:
    if adoption["no_aug"]:
        adoption.carry(
            "no_aug", "the ratio of crops still varies", crop_scale=1.0, hflip=0.0, vflip=0.0, color_jitter=0.0
        )
        adoption.skip("scale ratio hflip vflip color_jitter aa reprob".split(), "no_aug turns it off")
    else:
        low, high = (adoption["scale"] or [0.08, 1.0])[:2]
        adoption.carry("scale", "" if high == 1 else f"the upper limit {high:g} is 1 here", crop_scale=low)
        for name in ("hflip", "vflip"):
            adoption.carry(name, **{name: adoption[name]})
        if adoption["aa"]:
            adoption.carry("aa", augment=str(adoption["aa"]))
            adoption.skip("color_jitter", "timm itself turns it off beside aa")
        else:
            adoption.carry("color_jitter", color_jitter=float(adoption["color_jitter"] or 0))
        adoption.skip(["no_aug", "aa"], "not set")
    if adoption["drop_connect"] and adoption["drop_path"] is None:
        adoption.carry("drop_connect", drop_path=adoption["drop_connect"])
    adoption.skip("drop_connect", "deprecated: drop_path")
    adoption.carry("bce_loss", loss="bce" if adoption["bce_loss"] else "ce")
    adoption.leave("train_interpolation", "the model's own interpolation is used")
    if (adoption["mixup"] or adoption["cutmix"]) and adoption["mixup_mode"] != "pair":
        adoption.leave("mixup_mode", "MixUp or CutMix and its strength are drawn per pair of neighbours")
    adoption.skip("mixup_mode", "no mixing")
