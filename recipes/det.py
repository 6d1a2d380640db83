"""Train an object detector: the same run on one CPU, one GPU, many GPUs or many machines.

    accelerate launch --config_file accelerate_configs/multi_cpu.yaml recipes/det.py --config recipes/presets/det_digits.yaml
    accelerate launch --config_file accelerate_configs/multi_gpu_bf16.yaml recipes/det.py --data /data/coco \
        --config recipes/presets/coco_fcos_r50.yaml

The defaults train on scenes of handwritten digits, made as they are needed. How the global batch is spread over processes
and micro-steps is derived and changes nothing: losses and weights are those of any other layout. Kill it at any moment,
start the same command again on whatever hardware there is, and it resumes from the last complete checkpoint.
This file is meant to be copied and changed: `cp recipes/det.py mine.py` runs as it is.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from common.config.fields import (
    BoxAugmentationConfig,
    OptimizationConfig,
    ReadingConfig,
    RunConfig,
    option,
    path_option,
    whole_numbers,
    wrong_with_sizes,
)
from common.config.parsing import parse
from common.data.batch_plan import BatchPlan
from common.data.cache import open_cache
from common.data.data_rows import data_rows
from common.data.loader import evaluation_loader
from common.data.source import looked_at
from common.data.stream import Stream
from common.detection import balancing, defaults, suspects
from common.detection.batches import EvaluationScenes, TrainingImages, blank_padding
from common.detection.data import sources
from common.detection.data.annotated import Annotated
from common.detection.evaluation import judgement_plots, plots
from common.detection.evaluation.metrics import Detections
from common.detection.export import export
from common.detection.grouping import GroupedStream
from common.detection.models import detectors
from common.detection.models.spec import DetectorSpec
from common.detection.transforms import BoxAugmentation, read_range
from common.detection.views import Views
from common.detection.weights import sources as sources_of_weights
from common.detection.weights.begin import begin_with, read_once
from common.distributed.collectives import all_or_none, world_size
from common.errors import Refused
from common.launching import launch
from common.run import eval_only
from common.run.run import Run
from common.training import batch_norm, drop_path
from common.training.freezing import freeze
from common.training.optimizer import (
    Schedule,
    build_ema,
    build_optimizer,
    set_learning_rate,
)


@dataclass
class Config(BoxAugmentationConfig, ReadingConfig, OptimizationConfig, RunConfig):
    """Object detection on timm backbones. Defaults < --config file.yaml < flags."""

    data: str = path_option("digits")
    """digits, a COCO, Pascal VOC or YOLO folder, or a Hugging Face data set with an `objects` column."""
    detector: Literal["fcos", "retinanet", "faster_rcnn", "mask_rcnn", "rtdetr_v2", "dfine", "deimv2", "rf_detr"] = (
        "fcos"
    )
    """Family of the detector; the last four need `pip install transformers`."""
    model: str = path_option("test_resnet", photographs="convnext_atto")
    """Backbone: a timm model, hf-hub:owner/name, or a local timm folder (photographs: convnext_atto). rtdetr_v2, dfine,
    deimv2 also, rf_detr only: a model of transformers."""
    pretrained: bool = False
    """Start from the backbone's weights that timm publishes."""
    levels: str = option("3-4", photographs="3-7")
    """Feature pyramid: finest and coarsest level; level l has a cell for each 2^l x 2^l pixels (photographs: 3-7)."""
    width: int = option(64, low=32, high=4096, photographs=128)
    """Channels of the feature pyramid, a multiple of 32 (photographs: 128; COCO: 256)."""
    convolutions: int = option(2, low=1, high=64)
    """fcos, retinanet: convolutions in each of the heads (COCO: 4)."""
    variant: Literal["own", "torchvision", "torchvision_v2"] = option("own")
    """fcos, retinanet, R-CNNs: details as here, as of torchvision's trained weights, or as of their second versions."""
    short_sides: str = option("128", photographs="480")
    """Training: lengths of an image's shorter side in pixels, one of which is drawn for each image (photographs: 480, COCO:
    800, or 640,672,...,800). Families of transformers: sides of the squares that images become, one drawn for each step."""
    sync_short_sides: bool = option(False)
    """Draw one of --short_sides for all images of a step, not for each image: less padding, and fewer sizes of the canvas."""
    long_side: int = option(128, low=1, high=8192, photographs=800)
    """Maximum length of an image's longer side in pixels (photographs: 800; COCO: 1333). Families of transformers: not used."""
    eval_short_side: int = option(0, low=0, high=8192)
    """Evaluation: the short side, or the side of the square, in pixels (0: the longest of --short_sides)."""
    eval_sizes: str = option("", check=wrong_with_sizes, of_evaluation=True)
    """With --eval_only: show each image at each of these short sides (480,640,800), and merge the detections."""
    repeat_threshold: float = option(0.0, low=0, high=1)
    """Draw images of classes that fewer than this share of the images show more often (LVIS: 0.001; 0: all alike)."""
    group_window: int = option(0, low=0, high=10_000)
    """Steps within which images change places so that each step holds similar shapes, and less padding (COCO: 16; 0: none)."""
    objects_column: str = ""
    """Tables: column of the objects (default: found by its type)."""
    box_format: str = ""
    """Tables: xywh, xyxy or cxcywh."""
    batch_norm: Literal["local", "group", "node", "global", "frozen"] = "local"
    """Samples that BatchNorm statistics are taken over: micro-batch, norm_batch_size, machine, global batch, or none."""
    norm_batch_size: int = option(2, low=2)
    """batch_norm group: consecutive samples that share statistics."""
    drop_path: float = option(0.0, low=0, high=1)
    """Stochastic depth in the backbone, drawn per sample and layer."""
    compile: bool = False
    """torch.compile the backbone and its feature pyramid."""
    init: str = path_option("")
    """Begin with the weights of this detector, and its rows of classes with the same names: a run's best/, torchvision:NAME, a
    .pth of torchvision, D-FINE or RT-DETR, a folder or owner/name of transformers. It decides on --detector, --model, ..."""
    init_classes: str = option("")
    """Classes that the weights of --init or --eval_only call otherwise than the data: mug=cup,pedestrian=person."""
    eval_only: str = path_option("")
    """Only evaluate this checkpoint, or detector as --init takes it, and print the results."""

    # What defines a training. --help explains these fields: all recipes have them.
    epochs: float = 10.0
    global_batch_size: int = 8
    opt: str = "adamw"
    lr: float = option(2e-3, photographs=2e-4)
    lr_batch_size: int = 8
    weight_decay: float = 0.05
    schedule: Literal["cosine", "linear", "step", "constant"] = "cosine"
    warmup_epochs: float = option(0.0, photographs=1.0)
    cache: int = option(0)
    decode: Literal["worker", "device"] = option("worker")


