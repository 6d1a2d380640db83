"""Accelerate's complete_cv_example.py: CPU; test_vit at 32 pixels, all layers trained; steps saved."""

from data import CLASSIFICATION
from launching import CHECKOUTS, Launch, run_script

SEEDED = "accelerate, with use_seedable_sampler and set_epoch"
VARIANTS = {"accelerate, complete_cv_example.py": CLASSIFICATION, SEEDED: CLASSIFICATION}
METRIC = r"epoch \d+: ([\d.]+)"
CHANGES = {
    'create_model("resnet50d", pretrained=True, ': 'create_model("test_vit", img_size=32, ',
    "model.get_classifier().parameters()": "model.parameters()",
    '"lr": 3e-2, "num_epochs": 3': '"lr": 3e-3, "num_epochs": 2',
    '"image_size": 224': '"image_size": 32',
}
SEEDING = {
    "model.train()": "train_dataloader.set_epoch(epoch); model.train()",
    "DataLoaderConfiguration(": "DataLoaderConfiguration(use_seedable_sampler=True, ",
}


def train(launch: Launch) -> None:
    sizes = f'"seed": {launch.seed}, "batch_size": {launch.batch_size}'
    changes = CHANGES | {'"seed": 42, "batch_size": 64': sizes}
    if launch.variant == SEEDED:
        changes |= SEEDING
    args = f"--data_dir {launch.data}/flat --cpu --checkpointing_steps 5"
    checkpoint = launch.get_checkpoint("step_20")
    if checkpoint:
        args += f" --resume_from_checkpoint {checkpoint}"
    run_script(CHECKOUTS / "accelerate/examples/complete_cv_example.py", args, changes)
