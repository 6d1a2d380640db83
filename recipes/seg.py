"""Train a model for semantic segmentation: the same run on one CPU, one GPU, many GPUs or many machines.

    accelerate launch --config_file accelerate_configs/multi_cpu.yaml recipes/seg.py \
        --config recipes/presets/seg_digits.yaml
    accelerate launch --config_file accelerate_configs/multi_gpu_bf16.yaml recipes/seg.py \
        --data /data/ADEChallengeData2016 --config recipes/presets/ade20k_r50_fpn.yaml

The defaults are for photographs. How the global batch is spread over processes and micro-steps is
derived and changes nothing: losses and weights equal any other layout's. Kill it at any moment,
start the same command again on whatever hardware there is, and it resumes from the last complete
checkpoint. This file is meant to be copied and changed: `cp recipes/seg.py mine.py` runs as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from common.config import OptimizationConfig, RunConfig, option, parse, path_option
from common.distributed import all_or_none
from common.launching import run_main
from common.run import Run
from common.segmentation import (
    CropAugmentation,
    EvalDataset,
    Evaluation,
    TrainDataset,
    Transforms,
    build_loss,
    build_segmenter,
    load_data,
)
from common.training import build_optimizer, build_schedule, prepare_layers, set_learning_rate


@dataclass
class Config(OptimizationConfig, RunConfig):
    """Semantic segmentation on timm backbones. Defaults < --config file.yaml < flags."""

    data: str = path_option(
        "",
        heading="data",
        required="name your images, or train on digits: --config recipes/presets/seg_digits.yaml",
        is_common=True,
    )
    """A folder with images/ and masks/ (or annotations/) of class ids, with train/ and val/ or
    without; a Pascal VOC, ADE20K, Cityscapes or COCO folder; a Hugging Face data set, Parquet or
    CSV with a column of images and one of masks; or digits: scenes of them."""
    ignore_zero: bool = option(False, reads_data=True, is_common=True)
    """Masks: 0 means no label, and 1 is the first class, as in ADE20K. 255 means no label, too; where
    it is a class, 65535."""
    mask_column: str = option("", is_new=True, reads_data=True)
    """Tables: column of the masks (default: the one of images named mask, label, annotation, seg or gt)."""
    class_names: str = path_option("", is_new=True, reads_data=True)
    """Tables: a file with the names of the classes, one per line in the order of the ids, or JSON
    (default: classes.txt or classes.json beside the table)."""
    model: str = path_option("convnext_atto", heading="model", is_common=True)
    """Backbone: a timm model, hf-hub:owner/name, or a local timm folder."""
    pretrained: bool = option(False, is_weights=True, is_common=True)
    """Start from the backbone's weights that timm publishes."""
    decoder: Literal["fpn", "linear"] = option("fpn", is_common=True)
    """Semantic FPN (Kirillov et al., 2019), or one convolution of 1 x 1 over the deepest features."""
    width: int = option(256, low=32, high=4096)
    """fpn: channels of the feature pyramid."""
    batch_norm: Literal["local", "group", "node", "global", "frozen"] = option(
        "local", is_common=True
    )
    """BatchNorm statistics over: each micro-batch (local), norm_batch_size samples (group), a
    machine (node), the whole batch (global); frozen: as loaded."""
    norm_batch_size: int = option(4, low=2)
    """batch_norm group: consecutive samples that share statistics."""
    drop_path: float = option(0.0, low=0, high=1)
    """Stochastic depth in the backbone, drawn per sample and layer."""
    compile: bool = option(False, not_in_shards="in shards, no segmenter has been compiled yet")
    """torch.compile the backbone."""
    eval_short_side: int = option(0, low=0, high=8192, heading="evaluation")
    """Evaluation: resize images to this short side for the model (0: as they are). Predictions are
    compared at the size of the image."""
    eval_only: str = path_option("", is_common=True)
    """Only evaluate this checkpoint or this run's best/, and print the results."""

    # What defines a training. --help explains the fields without a text: all recipes have them.
    epochs: float = 30.0
    global_batch_size: int = 16
    opt: str = "adamw"
    lr: float = 2e-4
    lr_batch_size: int = 16
    weight_decay: float = 0.05
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    warmup_epochs: float = 1.0
    class_weights: Literal["none", "sqrt", "balanced"] = option("none", heading="training")
    """Weights of classes in the loss, scaled to mean 1 over the training pixels: all alike, or by
    their frequency to the power -1/2 or -1. Reads all masks at the start."""
    label_smoothing: float = option(0.0, low=0, high=1)
    """Share of each target that is spread over all classes."""
    crop_size: int = option(512, low=16, high=8192, heading="augmentation", is_common=True)
    """Side of the random crop in pixels; smaller images are padded, which counts nothing."""
    short_side: int = option(0, low=0, high=8192)
    """Short side to which images are resized before they are scaled (ADE20K: 512; 0: as they are)."""
    min_scale: float = option(0.5, low=0.01, high=100)
    """Smallest factor of random scaling."""
    max_scale: float = option(2.0, low=0.01, high=100)
    """Largest factor of random scaling."""
    hflip: float = option(0.5, low=0, high=1, is_common=True)
    """Probability of a left-right mirror image (digits and text: 0)."""
    photometric: float = option(0.0, low=0, high=1)
    """Probability of each of several distortions of brightness, contrast and colour."""