def build_data(config: Config, weights=None):
    """Training and validation images with boxes; with `weights`, those of --eval_only, both are the images to evaluate on."""
    pastes = config.copy_paste > 0 and weights is None
    return sources.load(sources.Spec.of(config, weights, masks=config.detector == "mask_rcnn" or pastes))


def build_model(config: Config, classes: tuple[str, ...], device: torch.device):
    """The detector, and what it begins with."""
    spec = DetectorSpec.of(config, classes)
    defaults.refuse_missing(config)
    weights = read_once(config.init) if config.init else None
    with all_or_none("building the model"):
        model = detectors.build_detector(spec)
        begins = begin_with(model, weights, config, classes) if weights else model.begins_with
    batch_norm.convert(model, config.batch_norm, group_size=config.norm_batch_size)
    freeze(config, model)
    drop_path.convert(model)
    if config.compile:
        model.backbone.compile()
    return model.to(device, getattr(torch, config.dtype)), begins


def build_plan(config: Config, most: int) -> BatchPlan:
    """How the global batch is spread, `most` samples at once; norm groups stay together."""
    group = config.norm_batch_size if config.batch_norm == "group" else 1
    whole = f"--batch_norm {config.batch_norm}" if config.batch_norm in ("node", "global") else ""
    return BatchPlan(config.global_batch_size, world_size(), most, group, whole)


def build_stream(config: Config, train: Annotated) -> Stream:
    """Which image stands at which position: rare classes more often, similar shapes in one step."""
    weights = balancing.repeat_weights(train, config.repeat_threshold)
    common = (len(train), config.global_batch_size, config.seed, 1, weights)
    least = config.min_epoch_steps
    if not config.group_window:
        return Stream(*common, min_epoch_steps=least)
    aspects = train.sizes[:, 0] / train.sizes[:, 1]
    return GroupedStream(*common, aspects=aspects, window=config.group_window, min_epoch_steps=least)


