"""Accelerate's examples/complete_cv_example.py."""

import sys
from functools import partial
from types import ModuleType

import accelerate
from accelerate.utils import DataLoaderConfiguration
from image_folder import build_model
from launching import Launch

EXAMPLE = "accelerate, complete_cv_example.py"
VARIANTS = {EXAMPLE: 20, "accelerate, with use_seedable_sampler and set_epoch": 20}
VERSION = accelerate.__version__
METRIC = r"epoch \d+: ([\d.]+)"
CHANGES = "CPU; test_vit at 32 pixels, all layers trained, learning rate 3e-3; steps saved"


def create_model(*_args, **_kwargs):
    """For timm's: small, not pretrained. The example trains the classifier only: here all of it."""
    model = build_model()
    model.get_classifier = lambda: model
    return model


def train(launch: Launch) -> None:
    path = launch.checkouts / "accelerate/examples/complete_cv_example.py"
    source = path.read_text()
    example = ModuleType("example")
    if launch.variant == EXAMPLE:
        exec(source, vars(example))
    else:
        numbered = "train_dataloader.set_epoch(epoch); model.train()"
        exec(source.replace("model.train()", numbered), vars(example))
        seeded = partial(DataLoaderConfiguration, use_seedable_sampler=True)
        example.DataLoaderConfiguration = seeded
    example.create_model = create_model
    config = {"lr": 3e-3, "num_epochs": 2, "image_size": 32}
    config |= {"batch_size": launch.batch_size, "seed": launch.seed}
    start_training = example.training_function
    example.training_function = lambda _, args: start_training(config, args)
    args = f"example --data_dir {launch.data}/flat --cpu"
    if launch.resume:
        args += " --resume_from_checkpoint step_20"
    if launch.weights:
        args += f" --resume_from_checkpoint {launch.weights}/step_15"
    sys.argv = f"{args} --checkpointing_steps 5".split()
    example.main()
