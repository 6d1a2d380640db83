"""Trainer of pytorch-accelerated: CPU, gloo; SGD with momentum; a state each 5 steps."""

from accelerate.utils import set_seed
from data import CLASSIFICATION
from image_folder import build_model, build_optimizer, open_images
from launching import Launch
from pytorch_accelerated.callbacks import SaveTrainingStateCallback
from pytorch_accelerated.trainer import Trainer
from safetensors.torch import load_model
from torch import nn

VARIANTS = {"pytorch-accelerated": CLASSIFICATION}
SAVED_AT = {"pytorch-accelerated": 20}
METRIC = r"\[([\d.]+)\]"


def train(launch: Launch) -> None:
    set_seed(launch.seed)
    train_images, val_images = open_images(launch.data)
    model = build_model()
    saving = SaveTrainingStateCallback(save_dir="states", save_every_n_steps=5)
    trainer = Trainer(model, nn.CrossEntropyLoss(), build_optimizer(model), callbacks=[saving])
    if launch.weights:
        load_model(model, launch.weights / "states/step_20/model.safetensors")
        trainer.evaluate(val_images, launch.batch_size)
        print(trainer.run_history.get_metric_values("evaluation_loss"))
    else:
        trainer.train(
            train_images,
            num_epochs=2,
            eval_dataset=val_images,
            per_device_batch_size=launch.batch_size,
            resume_from=launch.get_checkpoint("states/step_20"),
        )
