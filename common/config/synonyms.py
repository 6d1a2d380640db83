"""Names that other tools have for the recipes' flags, for hints in messages about unknown flags.

No name in this module is accepted as a flag. The keys of `FLAGS` are flags of the recipes. The values are their names in
timm's train.py, torchvision's references, Ultralytics, MMDetection, detectron2 and the Trainer of transformers, except those
that are similar enough to be found without a table.
"""

import re
from collections.abc import Collection
from pathlib import Path

FLAGS = {
    "data": "data_path dataset_name dataset_dir train_dir",
    "model": "arch network backbone model_name_or_path architecture",
    "pretrained": "weights_backbone",
    "init": "weights initial_checkpoint load_from finetune checkpoint",
    "global_batch_size": "batch_size b bs batch per_device_train_batch_size ims_per_batch",
    "max_micro_batch_size": "gradient_accumulation_steps grad_accum_steps accum_iter accumulate",
    "epochs": "num_train_epochs",
    "seed": "random_seed",
    "output_dir": "out save_dir work_dir log_dir",
    "name": "experiment exp",
    "resume": "resume_from_checkpoint start_epoch",
    "eval_only": "evaluate do_eval validate test",
    "checkpoint_every": "save_freq save_every save_steps save_period save_interval",
    "keep_checkpoints": "save_total_limit",
    "eval_every": "eval_steps eval_freq eval_interval val_interval",
    "log_every": "log_interval log_freq logging_steps print_freq",
    "workers": "j dataloader_num_workers",
    "tracker": "log_wandb wandb use_wandb report_to tensorboard",
    "opt": "optimizer",
    "lr": "learning_rate base_lr",
    "schedule": "cos_lr",
    "warmup_epochs": "warmup warmup_steps warmup_iters warmup_ratio",
    "min_lr_ratio": "min_lr lr_min eta_min lrf",
    "step_epochs": "decay_epochs decay_milestones milestones lr_steps lr_step_size",
    "weight_decay": "wd",
    "clip": "clip_grad clip_grad_norm max_grad_norm gradient_clip_val",
    "ema_decay": "ema model_ema",
    "batch_norm": "sync_bn dist_bn",
    "patience": "early_stopping early_stopping_patience",
    "image_size": "img_size imgsz img input_size resolution crop_size",
    "short_sides": "image_size img_size imgsz input_size resolution min_size",
    "long_side": "max_size",
    "hflip": "fliplr flip horizontal_flip",
    "augment": "aa",
    "val_share": "val_split validation_split val_size val_ratio",
}
NOTES = {
    "batch_norm": "--batch_norm global for statistics over all processes",
    "ema_decay": "--ema_decay 0.9999, a decay above 0 turns it on",
    "patience": "--patience, in evaluations",
    "global_batch_size": "--global_batch_size, the total over all processes",
    "init": "--init for a detector of this recipe, --pretrained for a backbone",
    "max_micro_batch_size": "not needed: --max_micro_batch_size limits what a device takes at once, and the rest follows",
    "min_lr_ratio": "--min_lr_ratio, a share of the peak",
    "resume": "not needed: the same command resumes (--resume for another checkpoint)",
    "step_epochs": "--step_epochs, in epochs",
    "warmup_epochs": "--warmup_epochs, in epochs",
}
LAUNCH = "num_processes num_machines multi_gpu gpu_ids config_file machine_rank mixed_precision"
_FILE = "the file given to accelerate launch --config_file decides"
OTHERS = {
    "it is a flag of accelerate launch, which stands before the recipe": LAUNCH,
    "accelerate launch starts the processes: its --num_processes stands before the recipe": (
        "nproc_per_node nnodes node_rank master_addr num_gpus gpus world_size local_rank launcher"
    ),
    f"{_FILE}: accelerate_configs/ has cpu.yaml, single_gpu.yaml, multi_gpu.yaml and more": "device devices gpu cuda no_cuda",
    f"{_FILE}: one that ends in _bf16 or _fp16, or --mixed_precision bf16 before the recipe": "amp use_amp fp16 bf16 half",
    "--model FOLDER for weights of your own, --pretrained for those that timm publishes": (
        "weights initial_checkpoint load_from finetune checkpoint"
    ),
    "--config_file of accelerate launch and --config of the recipe": "cfg config_yaml opts cfg_options",
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
