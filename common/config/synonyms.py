"""Names that other tools have for the recipes' flags, for hints in messages about unknown flags.

No name in this module is accepted as a flag. They are from timm, torchvision, Ultralytics,
MMDetection, detectron2 and transformers. Names that are similar to ours are found without a table.
"""

import re
from collections.abc import Collection
from pathlib import Path

# The hint, which begins with a flag that the recipe must have -> names in other tools.
HINTS = {
    "--data": "data_path dataset_name dataset_dir train_dir",
    "--model": "arch network backbone model_name_or_path architecture",
    "--init for a detector, --pretrained for a backbone": (
        "weights initial_checkpoint load_from finetune checkpoint"
    ),
    "--pretrained for weights that timm publishes, --model FOLDER for your own": (
        "weights initial_checkpoint load_from finetune checkpoint weights_backbone"
    ),
    "--global_batch_size, the total over all processes": (
        "batch_size b bs batch per_device_train_batch_size ims_per_batch"
    ),
    "--max_micro_batch_size, which limits what a device takes at once; the rest follows": (
        "gradient_accumulation_steps grad_accum_steps accum_iter accumulate"
    ),
    "--epochs": "num_train_epochs",
    "--seed": "random_seed",
    "--output_dir": "out save_dir work_dir log_dir",
    "--name": "experiment exp",
    "--resume, which is not needed: the same command resumes": "resume_from_checkpoint start_epoch",
    "--eval_only": "evaluate do_eval validate test",
    "--checkpoint_every": "save_freq save_every save_steps save_period save_interval",
    "--keep_checkpoints": "save_total_limit",
    "--eval_every": "eval_steps eval_freq eval_interval val_interval",
    "--log_every": "log_interval log_freq logging_steps print_freq",
    "--workers": "j dataloader_num_workers",
    "--tracker": "log_wandb wandb use_wandb report_to tensorboard",
    "--opt": "optimizer",
    "--lr": "learning_rate base_lr",
    "--schedule": "cos_lr",
    "--warmup_epochs, in epochs": "warmup warmup_steps warmup_iters warmup_ratio",
    "--min_lr_ratio, a share of the peak": "min_lr lr_min eta_min lrf",
    "--step_epochs, in epochs": "decay_epochs decay_milestones milestones lr_steps lr_step_size",
    "--weight_decay": "wd",
    "--clip": "clip_grad clip_grad_norm max_grad_norm gradient_clip_val",
    "--ema_decay 0.9999, a decay above 0 turns it on": "ema model_ema",
    "--batch_norm global for statistics over all processes": "sync_bn dist_bn",
    "--patience, in evaluations": "early_stopping early_stopping_patience",
    "--image_size": "img_size imgsz img input_size resolution crop_size",
    "--short_sides": "image_size img_size imgsz img input_size resolution min_size",
    "--long_side": "max_size",
    "--hflip": "fliplr flip horizontal_flip",
    "--augment": "aa",
    "--val_share": "val_split validation_split val_size val_ratio",
    "--config": "cfg config_yaml opts cfg_options",
}
LAUNCHER_HINTS = {
    "a flag of accelerate launch, before the recipe": (
        "num_processes num_machines multi_gpu gpu_ids config_file machine_rank mixed_precision"
    ),
    "--num_processes of accelerate launch, before the recipe": (
        "nproc_per_node nnodes node_rank master_addr num_gpus gpus world_size local_rank launcher"
    ),
    "--config_file of accelerate launch, such as accelerate_configs/single_gpu.yaml": (
        "device devices gpu cuda no_cuda"
    ),
    "--mixed_precision bf16 of accelerate launch, before the recipe": "amp use_amp fp16 bf16 half",
}


def suggest_flag(name: str, flags: Collection[str], recipe: Path) -> str:
    """A hint about the unknown flag `name` for a recipe with these `flags`; "" if there is none.

    suggest_flag("wd", ["lr", "weight_decay"], Path("recipes/cls.py")) -> "; here it is --weight_decay"
    """
    name = name.lower().replace("-", "_")
    for text, synonyms in HINTS.items():
        flag = re.split(r"\W+", text)[1]
        if (flag in flags or flag == "config") and name in synonyms.split():
            return f"; here it is {text}"
    for text, synonyms in LAUNCHER_HINTS.items():
        if name in synonyms.split():
            return f"; here it is {text}"
    if not name.isidentifier() or name in flags:
        return ""
    for file in sorted(recipe.parent.glob("*.py")):
        if file.name != recipe.name and _has_flag(file, name):
            return f"; it is a flag of {file.absolute().parent.name}/{file.name}"
    return ""


def _has_flag(recipe: Path, name: str) -> bool:
    """True if the file is a recipe whose configuration has the field `name`."""
    text = recipe.read_text(errors="replace")
    if "\nclass Config(" not in text:
        return False
    return bool(re.search(rf"^    {name}: ", text, re.MULTILINE))
