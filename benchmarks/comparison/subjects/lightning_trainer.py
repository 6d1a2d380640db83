"""Trainer of Lightning."""

import lightning
import torch.nn.functional as F
from image_folder import build_model, open_images
from launching import Launch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD
from torch.utils.data import DataLoader

VARIANTS = {"Lightning": 20}
VERSION = lightning.__version__
METRIC = r"val_accuracy\D*([\d.]+)"
CHANGES = "CPU, gloo; a checkpoint each 5 steps"


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build_model()

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        is_correct = self.model(images).argmax(1) == labels
        self.log("val_accuracy", is_correct.float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return SGD(self.parameters(), lr=0.02, momentum=0.9)


def train(launch: Launch) -> None:
    lightning.seed_everything(launch.seed, workers=True)
    train_images, val_images = open_images(launch.data)
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=launch.num_processes,
        max_epochs=2,
        deterministic=True,
        callbacks=[ModelCheckpoint(".", filename="{step}", every_n_train_steps=5, save_top_k=-1)],
    )
    val_loader = DataLoader(val_images, launch.batch_size)
    if launch.weights:
        checkpoint = launch.weights / "step=30.ckpt"
        trainer.validate(model, val_loader, ckpt_path=checkpoint, weights_only=False)
        return
    train_loader = DataLoader(train_images, launch.batch_size, shuffle=True)
    checkpoint = "step=20.ckpt" if launch.resume else None
    trainer.fit(model, train_loader, val_loader, ckpt_path=checkpoint, weights_only=False)