def build_augmentation(config: Config, stream: Stream, stride: int) -> tuple[BoxAugmentation, BoxAugmentation]:
    """What happens to training images, and to those of an evaluation."""
    short_sides = whole_numbers(config.short_sides, ",")
    if not short_sides or min(short_sides) < 1 or max(short_sides) > 8192:
        raise Refused(
            f"--short_sides {config.short_sides:.100}: must be lengths in pixels joined by commas, such as "
            "640,672,704, each from 1 to 8192"
        )
    eval_side = config.eval_short_side or max(short_sides)
    square = config.detector in detectors.OF_TRANSFORMERS  # as their published weights were trained
    if square and (uneven := [side for side in (*short_sides, eval_side) if side % stride]):
        raise Refused(
            f"--short_sides, --eval_short_side: a square of {uneven[0]} pixels is no multiple of {stride}, as "
            f"--detector {config.detector} needs; take {-(-uneven[0] // stride) * stride}"
        )
    plain = BoxAugmentation(config.seed, (eval_side,), config.long_side, square=square)
    varied = BoxAugmentation(
        config.seed,
        short_sides,
        config.long_side,
        read_range("--scale_jitter", config.scale_jitter),
        square=square,
        alike=config.global_batch_size if square or config.sync_short_sides else 1,
        hflip=config.hflip,
        photometric=config.photometric,
        iou_crop=config.iou_crop,
        zoom_out=config.zoom_out,
        mosaic=config.mosaic,
        mixup=config.mixup,
        copy_paste=config.copy_paste,
        rotate=config.rotate,
        translate=config.translate,
        drop_masks=config.detector != "mask_rcnn",  # other families read masks for copy-paste alone
        strong_until=stream.steps(config.strong_epochs) * stream.global_batch_size,
        decode=config.decode,
    )
    return varied, plain


def build_normalize(config: Config, model, device: torch.device):
    """normalize(batch) -> its images [B, 3, H, W] in the run's type, 0 around them; and the colour of empty places in them."""
    dtype, (mean, std) = getattr(torch, config.dtype), (model.pretrained_cfg[key] for key in ("mean", "std"))
    fill = tuple(round(255 * value) for value in mean)
    mean, std = (torch.tensor(values, device=device, dtype=dtype)[:, None, None] for values in (mean, std))

    def normalize(batch):
        return blank_padding(batch.images.to(dtype).div_(255).sub_(mean).div_(std), batch.sizes)

    return normalize, fill


def build_samples(config: Config, train: Annotated, stream: Stream, model, varied: BoxAugmentation, fill: tuple):
    """Positions of the stream -> batches; data workers compute them."""
    cache, layers = open_cache(len(train), config.cache, config.cache_folder), drop_path.layers(model)
    return TrainingImages(train, stream, varied, model.stride, fill, config.seed, layers, cache)


def build_val_loader(config: Config, val: Annotated, plain: BoxAugmentation, model, fill: tuple, size: int):
    """Batches of the validation set, of up to `size` images with one canvas, the same on any layout."""
    samples = EvaluationScenes(val, plain, model.stride, fill, Views.of(config, plain, model))
    return evaluation_loader(samples, size, config.workers)


def build_evaluation(config: Config, origin, data: Annotated, classes: tuple[str, ...], device: torch.device):
    """What `--eval_only` evaluates, with its weights, normalize(batch), and the loader of `data`; also for tools/."""
    init = "" if origin.is_alone else config.eval_only
    config = dataclasses.replace(config, pretrained=False, init=init, init_classes="")
    model, _ = build_model(config, classes, device)
    eval_only.load_weights(model, origin)
    _, plain = build_augmentation(config, build_stream(config, data), model.stride)
    normalize, fill = build_normalize(config, model, device)
    return model, normalize, build_val_loader(config, data, plain, model, fill, config.max_micro_batch_size)


@torch.no_grad()
def predict(model, loader, accelerator, normalize):
    """Each batch of this rank's share of a loader, on the device, with what is found in each image, in its own pixels."""
    model.eval()
    for batch in loader:
        batch = batch.to(accelerator.device)
        with accelerator.autocast():
            found = [model.detect(normalize(view), view.sizes) for view in batch.views]
        yield batch, loader.dataset.merged(found, batch)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # as it will be used; its canvases would need graphs of their own
def evaluate(model, loader, accelerator, normalize, val: Annotated):
    """The COCO numbers over every validation image once, whatever the layout, and what was found in them."""
    found = Detections()
    for batch, detections in predict(model, loader, accelerator, normalize):
        found.update(batch.positions.tolist(), detections)
    model.train()
    results = found.results(val)
    if results["count"] != len(val):
        raise RuntimeError(f"evaluated {results['count']} images of {len(val)}: each must count exactly once")
    return results, found


def evaluate_only(config: Config, accelerator) -> None:
    """Print the results of an exported detector or of a checkpoint (of its moving average, if it has one); write a report."""
    origin = eval_only.begin(config, sources_of_weights.origin)
    val, names, places = eval_only.read(config, origin, build_data)
    model, normalize, loader = build_evaluation(config, origin, val, names, accelerator.device)
    model = detectors.Matched(model, places)
    results, found = evaluate(model, loader, accelerator, normalize, val)
    eval_only.report(
        config, origin, val, results, found.judgement.details(), partial(draw, val=val, found=found, thorough=True)
    )


