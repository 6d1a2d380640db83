"""Train an image classifier: the same run on one CPU, one GPU, many GPUs or many machines.

    accelerate launch --config_file accelerate_configs/multi_cpu.yaml recipes/cls.py --config recipes/presets/digits.yaml
    accelerate launch --config_file accelerate_configs/multi_gpu_bf16.yaml recipes/cls.py --data /data/flowers \
        --config recipes/presets/finetune.yaml

The defaults are for photographs. How the global batch is spread over processes and micro-steps is derived and changes
nothing: losses and weights equal any other layout's. Kill it at any moment, start the same command again on whatever
hardware there is, and it resumes from the last complete checkpoint.
This file is meant to be copied and changed: `cp recipes/cls.py mine.py` runs as it is.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from common.classification import (
    Augmentation,
    ColorJitter,
    Evaluation,
    EvaluationSamples,
    Mixing,
    Normalize,
    RandomErasing,
    TrainingSamples,
    class_weights,
    plots,
    sample_weights,
    sources,
)
from common.config import OptimizationConfig, RunConfig, option, parse, path_option
from common.data import Stream
from common.distributed import all_or_none
from common.errors import Refused
from common.launching import launch
from common.run import Run, eval_only
from common.training import (
    build_optimizer,
    build_schedule,
    prepare_layers,
    set_learning_rate,
    timm_models,
)


@dataclass
class Config(OptimizationConfig, RunConfig):
    """Image classification with timm models. Defaults < --config file.yaml < flags."""

    data: str = path_option(
        "", heading="data", required="name your images, or train on digits: --config recipes/presets/digits.yaml"
    )
    """An image folder with one subfolder per class (or train/ and val/ of these), a CSV file of paths and labels, shards (tars
    of WebDataset; URLs of tars or Parquet), a Hugging Face data set (hub id or path), or digits, which scikit-learn has."""
    label_column: str = ""
    """Tables: column of the labels (default: found by its type), or several of 0 and 1, one per class: a,b,c."""
    streaming: bool = False
    """Hugging Face data sets: read their shards where they lie, without downloading them."""
    shard_memory: int = option(1024, low=1, high=2**24)
    """Shards at a URL: MiB of a machine's memory for neighbouring images, which are read together. With more of it they are
    shuffled better, so a resumed run keeps this value."""
    model: str = path_option("convnext_atto", heading="model")
    """A timm model, hf-hub:owner/name, or a local timm folder such as a run's best/."""
    pretrained: bool = False
    """Start from the weights that timm publishes for the model; a head for other classes is new."""
    image_size: int = option(0, low=0, high=8192)
    """Side of the square that the model sees, in pixels (0: the model's own)."""
    crop_pct: float = option(0.0, low=0, high=1)
    """Evaluation: share of the resized image that the centre crop keeps (0: the model's own)."""
    batch_norm: Literal["local", "group", "node", "global", "frozen"] = "local"
    """BatchNorm statistics over: each micro-batch (local), norm_batch_size samples (group), a machine (node), the whole batch
    (global); frozen: as loaded."""
    norm_batch_size: int = option(16, low=2)
    """batch_norm group: consecutive samples that share statistics."""
    drop: float = option(0.0, low=0, high=1)
    """Dropout before the head, drawn for each sample from its position: the same on every layout."""
    drop_path: float = option(0.0, low=0, high=1)
    """Stochastic depth, drawn per sample and layer."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    channels_last: bool = False
    """Keep all channels of a pixel together in memory: faster on GPUs under fp16 and bf16."""
    compile: bool = False
    """torch.compile the model for training; evaluations run it uncompiled."""
    eval_only: str = path_option("", heading="evaluation")
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
    """Weights of classes in the loss, scaled to mean 1 over the training samples: all alike, or by their frequency to the power
    -1/2 or -1."""
    sampling: Literal["natural", "sqrt", "balanced"] = "natural"
    """How often rare classes are drawn: as they are, with the root of their frequency, or as often as the others."""
    crop_scale: float = option(0.35, low=0, high=1, heading="augmentation")
    """Smallest area of a random crop, as a share of the image (ImageNet: 0.08)."""
    hflip: float = option(0.5, low=0, high=1)
    """Probability of a horizontal flip (digits and text: 0)."""
    vflip: float = option(0.0, low=0, high=1)
    """Probability of a vertical flip."""
    color_jitter: float = option(0.0, low=0, high=10)
    """Strength of brightness, contrast and saturation jitter."""
    augment: str = ""
    """Policy in timm's notation: rand-m9-mstd0.5, augmix-m3-w3, original (AutoAugment); empty: none."""
    random_erasing: float = option(0.0, low=0, high=1)
    """Probability of random erasing: a rectangle is replaced by noise."""
    mixup: float = option(0.0, low=0, high=1000)
    """Alpha of MixUp (0: off)."""
    cutmix: float = option(0.0, low=0, high=1000)
    """Alpha of CutMix (0: off); with both MixUp and CutMix, each pair of images gets one of them with equal probability."""
    repeats: int = option(1, low=1)
    """Repeated augmentation: how many times each image occurs in its global batch."""


