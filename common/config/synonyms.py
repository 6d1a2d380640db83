"""Names that other tools have for the recipes' flags, for hints in messages about unknown flags.

No name in this module is accepted as a flag. The keys of `FLAGS` are flags of the recipes. The values are their names in
timm's train.py, torchvision's references, Ultralytics, MMDetection, detectron2 and the Trainer of transformers.
"""

import re
from collections.abc import Collection
from pathlib import Path

FLAGS = {
    "data": "data_dir data_path data_root dataset dataset_name dataset_dir train_dir train_data_dir coco_path root",
    "model": "arch a net network backbone model_name model_name_or_path architecture",
    "pretrained": "weights_backbone pretrained_backbone use_pretrained",
    "init": "weights initial_checkpoint load_from finetune checkpoint",
    "global_batch_size": (
        "batch_size b bs batch train_batch_size per_device_train_batch_size ims_per_batch samples_per_gpu batch_per_gpu"
    ),
    "max_micro_batch_size": "gradient_accumulation_steps grad_accum_steps accum_iter accumulate micro_batch_size",
    "epochs": "num_epochs n_epochs num_train_epochs max_epochs total_epochs",
    "max_steps": "steps num_steps iterations max_iter max_iters total_steps max_train_steps",
    "seed": "random_seed manual_seed",
    "output_dir": "output out outdir save_dir work_dir log_dir output_path",
    "name": "experiment exp exp_name run_name experiment_name",
    "resume": "resume_from resume_from_checkpoint auto_resume start_epoch",
    "eval_only": "evaluate eval do_eval test_only val_only validate test",
    "checkpoint_every": "save_freq save_every save_steps save_period save_interval checkpoint_interval recovery_interval",
    "keep_checkpoints": "checkpoint_hist save_total_limit max_keep_ckpts",
    "eval_every": "eval_steps eval_freq eval_interval val_interval val_freq",
    "log_every": "log_interval log_freq logging_steps print_freq",
    "workers": "j num_workers n_workers dataloader_num_workers workers_per_gpu",
    "tracker": "log_wandb wandb use_wandb report_to tensorboard logger",
    "project": "wandb_project project_name",
    "profile": "profiler",
    "dry_run": "fast_dev_run",
    "opt": "optim optimizer optimizer_name optimizer_type",
    "lr": "learning_rate lr0 lr_base base_lr blr",
    "schedule": "sched scheduler lr_scheduler lr_scheduler_type lr_schedule lr_policy cos_lr",
    "warmup_epochs": "warmup lr_warmup_epochs warmup_steps warmup_iters warmup_ratio num_warmup_steps lr_warmup_steps",
    "min_lr_ratio": "min_lr lr_min eta_min lrf",
    "step_epochs": "decay_epochs decay_milestones milestones lr_steps lr_step_size step_size",
    "step_factor": "decay_rate gamma lr_gamma",
    "weight_decay": "wd",
    "layer_decay": "llrd",
    "backbone_lr_factor": "lr_backbone backbone_lr",
    "clip": "clip_grad clip_grad_norm grad_clip max_grad_norm gradient_clip_val gradient_clip_norm",
    "ema_decay": "ema model_ema model_ema_decay use_ema",
    "drop": "dropout drop_rate",
    "drop_path": "drop_path_rate stochastic_depth dpr",
    "batch_norm": "sync_bn syncbn sync_batchnorm sync_batch_norm dist_bn bn",
    "freeze_stages": (
        "freeze freeze_at frozen_stages freeze_backbone freeze_layers freeze_encoder linear_probe trainable_backbone_layers"
    ),
    "patience": "early_stopping early_stop early_stopping_patience",
    "max_hours": "time max_time time_limit",
    "grad_checkpointing": "gradient_checkpointing activation_checkpointing use_checkpoint",
    "compile": "torchcompile torch_compile",
    "image_size": "img_size imgsz img input_size resolution crop_size val_crop_size",
    "image_sizes": "multi_scale multiscale img_sizes train_crop_size train_sizes",
    "short_sides": "image_size img_size imgsz img input_size resolution min_size min_size_train",
    "long_side": "max_size max_size_train",
    "sync_short_sides": "multi_scale multiscale batch_sync_resize batch_random_resize",
    "eval_short_side": "min_size_test",
    "crop_scale": "scale",
    "hflip": "fliplr flip horizontal_flip random_flip",
    "vflip": "flipud vertical_flip",
    "color_jitter": "cj colorjitter colour_jitter",
    "augment": "aa auto_augment autoaugment randaugment augmentation policy",
    "random_erasing": "reprob random_erase re_prob erasing",
    "label_smoothing": "smoothing label_smoothing_factor",
    "mixup": "mixup_alpha mix_up",
    "cutmix": "cutmix_alpha",
    "copy_paste": "copypaste use_copypaste simple_copy_paste copy_paste_mode",
    "rotate": "degrees rotation max_rotate_degree random_rotation",
    "translate": "max_translate_ratio translation shift",
    "repeats": "aug_repeats ra_reps ra_sampler repeated_aug",
    "loss": "criterion bce_loss",
    "class_weights": "class_weight cls_weights",
    "val_share": "val_split validation_split train_val_split val_size val_ratio test_size",
    "image_column": "image_column_name",
    "label_column": "label_column_name",
}
NOTES = {
    "batch_norm": "--batch_norm global for statistics over all processes",
    "drop": "--drop, a share of the features before the head",
    "ema_decay": "--ema_decay 0.9999, a decay above 0 turns it on",
    "freeze_stages": "--freeze_stages: 1 is the stem and the first stage, all is all but the head",
    "max_hours": "--max_hours, in hours of training",
    "patience": "--patience, in evaluations",
    "global_batch_size": "--global_batch_size, the total over all processes",
    "init": "--init for a detector of this recipe, --pretrained for a backbone",
    "max_micro_batch_size": "not needed: --max_micro_batch_size limits what a device takes at once, and the rest follows",
    "min_lr_ratio": "--min_lr_ratio, a share of the peak",
    "resume": "not needed: the same command resumes (--resume for another checkpoint)",
    "step_epochs": "--step_epochs, in epochs",
    "tracker": "--tracker, one of wandb, tensorboard, trackio, none",
    "warmup_epochs": "--warmup_epochs, in epochs",
}
LAUNCH = (
    "num_processes num_machines multi_gpu gpu_ids config_file main_process_ip main_process_port machine_rank mixed_precision "
    "cpu max_restarts rdzv_backend rdzv_conf num_cpu_threads_per_process dynamo_backend use_fsdp use_deepspeed quiet"
)
_FILE = "the file given to accelerate launch --config_file decides"
OTHERS = {
    "it is a flag of accelerate launch, which stands before the recipe": LAUNCH,
    "accelerate launch starts the processes: its --num_processes stands before the recipe": (
        "nproc_per_node nnodes node_rank master_addr master_port num_gpus ngpus gpus world_size local_rank rank distributed "
        "dist_url dist_backend multiprocessing_distributed launcher"
    ),
    f"{_FILE}: accelerate_configs/ has cpu.yaml, single_gpu.yaml, multi_gpu.yaml and more": (
        "device devices gpu cuda no_cuda accelerator strategy"
    ),
    f"{_FILE}: one that ends in _bf16 or _fp16, or --mixed_precision bf16 before the recipe": (
        "amp use_amp no_amp amp_dtype fp16 bf16 half precision native_amp"
    ),
    "--model FOLDER for weights of your own, --pretrained for those that timm publishes": (
        "weights initial_checkpoint load_from finetune checkpoint"
    ),
    "--config_file of accelerate launch and --config of the recipe": "cfg config_yaml c hyp opts cfg_options",
}


def hint(name: str, flags: Collection[str], recipe: Path) -> str:
    """A hint about the unknown flag `name` for a recipe with these `flags`; "" if there is none.

    hint("wd", ["lr", "weight_decay"], Path("recipes/cls.py")) -> "; here it is --weight_decay"
    """
    name = name.lower().replace("-", "_")
    for flag, names in FLAGS.items():
        if name in names.split() and flag in flags:
            note = NOTES.get(flag, f"--{flag}")
            return f"; {note}" if note.startswith("not needed") else f"; here it is {note}"
    for text, names in OTHERS.items():
        if name in names.split():
            return f"; {text}"
    owner = "" if name in flags else other_recipe(name, recipe)
    return f"; it is a flag of {owner}" if owner else ""


def other_recipe(name: str, recipe: Path) -> str:
    """The recipe beside the file `recipe` whose configuration has a field of that name; "" if none has."""
    for file in sorted(recipe.parent.glob("*.py")) if name.isidentifier() else ():
        text = "" if file.name == recipe.name else file.read_text(errors="replace")
        if "\nclass Config(" in text and re.search(rf"^    {name}: ", text, re.MULTILINE):
            return f"{file.absolute().parent.name}/{file.name}"
    return ""
