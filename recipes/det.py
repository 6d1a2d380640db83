"""Train an object detector: the same run on one CPU, one GPU, many GPUs or many machines.

    accelerate launch --config_file accelerate_configs/multi_cpu.yaml recipes/det.py \
        --config recipes/presets/det_digits.yaml
    accelerate launch --config_file accelerate_configs/multi_gpu_bf16.yaml recipes/det.py \
        --data /data/coco --config recipes/presets/coco_fcos_r50.yaml

The defaults are for photographs. How the global batch is spread over processes and micro-steps is
derived and changes nothing: losses and weights equal any other layout's. Kill it at any moment,
start the same command again on whatever hardware there is, and it resumes from the last complete
checkpoint. This file is meant to be copied and changed: `cp recipes/det.py mine.py` runs as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from common.config import OptimizationConfig, RunConfig, option, parse, path_option
from common.detection import (
    BoxAugmentation,
    DetectorSpec,
    EvalDataset,
    Evaluation,
    TrainDataset,
    Transforms,
    build_detector,
    load_data,
    load_pretrained,
    read_once,
    read_sides,
    refuse_missing,
    weights_origin,
    weights_settings,
)
from common.distributed import all_or_none
from common.launching import run_main
from common.run import Run
from common.training import build_optimizer, build_schedule, prepare_layers, set_learning_rate


@dataclass
class Config(OptimizationConfig, RunConfig):
    """Object detection on timm backbones. Defaults < --config file.yaml < flags."""

    data: str = path_option(
        "",
        heading="data",
        required="name your images, or train on digits: --config recipes/presets/det_digits.yaml",
        is_common=True,
    )
    """A COCO, Pascal VOC or YOLO folder, a Hugging Face data set with an `objects` column, shards
    (tars of WebDataset; URLs of tars or Parquet), or digits: scenes of them."""
    objects_column: str = option("", reads_data=True)
    """Tables and shards: column of the objects (default: found by its type; in a tar's .json: objects)."""
    streaming: bool = False
    """Hugging Face data sets: read their shards where they lie, without downloading them."""
    shard_memory: int = option(1024, low=1, high=2**24)
    """Shards at a URL: MiB of a machine's memory for neighbouring images, which are read together.
    With more of it they are shuffled better, so a resumed run keeps this value."""
    box_format: str = option("", reads_data=True)
    """Tables: xywh, xyxy or cxcywh."""
    repeat_threshold: float = option(0.0, low=0, high=1)
    """Draw images of classes that fewer than this share of the images show more often (LVIS: 0.001;
    0: all alike)."""
    group_window: int = option(0, low=0, high=10_000)
    """Steps within which images change places so that each step holds similar shapes, and less
    padding (COCO: 16; 0: none)."""
    detector: Literal[
        "fcos",
        "retinanet",
        "faster_rcnn",
        "mask_rcnn",
        "rtdetr_v2",
        "dfine",
        "deimv2",
        "rf_detr",
        "rf_detr_seg",
    ] = option("fcos", heading="model", is_common=True)
    """Family of the detector; the last five need `pip install transformers`."""
    model: str = path_option("convnext_atto", is_common=True)
    """Backbone: a timm model, hf-hub:owner/name, or a local timm folder. rtdetr_v2, dfine, deimv2
    also, rf_detr and rf_detr_seg only: a model of transformers."""
    pretrained: bool = option(False, is_weights=True, is_common=True)
    """Start from the backbone's weights that timm publishes."""
    init: str = path_option("", defaults_from=weights_settings, is_weights=True, is_common=True)
    """Begin with the weights of this detector, and its rows of classes with the same names: a run's
    best/, torchvision:NAME, a .pth of torchvision, a folder or owner/name of transformers. It sets
    --detector, --model, ..."""
    init_classes: str = ""
    """Classes that have another name in the weights of --init or --eval_only:
    mug=cup,pedestrian=person (data=weights)."""
    levels: str = "3-7"
    """Feature pyramid: finest and coarsest level; level l has a cell for each 2^l x 2^l pixels."""
    width: int = option(128, low=32, high=4096)
    """Channels of the feature pyramid, a multiple of 32 (COCO: 256)."""
    convolutions: int = option(2, low=1, high=64)
    """fcos, retinanet: convolutions in each of the heads (COCO: 4)."""
    variant: Literal["own", "torchvision", "torchvision_v2"] = "own"
    """fcos, retinanet, R-CNNs: details as here, as in torchvision's trained weights, or as in their
    second versions."""
    short_sides: str = option("480", is_common=True)
    """Training: lengths of an image's shorter side in pixels, one of which is drawn for each image
    (COCO: 800, or 640,672,...,800). Families of transformers: sides of the squares that images
    become, one drawn for each step."""
    sync_short_sides: bool = False
    """Draw one of --short_sides for all images of a step, not for each image: less padding, and
    fewer sizes of the canvas."""
    long_side: int = option(800, low=1, high=8192)
    """Maximum length of an image's longer side (COCO: 1333). Families of transformers: not used."""
    batch_norm: Literal["local", "group", "node", "global", "frozen"] = option(
        "local", is_common=True
    )
    """BatchNorm statistics over: each micro-batch (local), norm_batch_size samples (group), a
    machine (node), the whole batch (global); frozen: as loaded."""
    norm_batch_size: int = option(2, low=2)
    """batch_norm group: consecutive samples that share statistics."""
    drop_path: float = option(0.0, low=0, high=1)
    """Stochastic depth in the backbone, drawn per sample and layer."""
    compile: bool = option(False, not_in_shards="in shards, no detector has been compiled yet")
    """torch.compile the backbone and its feature pyramid."""
    eval_short_side: int = option(0, low=0, high=8192, heading="evaluation")
    """Evaluation: the short side, or the side of the square (0: the longest of --short_sides)."""
    max_detections: int = option(0, low=0, high=100_000, may_change=True, is_recorded=True)
    """Detections in an image (0: 100, or as many as an image of the data has objects). Of DETRs
    each query is one."""
    eval_only: str = path_option("", origin=weights_origin, weights_field="init", is_common=True)
    """Only evaluate this checkpoint, or a detector that --init takes, and print the results."""

    # What defines a training. --help explains the fields without a text: all recipes have them.
    epochs: float = 10.0
    global_batch_size: int = 8
    opt: str = "adamw"
    lr: float = 2e-4
    lr_batch_size: int = 8
    weight_decay: float = 0.05
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    warmup_epochs: float = 1.0
    hflip: float = option(0.5, low=0, high=1, heading="augmentation", is_common=True)
    """Probability of a left-right mirror image (digits and text: 0)."""
    photometric: float = option(0.0, low=0, high=1)
    """Probability of each of several distortions of brightness, contrast and colour."""
    iou_crop: float = option(0.0, low=0, high=1)
    """Probability of an SSD crop: a random crop that contains an object."""
    zoom_out: float = option(0.0, low=0, high=1)
    """Probability of zooming out: place the image on a canvas up to 4 times as wide and high, as in SSD."""
    mosaic: float = option(0.0, low=0, high=1)
    """Probability of showing parts of four images around a point, as in YOLOX."""
    mixup: float = option(0.0, low=0, high=1)
    """Probability of blending two images in equal parts, with the objects of both, as in YOLOX."""
    strong_epochs: float = option(0.0, low=0, high=10**6)
    """Epochs after which photometric, iou_crop, zoom_out, mosaic and mixup end (0: never)."""


def build_data(config: Config, weights=None):
    """Training and validation images; of --eval_only, with its `weights`, both to evaluate."""
    train_data, val_data = load_data(config, weights)
    if not (config.max_detections or weights):
        config.max_detections = max(train_data.max_detections, val_data.max_detections)
    return train_data, val_data


def build_model(config: Config, class_names: Sequence[str], device: torch.device):
    """The detector, with the weights that it begins with."""
    spec = DetectorSpec.from_config(config, class_names)
    refuse_missing(config)
    weights = read_once(config.init) if config.init else None
    with all_or_none("building the model"):
        model = build_detector(spec)
        if weights:
            model.weights_summary = load_pretrained(model, weights, config, class_names)
    # The start table's description of the model.
    model.title = f"{config.detector} on {config.model}, up to {model.limit} detections in an image"
    prepare_layers(config, model)
    if config.compile:
        model.backbone.compile()
    return model.to(device, getattr(torch, config.dtype))


def build_transforms(config: Config, model, device: torch.device) -> Transforms:
    """What happens to images: augmented in training, resized in evaluations, normalised in both."""
    square = model.needs_squares
    short_sides, eval_side = read_sides(config, model.stride, square)
    resize = BoxAugmentation(config.seed, (eval_side,), config.long_side, square=square)
    augment = BoxAugmentation(
        config.seed,
        short_sides,
        config.long_side,
        square=square,
        alike=config.global_batch_size if square or config.sync_short_sides else 1,
        hflip=config.hflip,
        photometric=config.photometric,
        iou_crop=config.iou_crop,
        zoom_out=config.zoom_out,
        mosaic=config.mosaic,
        mixup=config.mixup,
    )
    return Transforms(model, augment, resize, getattr(torch, config.dtype), device)


def predict(model, batch):
    """The forward pass of evaluations, and of tools: each image's detections, in canvas pixels."""
    return model.detect(batch.images, batch.sizes)


@torch.no_grad()
def evaluate(model, batches, data):
    """The COCO metrics over every image of `data` once, whatever the layout."""
    evaluation = Evaluation(data)
    for batch in batches:  # this rank's share of the images, on the device and normalised
        with batches.autocast():
            detections = predict(model, batch)  # of each image: boxes [n, 4], scores, labels [n]
        evaluation.update(batch, detections)
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
        optimizer = build_optimizer(config, model)
        schedule = build_schedule(config, train_set.stream)

        def compute_losses(network, batch):
            """The forward pass of training, and of the trial before it: one loss per image, [B]."""
            images = transforms.normalize(batch)
            with run.autocast():
                losses, parts = network(images, batch.targets, batch.totals)
            run.log({f"train/loss_{name}": part for name, part in parts.items()})
            return losses

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
                run.evaluate(evaluate, config.best_metric or "AP")
            if run.should_save():
                run.save()


if __name__ == "__main__":
    run_main(main)
