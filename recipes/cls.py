"""Train an image classifier: the same run on one CPU, one GPU, many GPUs or many machines.

    accelerate launch --config_file accelerate_configs/multi_cpu.yaml recipes/cls.py \
        --config recipes/presets/digits.yaml
    accelerate launch --config_file accelerate_configs/multi_gpu_bf16.yaml recipes/cls.py \
        --data /data/flowers --config recipes/presets/finetune.yaml

The defaults are for photographs. How the global batch is spread over processes and micro-steps is
derived and changes nothing: losses and weights equal any other layout's. Kill it at any moment,
start the same command again on whatever hardware there is, and it resumes from the last complete
checkpoint. This file is meant to be copied and changed: `cp recipes/cls.py mine.py` runs as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from common.classification import (
    Augmentation,
    ColorJitter,
    EvalDataset,
    Evaluation,
    Mixing,
    Normalize,
    RandomErasing,
    TrainDataset,
    Transforms,
    class_weights,
    load_data,
)
from common.config import OptimizationConfig, RunConfig, option, parse, path_option
from common.distributed import all_or_none
from common.errors import Refused
from common.launching import run_main
from common.run import Run
from common.training import (
    build_classifier,
    build_optimizer,
    build_schedule,
    check_export,
    checkpoint_gradients,
    compile_model,
    prepare_layers,
    resolve_data_config,
    set_learning_rate,
)


@dataclass
class Config(OptimizationConfig, RunConfig):
    """Image classification with timm models. Defaults < --config file.yaml < flags."""

    data: str = path_option(
        "",
        heading="data",
        required="name your images, or train on digits: --config recipes/presets/digits.yaml",
        is_common=True,
    )
    """An image folder with one subfolder per class (or train/ and val/ of these), a CSV file of
    paths and labels, shards (tars of WebDataset; URLs of tars or Parquet), a Hugging Face data set
    (hub id or path), or digits, which scikit-learn has."""
    label_column: str = option("", reads_data=True)
    """Tables: column of the labels (default: found by its type), or several of 0 and 1, one per
    class: a,b,c."""
    streaming: bool = False
    """Hugging Face data sets: read their shards where they lie, without downloading them."""
    shard_memory: int = option(1024, low=1, high=2**24)
    """Shards at a URL: MiB of a machine's memory for neighbouring images, which are read together.
    With more of it they are shuffled better, so a resumed run keeps this value."""
    model: str = path_option("convnext_atto", heading="model", is_common=True)
    """A timm model, hf-hub:owner/name, or a local timm folder such as a run's best/."""
    pretrained: bool = option(False, is_weights=True, is_common=True)
    """Start from the weights that timm publishes for the model; a head for other classes is new."""
    image_size: int = option(0, low=0, high=8192, is_common=True)
    """Side of the square that the model sees, in pixels (0: the model's own)."""
    crop_pct: float = option(0.0, low=0, high=1)
    """Evaluation: share of the resized image that the centre crop keeps (0: the model's own)."""
    batch_norm: Literal["local", "group", "node", "global", "frozen"] = option(
        "local", is_common=True
    )
    """BatchNorm statistics over: each micro-batch (local), norm_batch_size samples (group), a
    machine (node), the whole batch (global); frozen: as loaded."""
    norm_batch_size: int = option(16, low=2)
    """batch_norm group: consecutive samples that share statistics."""
    drop: float = option(0.0, low=0, high=1)
    """Dropout before the head, drawn for each sample from its position: the same on every layout."""
    drop_path: float = option(0.0, low=0, high=1)
    """Stochastic depth, drawn per sample and layer."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    channels_last: bool = option(False, not_in_shards="weights in shards have no memory format")
    """Keep all channels of a pixel together in memory: faster on GPUs under fp16 and bf16."""
    compile: bool = False
    """torch.compile the model for training; evaluations run it uncompiled."""
    eval_only: str = path_option("", heading="evaluation", weights_field="model", is_common=True)
    """Only evaluate this checkpoint or this exported model; leaves a report."""

    # What defines a training. --help explains the fields without a text: all recipes have them.
    epochs: float = 10.0
    global_batch_size: int = 64
    opt: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    warmup_epochs: float = 1.0
    loss: Literal["ce", "bce"] = option("ce", heading="training")
    """Cross-entropy, or binary cross-entropy per class (multi-label data need it)."""
    label_smoothing: float = option(0.0, low=0, high=1)
    """Share of each target that is spread over all classes."""
    class_weights: Literal["none", "sqrt", "balanced"] = "none"
    """Weights of classes in the loss, scaled to mean 1 over the training samples: all alike, or by
    their frequency to the power -1/2 or -1."""
    sampling: Literal["natural", "sqrt", "balanced"] = "natural"
    """How often rare classes are drawn: as they are, with the root of their frequency, or as often
    as the others."""
    crop_scale: float = option(0.35, low=0, high=1, heading="augmentation")
    """Smallest area of a random crop, as a share of the image (ImageNet: 0.08)."""
    hflip: float = option(0.5, low=0, high=1, is_common=True)
    """Probability of a horizontal flip (digits and text: 0)."""
    vflip: float = option(0.0, low=0, high=1)
    """Probability of a vertical flip."""
    color_jitter: float = option(0.0, low=0, high=10)
    """Strength of brightness, contrast and saturation jitter."""
    augment: str = option("", is_common=True)
    """Policy in timm's notation: rand-m9-mstd0.5, augmix-m3-w3, original (AutoAugment); empty: none."""
    random_erasing: float = option(0.0, low=0, high=1)
    """Probability of random erasing: a rectangle is replaced by noise."""
    mixup: float = option(0.0, low=0, high=1000)
    """Alpha of MixUp (0: off)."""
    cutmix: float = option(0.0, low=0, high=1000)
    """Alpha of CutMix (0: off); with both MixUp and CutMix, each pair of images gets one of them
    with equal probability."""
    repeats: int = option(1, low=1)
    """Repeated augmentation: how many times each image occurs in its global batch."""