def build_data(config: Config, weights=None):
    """Training and validation images; with the `weights` of --eval_only, both are the images to evaluate these on."""
    train, val = sources.load(sources.Spec.of(config, weights))
    if train.multi_label and config.loss != "bce":
        raise Refused(f"--loss {config.loss}: {config.data} has several labels per image; take --loss bce")
    return train, val


def build_model(config: Config, classes: Sequence[str], device: torch.device):
    """The model (any nn.Module will do), and the size and normalisation of its images."""
    with all_or_none("building the model"):
        model = timm_models.build_classifier(
            config.model,
            len(classes),
            names=classes,
            pretrained=config.pretrained,
            image_size=config.image_size,
            drop=config.drop,
            drop_path=config.drop_path,
            seed=config.seed,
        )
        data_config = timm_models.data_config(model, config.image_size, config.crop_pct)
        if not config.eval_only:
            timm_models.check_export(model, data_config)
        if config.grad_checkpointing:
            timm_models.checkpoint_gradients(model, config.model)
    prepare_layers(config, model)
    model.to(device, getattr(torch, config.dtype))
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.compile:
        torch._dynamo.config.recompile_limit = 256  # also where each block is compiled apart
        model.compile(dynamic=False)  # a graph for each size of micro-batches: at most two
    return model, data_config


def build_augmentation(config: Config, train: sources.Source, data_config: dict, device: torch.device):
    """The augmentations in order; augment(batch) -> images [B, 3, H, W] and targets [B, K] after them; normalize(images)."""
    dtype, size, classes = getattr(torch, config.dtype), data_config["input_size"][1:], len(train.classes)
    normalize = Normalize(data_config, dtype, device, config.channels_last)
    uniform = 0.5 if train.multi_label else 1 / classes
    augmentations: list[Augmentation] = []  # your own is one more line here
    if config.color_jitter:
        augmentations.append(ColorJitter(config.seed, config.color_jitter))
    augmentations.append(normalize)
    if config.random_erasing:
        augmentations.append(RandomErasing(config.seed, config.random_erasing, size, dtype, device))
    if config.mixup or config.cutmix:
        augmentations.append(Mixing(config.seed, config.mixup, config.cutmix, size))

    def augment(batch):
        targets = batch.labels if train.multi_label else F.one_hot(batch.labels, classes)
        targets = targets.to(dtype) * (1 - config.label_smoothing) + uniform * config.label_smoothing
        images = batch.images if augmentations[0] is normalize else batch.images.to(dtype)
        for augmentation, draws in zip(augmentations, batch.draws, strict=True):
            images, targets = augmentation.apply(images, targets, draws)
        return images, targets

    return augmentations, torch.compile(augment, dynamic=False) if config.compile else augment, normalize


def build_loss(config: Config, train: sources.Source, device: torch.device):
    """losses(logits [B, K], targets [B, K]) -> [B]: one loss per sample (reduction="none"), not averaged over the batch."""
    found = class_weights(config.class_weights, train.labels, len(train.classes))
    weights = torch.as_tensor(1.0 if found is None else found).to(device, getattr(torch, config.dtype))

    def losses(logits, targets):
        logits = logits.to(targets.dtype)  # out of half precision
        if config.loss == "bce":
            return (F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * weights).mean(1)
        return -(targets * weights * logits.log_softmax(1)).sum(1)

    return torch.compile(losses, dynamic=False) if config.compile else losses


def build_samples(
    config: Config, train: sources.Source, val: sources.Source, model, data_config: dict, augmentations: list
):
    """Samples to train on, by position in the run, and samples to evaluate."""
    weights = sample_weights(config.sampling, train.labels, len(train.classes))
    stream = Stream.of(config, len(train), weights, blocks=train.blocks)
    samples = TrainingSamples.of(config, train, stream, model, data_config, augmentations)
    return samples, EvaluationSamples(val, data_config)


