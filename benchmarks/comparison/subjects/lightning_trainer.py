"""Trainer of Lightning, and AutoTimm's, which is one: CPU, gloo; a checkpoint each 5 steps.

AutoTimm: test_vit at 32 pixels, neither pretrained nor compiled; no search for a learning rate;
"light" augmentation, as all have. It prints the loss of the images that the first process evaluates.
"""

import pytorch_lightning as pl
import torch.nn.functional as F
from autotimm import AutoTrainer, BackboneConfig, ImageClassifier, ImageDataModule
from data import CLASSIFICATION
from image_folder import build_model, build_optimizer, open_images
from launching import Launch

VARIANTS = {"Lightning": CLASSIFICATION, "AutoTimm": CLASSIFICATION}
METRIC = r"val/loss\D*([\d.]+)"


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build_model()

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, index):
        self.log("val/loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self):
        return build_optimizer(self)


def train(launch: Launch) -> None:
    pl.seed_everything(launch.seed, workers=True)
    saving = pl.callbacks.ModelCheckpoint(
        ".", filename="{step}", every_n_train_steps=5, save_top_k=-1
    )
    options = {"accelerator": "cpu", "devices": launch.num_processes, "max_epochs": 2}
    options |= {"callbacks": [saving], "deterministic": True}
    if launch.variant == "AutoTimm":
        data = ImageDataModule(
            launch.data, image_size=32, batch_size=launch.batch_size, augmentation_preset="light"
        )
        backbone = BackboneConfig("test_vit", pretrained=False, extra_kwargs={"img_size": 32})
        model = ImageClassifier(backbone, num_classes=10, compile_model=False)
        trainer = AutoTrainer(tuner_config=False, **options)
    else:
        images = open_images(launch.data)
        data = pl.LightningDataModule.from_datasets(*images, batch_size=launch.batch_size)
        model = Classifier()
        trainer = pl.Trainer(**options)
    checkpoint = launch.get_checkpoint("step=20.ckpt")
    if launch.weights:
        data.setup("fit")  # AutoTimm's has no images for "validate"
        trainer.validate(model, data.val_dataloader(), ckpt_path=checkpoint)
    else:
        trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
