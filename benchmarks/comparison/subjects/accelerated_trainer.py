"""Trainer of pytorch-accelerated."""

from importlib.metadata import version

import torch
from accelerate.utils import set_seed
from image_folder import build_model, open_images
from launching import Launch
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from pytorch_accelerated.trainer import Trainer
from torch import nn
from torch.optim import SGD

VARIANTS = {"pytorch-accelerated": 20}
VERSION = version("pytorch-accelerated")
METRIC = r"\[([\d.]+)\]"
CHANGES = "CPU, gloo; SGD with momentum; a state each 5 steps"


def train(launch: Launch) -> None:
    set_seed(launch.seed)
    train_images, val_images = open_images(launch.data)
    model = build_model()
    if launch.weights:
        model.load_state_dict(torch.load(launch.weights / "final.pt"))
    trainer = Trainer(
        model=model,
        loss_func=nn.CrossEntropyLoss(),
        optimizer=SGD(model.parameters(), lr=0.02, momentum=0.9),
        callbacks=[SaveTrainingStateCallback(save_dir="states", save_every_n_steps=5)],
    )
    if launch.weights:
        trainer.evaluate(val_images, launch.batch_size)
        print(trainer.run_history.get_metric_values("evaluation_loss"))
        return
    trainer.train(
        train_images,
        num_epochs=2,
        eval_dataset=val_images,
        per_device_batch_size=launch.batch_size,
        resume_from="states/step_20" if launch.resume else None,
    )
    torch.save(trainer.get_model().state_dict(), "final.pt")