def start_rows(config: Config, data: tuple, model, begins: str, samples: TrainingImages) -> dict[str, str]:
    """What the start table says of data and model."""
    return {
        **data_rows(config.data, *data, "boxes"),
        "model": f"{config.detector} on {config.model}: {sum(p.numel() for p in model.parameters()):,} parameters",
        "begins with": begins,
        **defaults.describe(config),
        "cache": str(samples.cache or "none"),
        "batch norm": batch_norm.describe(config.batch_norm, model),
        "padding": f"{np.mean([samples.padding(step) for step in range(100)]):.0%} of the canvas, first 100 steps",
    }


def draw(run: Run, val: Annotated, found: Detections, thorough: bool = False) -> None:
    """Pictures of the newest evaluation; a report is `thorough`."""
    judgement, matches = found.judgement, found.judgement.matches
    run.draw("predictions", plots.predictions, val, matches)
    run.draw("precision_recall", plots.precision_recall, found.precision, val.classes)
    run.draw("confusion", plots.confusion, matches, val.classes)
    run.draw("misses", plots.misses, val, matches)
    if thorough:
        run.draw("errors", judgement_plots.errors, judgement)
        run.draw("confidence", judgement_plots.confidence, judgement)
        run.draw("objects", judgement_plots.objects, judgement)


def audit(run: Run, train: Annotated, validate, loader_of) -> None:
    """Boxes that are likely wrong, or worth a look: the model looks at training images once more.

    It runs early: later the model has memorised wrong boxes.
    """
    if hasattr(train, "part"):  # of fresh scenes, none is seen twice
        images = train.part(looked_at(len(train), run.total_steps * run.config.global_batch_size))
        _, found = validate(run.model, loader=loader_of(images), val=images)
        judged = found.judgement.matches, suspects.findings(found.judgement.matches)
        run.draw("suspicious", suspects.draw, *judged)
        run.table("suspicious", suspects.rows, *judged)  # last: it says that this is done


def main() -> None:
    config = parse(Config, suit=defaults.suited, origin=sources_of_weights.origin)
    accelerator = launch.start(config)
    if config.eval_only:
        return evaluate_only(config, accelerator)

    with Run(config, accelerator) as run:  # claims runs/<name>/, handles signals, watches the other ranks
        plan = build_plan(config, run.max_micro_batch_size)
        train, val = data = build_data(config)
        stream = build_stream(config, train)  # which sample stands at which position of the run
        schedule = Schedule(config, stream, run.length(stream))
        model, begins = build_model(config, train.classes, accelerator.device)
        normalize, fill = build_normalize(config, model, accelerator.device)
        varied, plain = build_augmentation(config, stream, model.stride)
        samples = build_samples(config, train, stream, model, varied, fill)
        optimizer, ema = build_optimizer(config, model), build_ema(config, model)

        def totals_of(batch):
            """What losses are divided by, counted in a batch: known from its boxes, before anything is predicted."""
            return model.counts(batch.targets, batch.images.shape[2:])

        def losses_of(network, batch):
            """The forward pass, in the trial of the micro-batch, in DDP's warm-up and in training: one loss per image, [B]."""
            with accelerator.autocast():
                losses, parts = network(normalize(batch), batch.targets, batch.totals)
            run.log({f"train/loss_{name}": config.global_batch_size * part for name, part in parts.items()})
            return config.global_batch_size * losses  # their mean over the global batch is the step's loss

        # Finds the micro-batch that fits into memory, wraps the model, prints the start table, resumes.
        network, optimizer = run.prepare(
            model,
            optimizer,
            ema,
            plan=plan,
            schedule=schedule,
            samples=samples,
            losses_of=losses_of,
            totals_of=totals_of,
            data=data,
            export=partial(export, source=train, plain=plain),
            rows=start_rows(config, data, model, begins, samples),
        )
        of_loader = {"plain": plain, "model": model, "fill": fill, "size": run.plan.max_micro_batch_size}
        loader_of = partial(build_val_loader, config, **of_loader)
        validate = partial(evaluate, loader=loader_of(val), accelerator=accelerator, normalize=normalize, val=val)

        for step in run.steps():
            set_learning_rate(optimizer, schedule(step))
            for batch in run.micro_batches():  # this rank's share of the global batch, on the device
                losses = losses_of(network, batch)  # [B]: one loss per image
                run.backward(losses)  # gradients are sent with the last micro-batch
            grad_norm = run.clip_gradients(config.clip, config.clip_mode)
            optimizer.step()
            optimizer.zero_grad()
            run.end_step(grad_norm)

            if run.should_evaluate():
                (found,) = run.evaluate(validate, leading="AP")
                if run.should_draw():
                    draw(run, val, found)
                if run.audits(share=0.25):
                    audit(run, train, validate, loader_of)
            if run.should_save():
                run.save()


if __name__ == "__main__":
    launch.run(main)