def build_data(config: Config, weights=None):
    """Training and validation images; of --eval_only, with its `weights`, both to evaluate."""
    return load_data(config, weights)


def build_model(config: Config, class_names: Sequence[str], device: torch.device):
    """The model: images [B, 3, H, W] -> logits [B, K, H / 4, W / 4]."""
    with all_or_none("building the model"):
        model = build_segmenter(
            config.model,
            len(class_names),
            decoder=config.decoder,
            width=config.width,
            pretrained=config.pretrained,
            drop_path=config.drop_path,
            seed=config.seed,
        )
    prepare_layers(config, model)
    if config.compile:
        model.backbone.compile()
    return model.to(device, getattr(torch, config.dtype))


def build_transforms(config: Config, model, device: torch.device) -> Transforms:
    """What happens to images: scaled and cropped in training, whole in evaluations, normalised in both."""
    augment = CropAugmentation(
        config.seed,
        crop_size=config.crop_size,
        short_side=config.short_side,
        min_scale=config.min_scale,
        max_scale=config.max_scale,
        hflip=config.hflip,
        photometric=config.photometric,
    )
    dtype = getattr(torch, config.dtype)
    return Transforms(model, augment, config.eval_short_side, dtype, device)


def predict(model, batch):
    """The forward pass of evaluations, and of tools: logits [B, K, h, w] of the canvas."""
    return model(batch.images)


@torch.no_grad()
def evaluate(model, batches, data):
    """IoU and accuracy over every pixel of `data` once, whatever the layout."""
    evaluation = Evaluation(data, batches.device)
    for batch in batches:  # this rank's share: whole images, on the device and normalised
        with batches.autocast():
            logits = predict(model, batch)  # [B, K, h, w]
        evaluation.update(batch, logits)
    return evaluation  # or a dict of results over all ranks, without pictures


def main() -> None:
    config = parse(Config)
    with Run(config) as run:  # joins the other ranks, claims runs/<name>/, handles signals
        train_data, val_data = build_data(config, run.weights)
        model = build_model(config, train_data.classes, run.device)
        transforms = build_transforms(config, model, run.device)
        val_set = EvalDataset(val_data, transforms)
        if config.eval_only:
            return run.evaluate_only(model, val_set, evaluate)

        train_set = TrainDataset.from_config(config, train_data, model, transforms)
        loss_fn = build_loss(config, train_data, run.device)
        optimizer = build_optimizer(config, model)
        schedule = build_schedule(config, train_set.stream)

        def compute_losses(network, batch):
            """The forward pass of training, and of the trial before it: one loss per image, [B]."""
            images = transforms.normalize(batch)
            with run.autocast():
                logits = network(images)  # [B, K, h, w]
            return loss_fn(logits, batch)

        # Finds the micro-batch that fits into memory, wraps the model and resumes.
        network, optimizer = run.prepare(
            model, optimizer, schedule, train_set, val_set, compute_losses
        )

        for step in run.steps():
            set_learning_rate(optimizer, schedule(step))
            for batch in run.micro_batches():  # this rank's share, on the device
                losses = compute_losses(network, batch)  # [B]: one loss per image
                run.backward(losses)  # gradients are sent with the last micro-batch
            grad_norm = run.clip_gradients(config.clip, config.clip_mode)
            optimizer.step()
            optimizer.zero_grad()
            run.end_step(grad_norm)

            if run.should_evaluate():
                run.evaluate(evaluate, config.best_metric or "mIoU")
            if run.should_save():
                run.save()


if __name__ == "__main__":
    run_main(main)
