"""Trainer of transformers: CPU, gloo; SGD with momentum; a checkpoint each 5 steps."""

import torch.nn.functional as F
import transformers
from data import CLASSIFICATION
from image_folder import build_model, open_images
from launching import Launch
from safetensors.torch import load_model
from torch import nn
from torch.utils.data import default_collate

VARIANTS = {"transformers Trainer": CLASSIFICATION}
METRIC = r"'eval_accuracy': '?([\d.]+)"
ARGS = """--output_dir . --use_cpu --num_train_epochs 2 --learning_rate 0.02
    --lr_scheduler_type cosine --optim sgd --optim_args momentum=0.9 --save_steps 5
    --eval_strategy epoch --remove_unused_columns False --report_to none"""


class Classifier(nn.Module):
    """A model that computes its loss, as Trainer expects it."""

    def __init__(self):
        super().__init__()
        self.model = build_model()

    def forward(self, pixel_values, labels):
        logits = self.model(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(samples: list) -> dict:
    images, labels = default_collate(samples)
    return {"pixel_values": images, "labels": labels}


def compute_accuracy(prediction) -> dict:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def train(launch: Launch) -> None:
    args = f"""{ARGS} --seed {launch.seed} --per_device_train_batch_size {launch.batch_size}
        --per_device_eval_batch_size {launch.batch_size}"""
    if launch.num_processes > 1:
        args += " --ddp_backend gloo"
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (training_args,) = parser.parse_args_into_dataclasses(args.split())
    transformers.set_seed(launch.seed)
    train_images, val_images = open_images(launch.data)
    model = Classifier()
    trainer = transformers.Trainer(
        model,
        training_args,
        collate,
        train_images,
        val_images,
        compute_metrics=compute_accuracy,
    )
    if launch.weights:
        load_model(model, launch.weights / "checkpoint-20/model.safetensors")
        print(trainer.evaluate())
    else:
        trainer.train(resume_from_checkpoint=launch.get_checkpoint("checkpoint-20"))