def build_data(config: Config, weights=None):
    """Training and validation images; of --eval_only, with its `weights`, both to evaluate."""
    train_data, val_data = load_data(config, weights)
    if train_data.multi_label and config.loss != "bce":
        raise Refused(
            f"--loss {config.loss}: {config.data} has several labels per image; take --loss bce"
        )
    return train_data, val_data


def build_model(config: Config, class_names: Sequence[str], device: torch.device):
    """The model: images [B, 3, H, W] -> logits [B, K]. Any nn.Module will do."""
    with all_or_none("building the model"):
        model = build_classifier(
            config.model,
            len(class_names),
            names=class_names,
            pretrained=config.pretrained,
            image_size=config.image_size,
            drop=config.drop,
            drop_path=config.drop_path,
            seed=config.seed,
        )
        check_export(config, model)
        if config.grad_checkpointing:
            checkpoint_gradients(model, config.model)
    prepare_layers(config, model)
    model.to(device, getattr(torch, config.dtype))
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.compile:
        compile_model(model)
    return model


def build_transforms(config: Config, model, device: torch.device) -> Transforms:
    """What happens to a batch on the device: augmentation in training, only normalisation in evaluations."""
    data_config = resolve_data_config(model, config.image_size, config.crop_pct)
    dtype = getattr(torch, config.dtype)
    size = data_config["input_size"][1:]
    normalize = Normalize(data_config, dtype, device, config.channels_last)
    augmentations: list[Augmentation] = []  # your own is one more line here
    if config.color_jitter:
        augmentations.append(ColorJitter(config.seed, config.color_jitter))
    augmentations.append(normalize)
    if config.random_erasing:
        augmentations.append(RandomErasing(config.seed, config.random_erasing, size, dtype, device))
    if config.mixup or config.cutmix:
        augmentations.append(Mixing(config.seed, config.mixup, config.cutmix, size))
    return Transforms(data_config, normalize, augmentations, compiled=config.compile)


def build_targets(config: Config, data):
    """encode(labels int64[B], or bool[B, K]) -> smoothed targets [B, K]."""
    dtype = getattr(torch, config.dtype)
    num_classes = len(data.classes)
    uniform = 0.5 if data.multi_label else 1 / num_classes

    def encode(labels):
        targets = labels if data.multi_label else F.one_hot(labels, num_classes)
        return targets.to(dtype) * (1 - config.label_smoothing) + uniform * config.label_smoothing

    return encode


def build_loss(config: Config, data, device: torch.device):
    """losses(logits [B, K], targets [B, K]) -> [B]: one loss per sample, not their mean."""
    dtype = getattr(torch, config.dtype)
    by_class = class_weights(config.class_weights, data.labels, len(data.classes))  # [K], or None
    weights = torch.as_tensor(1.0 if by_class is None else by_class).to(device, dtype)

    def losses(logits, targets):
        logits = logits.to(targets.dtype)  # out of half precision
        if config.loss == "bce":
            by_logit = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
            return (by_logit * weights).mean(1)
        return -(targets * weights * logits.log_softmax(1)).sum(1)

    return torch.compile(losses, dynamic=False) if config.compile else losses


def predict(model, batch):
    """The forward pass of evaluations, and of tools: logits [B, K]."""
    return model(batch.images)


@torch.no_grad()
def evaluate(model, batches, data):
    """Results over every image of `data` once, whatever the layout."""
    evaluation = Evaluation(data, batches.device)
    for batch in batches:  # this rank's share of the images, on the device and normalised
        with batches.autocast():
            logits = predict(model, batch)  # [B, K]
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
        encode = build_targets(config, train_data)
        loss_fn = build_loss(config, train_data, run.device)
        optimizer = build_optimizer(config, model)
        schedule = build_schedule(config, train_set.stream)

        def compute_losses(network, batch):
            """The forward pass of training, and of the trial before it: one loss per sample, [B]."""
            targets = encode(batch.labels)
            images, targets = transforms.augment(batch, targets)  # [B, 3, H, W], [B, K]
            with run.autocast():
                logits = network(images)  # [B, K]
            return loss_fn(logits, targets)

        # Finds the micro-batch that fits into memory, wraps the model and resumes.
        network, optimizer = run.prepare(
            model, optimizer, schedule, train_set, val_set, compute_losses
        )

        for step in run.steps():
            set_learning_rate(optimizer, schedule(step))
            for batch in run.micro_batches():  # this rank's share, on the device
                losses = compute_losses(network, batch)  # [B]: one loss per sample
                run.backward(losses)  # gradients are sent with the last micro-batch
            grad_norm = run.clip_gradients(config.clip, config.clip_mode)
            optimizer.step()
            optimizer.zero_grad()
            run.end_step(grad_norm)

            if run.should_evaluate():
                default_metric = "f1" if val_data.multi_label else "top1"
                run.evaluate(evaluate, config.best_metric or default_metric)
            if run.should_save():
                run.save()


if __name__ == "__main__":
    run_main(main)
