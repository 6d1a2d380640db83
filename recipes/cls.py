"""Train an image classifier: the same run on one CPU, one GPU, many GPUs or many machines.

    accelerate launch --config_file accelerate_configs/multi_cpu.yaml recipes/cls.py --config recipes/presets/digits.yaml
    accelerate launch --config_file accelerate_configs/multi_gpu_bf16.yaml recipes/cls.py --data /data/flowers \
        --config recipes/presets/finetune.yaml

The defaults train on the handwritten digits that scikit-learn ships. How the global batch is spread over processes and
micro-steps is derived and changes nothing: losses and weights are those of any other layout. Kill it at any moment, start
the same command again on whatever hardware there is, and it resumes from the last complete checkpoint.
This file is meant to be copied and changed: `cp recipes/cls.py mine.py` runs as it is.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from common.classification import plots, sources, suspects
from common.classification.augmentation import Normalize
from common.classification.balancing import class_weights, sample_weights
from common.classification.batches import EvaluationSamples, TrainingSamples
from common.classification.color_jitter import ColorJitter
from common.classification.evaluation import Evaluation
from common.classification.image_sizes import step_sizes
from common.classification.mixing import Mixing
from common.classification.random_erasing import RandomErasing
from common.classification.transforms import evaluation_transform, training_transform
from common.config.fields import AugmentationConfig, OptimizationConfig, ReadingConfig, RunConfig, option, path_option
from common.config.parsing import parse
from common.data.batch_plan import BatchPlan
from common.data.cache import open_cache
from common.data.data_rows import data_rows
from common.data.loader import evaluation_loader
from common.data.source import looked_at
from common.data.stream import Stream
from common.distributed.collectives import all_or_none, world_size
from common.errors import Refused
from common.launching import launch
from common.run import eval_only
from common.run.run import Run
from common.training import batch_norm, defaults, drop_path, timm_models
from common.training.freezing import freeze
from common.training.optimizer import Schedule, build_ema, build_optimizer, set_learning_rate


@dataclass
class Config(AugmentationConfig, ReadingConfig, OptimizationConfig, RunConfig):
    """Image classification with timm models. Defaults < --config file.yaml < flags."""

    data: str = path_option("digits")
    """digits, an image folder with one subfolder per class (or train/ and val/ of these), a CSV file of paths and labels, or
    a Hugging Face data set: hub id or path."""
    model: str = path_option("test_resnet", photographs="convnext_atto")
    """A timm model, hf-hub:owner/name, or a local timm folder such as a run's best/ (photographs: convnext_atto)."""
    pretrained: bool = False
    """Start from the weights that timm publishes for the model; a head for other classes is new."""
    image_size: int = option(32, low=0, high=8192, photographs=0)
    """Side of the square that the model sees, in pixels (0 and photographs: the model's own)."""
    image_sizes: str = option("")
    """Multi-scale training: sides such as 160,192,224, one of which is drawn for each step; evaluations keep --image_size.
    --compile makes graphs for each."""
    crop_pct: float = option(1.0, low=0, high=1, photographs=0.0)
    """Evaluation: share of the resized image that the centre crop keeps (0 and photographs: the model's own)."""
    label_column: str = ""
    """Tables: column of the labels (default: found by its type), or several of 0 and 1, one per class: a,b,c."""
    loss: Literal["ce", "bce"] = "ce"
    """Cross-entropy, or binary cross-entropy per class (multi-label data need it)."""
    label_smoothing: float = option(0.0, low=0, high=1)
    """Share of each target that is spread over all classes."""
    class_weights: str = path_option("none")
    """none, sqrt, balanced, or a YAML file of `class: weight`; scaled to mean 1 over the training samples."""
    sampling: Literal["natural", "sqrt", "balanced"] = "natural"
    """How often rare classes are drawn: as they are, with the root of their frequency, or as often as the others."""
    batch_norm: Literal["local", "group", "node", "global", "frozen"] = "local"
    """Samples that BatchNorm statistics are taken over: micro-batch, norm_batch_size, machine, global batch, or none."""
    norm_batch_size: int = option(16, low=2)
    """batch_norm group: consecutive samples that share statistics."""
    drop: float = option(0.0, low=0, high=1)
    """Dropout before the head. Its masks depend on the layout: runs on different layouts agree only statistically."""
    drop_path: float = option(0.0, low=0, high=1)
    """Stochastic depth, drawn per sample and layer."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    channels_last: bool = False
    """Keep pixels of all channels together in memory: faster convolutions on GPUs under fp16 and bf16."""
    compile: bool = False
    """torch.compile the model, for training; evaluations run it as it is."""
    eval_only: str = path_option("")
    """Only evaluate this checkpoint, the mean of this folder of checkpoints, or this exported model; leaves a report."""

    # What defines a training. --help explains these fields: all recipes have them.
    epochs: float = 10.0
    global_batch_size: int = 64
    opt: str = "adamw"
    lr: float = option(4e-3, photographs=1e-3)
    weight_decay: float = 0.05
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    warmup_epochs: float = option(0.0, photographs=1.0)
    crop_scale: float = option(0.7, photographs=0.35)
    hflip: float = option(0.0, photographs=0.5)


def build_data(config: Config, weights=None):
    """Training and validation images; with `weights`, those of --eval_only, both are the images to evaluate these on."""
    train, val = sources.load(sources.Spec.of(config, weights))
    if train.multi_label and config.loss != "bce":
        raise Refused(f"--loss {config.loss}: {config.data} has several labels an image; take --loss bce")
    return train, val


def build_model(config: Config, classes: Sequence[str], device: torch.device):
    """The model (any nn.Module will do), and what it wants to see."""
    with all_or_none("building the model"):
        model = timm_models.build_classifier(
            config.model,
            len(classes),
            names=classes,
            pretrained=config.pretrained,
            image_size=config.image_size,
            dynamic_size=bool(config.image_sizes),
            drop=config.drop,
            drop_path=config.drop_path,
            seed=config.seed,
        )
        data_config = timm_models.data_config(model, config.image_size, config.crop_pct)
        sizes = step_sizes(config, data_config).choices
        if not config.eval_only:
            timm_models.check_export(model, data_config)
            timm_models.check_sizes(model, sizes, data_config)
        if config.grad_checkpointing:
            timm_models.checkpoint_gradients(model, config.model)
    batch_norm.convert(model, batch_norm_of(config), group_size=config.norm_batch_size)
    freeze(config, model)
    drop_path.convert(model)
    model.to(device, getattr(torch, config.dtype))
    if config.channels_last:
        model.to(memory_format=torch.channels_last)
    if config.compile:
        torch._dynamo.config.recompile_limit = max(8, 2 * len(sizes))
        model.compile(dynamic=False)  # a graph for each size of images and of micro-batches: at most two of these
    return model, data_config


def build_plan(config: Config, most: int) -> BatchPlan:
    """How the global batch is spread, `most` samples at once; MixUp pairs and norm groups stay together."""
    pair, norm = 2 if config.mixup or config.cutmix else 1, batch_norm_of(config)
    group = config.norm_batch_size if norm == "group" else 1
    whole = f"--batch_norm {norm}" if norm in ("node", "global") else ""
    return BatchPlan(config.global_batch_size, world_size(), most, math.lcm(pair, group), whole)


def build_stream(config: Config, train: sources.Source) -> Stream:
    """The endless sequence of training samples."""
    weights = sample_weights(config.sampling, train.labels, len(train.classes))
    common = (len(train), config.global_batch_size, config.seed, config.repeats, weights)
    return Stream(*common, min_epoch_steps=config.min_epoch_steps)


def build_augmentation(config: Config, train: sources.Source, data_config: dict, device: torch.device):
    """The augmentations in order; augment(batch) -> images [B, 3, H, W] and targets [B, K] after them; normalize(images)."""
    dtype, sizes, classes = getattr(torch, config.dtype), step_sizes(config, data_config), len(train.classes)
    normalize = Normalize(data_config, dtype, device, config.channels_last)
    uniform = 0.5 if train.multi_label else 1 / classes
    augmentations = []  # your own is one more line here: see common.classification.augmentation
    if config.color_jitter:
        augmentations.append(ColorJitter(config.seed, config.color_jitter))
    augmentations.append(normalize)
    if config.random_erasing:
        augmentations.append(RandomErasing(config.seed, config.random_erasing, sizes, dtype, device))
    if config.mixup or config.cutmix:
        augmentations.append(Mixing(config.seed, config.mixup, config.cutmix, sizes))

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
    weights = class_weights(config.class_weights, train.labels, train.classes)
    weights = torch.as_tensor(weights if weights is not None else 1.0).to(device, getattr(torch, config.dtype))

    def losses(logits, targets):
        logits = logits.to(targets.dtype)  # out of half precision
        if config.loss == "bce":
            return (F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * weights).mean(1)
        return -(targets * weights * logits.log_softmax(1)).sum(1)

    return torch.compile(losses, dynamic=False) if config.compile else losses


def build_samples(config: Config, train: sources.Source, stream: Stream, model, data_config: dict, augmentations: list):
    """Positions of the stream -> batches; data workers compute them."""
    transform, layers = training_transform(config, data_config), drop_path.layers(model)
    cache, sizes = open_cache(len(train), config.cache, config.cache_folder), step_sizes(config, data_config)
    return TrainingSamples(train, stream, transform, config.seed, augmentations, layers, cache, config.decode, sizes)


def build_val_loader(config: Config, val: sources.Source, data_config: dict, size: int, rows=None):
    """Batches of the validation set, or of `rows` of a set, `size` samples each on any layout."""
    samples = EvaluationSamples(val, evaluation_transform(data_config), rows)
    return evaluation_loader(samples, size, config.workers)


def build_evaluation(config: Config, origin, data: sources.Source, classes: Sequence[str], device: torch.device):
    """What `--eval_only` evaluates, with its weights, normalize(images), and the loader of `data`; also for tools/."""
    config = dataclasses.replace(config, model=eval_only.model_of(config, origin), pretrained=False)
    model, data_config = build_model(config, classes, device)
    eval_only.load_weights(model, origin)
    *_, normalize = build_augmentation(config, data, data_config, device)
    loader = build_val_loader(config, data, data_config, config.max_micro_batch_size)
    return eval_only.viewed(config, model), normalize, loader


def batch_norm_of(config: Config) -> str:
    """The mode of batch norm: a frozen backbone keeps its statistics, too."""
    return "frozen" if config.freeze_stages == "all" and not config.unfreeze_epochs else config.batch_norm


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
    """Results over every validation image once, whatever the layout, and what they are made of."""
    found = Evaluation(val, accelerator.device, thorough)
    for batch, logits in predict(model, loader, accelerator, normalize):
        found.update(batch, logits)
    results = found.results()
    model.train()
    return results, found


def evaluate_only(config: Config, accelerator) -> None:
    """Print the results of an exported model or of a checkpoint (of its moving average, where it has one); write a report."""
    origin = eval_only.begin(config)
    val, names, places = eval_only.read(config, origin, build_data)
    model, normalize, loader = build_evaluation(config, origin, val, names, accelerator.device)
    model, matched = eval_only.match(model, val, names, places)
    results, found = evaluate(model, loader, accelerator, normalize, matched, thorough=True)
    eval_only.report(config, origin, val, results, found.details(), partial(draw, val=matched, found=found))


def start_rows(config: Config, data: tuple, model, samples: TrainingSamples) -> dict[str, str]:
    """What the start table says of data and model."""
    return {
        **data_rows(config.data, *data),
        **timm_models.describe(config.model, model),
        **defaults.describe(config),
        "cache": str(samples.cache or "none"),
        "input": samples.input,
        "batch norm": batch_norm.describe(batch_norm_of(config), model),
    }


def draw(run: Run, val: sources.Source, found: Evaluation) -> None:
    """Pictures of the newest evaluation."""
    if found.counts.confusion is not None:
        run.draw("confusion", plots.confusion, found.counts.confusion, val.classes)
    if found.mistakes:
        run.draw("mistakes", plots.mistakes, val, found.mistakes)
    if found.calibration:
        run.draw("reliability", plots.reliability, found.calibration)


def audit(run: Run, train: sources.Source, data_config: dict, normalize) -> None:
    """Training labels that the trained model contradicts: likely wrong, or worth a look."""
    rows = looked_at(len(train), run.total_steps * run.config.global_batch_size)
    loader = build_val_loader(run.config, train, data_config, run.plan.max_micro_batch_size, rows)
    suspects.report(run, train, predict(run.model, loader, run.accelerator, normalize))


def main() -> None:
    config = parse(Config, suit=defaults.suited)
    accelerator = launch.start(config, fixed_shapes=True)
    if config.eval_only:
        return evaluate_only(config, accelerator)

    with Run(config, accelerator) as run:  # claims runs/<name>/, handles signals, watches the other ranks
        plan = build_plan(config, run.max_micro_batch_size)
        train, val = data = build_data(config)
        stream = build_stream(config, train)  # which sample stands at which position of the run
        schedule = Schedule(config, stream, run.length(stream))
        model, data_config = build_model(config, train.classes, accelerator.device)
        augmentations, augment, normalize = build_augmentation(config, train, data_config, accelerator.device)
        loss_fn = build_loss(config, train, accelerator.device)
        samples = build_samples(config, train, stream, model, data_config, augmentations)
        optimizer, ema = build_optimizer(config, model), build_ema(config, model)

        def losses_of(network, batch):
            """The forward pass, in the trial of the micro-batch, in DDP's warm-up and in training: one loss per sample, [B]."""
            images, targets = augment(batch)
            with accelerator.autocast():
                logits = network(images)  # [B, K]
            return loss_fn(logits, targets)

        # Finds the micro-batch that fits into memory, wraps the model, prints the start table, resumes.
        network, optimizer = run.prepare(
            model,
            optimizer,
            ema,
            plan=plan,
            schedule=schedule,
            samples=samples,
            losses_of=losses_of,
            data=data,
            export=partial(timm_models.export, classes=val.classes, config=data_config, multi_label=val.multi_label),
            rows=start_rows(config, data, model, samples),
        )
        val_loader = build_val_loader(config, val, data_config, run.plan.max_micro_batch_size)
        validate = partial(evaluate, loader=val_loader, accelerator=accelerator, normalize=normalize, val=val)

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
                if run.ends():
                    audit(run, train, data_config, normalize)
            if run.should_save():
                run.save()


if __name__ == "__main__":
    launch.run(main)