def build_evaluation(config: Config, origin, data: sources.Source, classes: Sequence[str], device: torch.device):
    """What `--eval_only` evaluates, with its weights, normalize(images), and the loader of `data`; also for tools/."""
    config = dataclasses.replace(config, model=eval_only.model_of(config, origin), pretrained=False)
    model, data_config = build_model(config, classes, device)
    eval_only.load_weights(model, origin)
    *_, normalize = build_augmentation(config, data, data_config, device)
    loader = eval_only.loader(config, EvaluationSamples(data, data_config))
    return model, normalize, loader


@torch.no_grad()
def predict(model, loader, accelerator, normalize):
    """Each batch of this rank's share of a loader, on the device, with its logits [B, K]."""
    model.eval()
    for batch in loader:
        batch = batch.to(accelerator.device)
        with accelerator.autocast():
            logits = model(normalize(batch.images))
        yield batch, logits


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # as it will be used; sizes of an evaluation would need graphs of their own
def evaluate(model, loader, accelerator, normalize, val, thorough=False):
    """Results over every validation image once, whatever the layout, and the counts behind them."""
    found = Evaluation(val, accelerator.device, thorough)
    for batch, logits in predict(model, loader, accelerator, normalize):
        found.update(batch, logits)
    results = found.results()
    model.train()
    return results, found


def evaluate_only(config: Config) -> None:
    """Print the results of an exported model or of a checkpoint (of its moving average, where it has one); write a report."""
    accelerator, origin = eval_only.begin(config)
    val, names, places = eval_only.read(config, origin, build_data)
    model, normalize, loader = build_evaluation(config, origin, val, names, accelerator.device)
    model, matched = eval_only.match(model, val, names, places)
    results, found = evaluate(model, loader, accelerator, normalize, matched, thorough=True)
    eval_only.report(config, origin, val, results, found.details(), partial(draw, val=matched, found=found))


def draw(run: Run, val: sources.Source, found: Evaluation) -> None:
    """Pictures of the newest evaluation."""
    if found.counts.confusion is not None:
        run.draw("confusion", plots.confusion, found.counts.confusion, val.classes)
    if found.mistakes:
        run.draw("mistakes", plots.mistakes, val, found.mistakes)
    if found.calibration:
        run.draw("reliability", plots.reliability, found.calibration)


def main() -> None:
    config = parse(Config)
    if config.eval_only:
        return evaluate_only(config)

    with Run(config) as run:  # joins the other ranks, claims runs/<name>/, handles signals
        accelerator = run.accelerator  # Accelerate's, for the device and autocast
        train, val = build_data(config)
        model, data_config = build_model(config, train.classes, accelerator.device)
        augmentations, augment, normalize = build_augmentation(config, train, data_config, accelerator.device)
        loss_fn = build_loss(config, train, accelerator.device)
        samples, evaluated = build_samples(config, train, val, model, data_config, augmentations)
        optimizer, schedule = build_optimizer(config, model), build_schedule(config, samples.stream)

        def losses_of(network, batch):
            """The forward pass, in the trial of the micro-batch, in DDP's warm-up and in training: one loss per sample, [B]."""
            images, targets = augment(batch)
            with accelerator.autocast():
                logits = network(images)  # [B, K]
            return loss_fn(logits, targets)

        # Finds the micro-batch that fits into memory, wraps the model, prints the start table, resumes.
        network, optimizer = run.prepare(model, optimizer, schedule, samples, evaluated, losses_of)
        validate = partial(evaluate, accelerator=accelerator, normalize=normalize, val=val)

        for step in run.steps():
            set_learning_rate(optimizer, schedule(step))
            for batch in run.micro_batches():  # this rank's share of the global batch, on the device
                losses = losses_of(network, batch)  # [B]: one loss per sample
                run.backward(losses)  # gradients are sent with the last micro-batch
            grad_norm = run.clip_gradients(config.clip, config.clip_mode)
            optimizer.step()
            optimizer.zero_grad()
            run.end_step(grad_norm)

            if run.should_evaluate():
                (found,) = run.evaluate(validate, leading="f1" if val.multi_label else "top1")
                if run.should_draw():
                    draw(run, val, found)
            if run.should_save():
                run.save()


if __name__ == "__main__":
    launch.run(main)
