"""Measures how much of a GPU's speed `recipes/cls.py` reaches, on data that lie on the GPU and on files.

    python benchmarks/gpu.py [--quick | --brief] [--eager] [--seconds 500] [--output FILE]

ResNet-50, ViT-S/16 and ConvNeXt-T at 224 pixels in bf16, each with and without torch.compile. The bound is a step written by
hand on one normalised batch that lies on the device: forward, loss, backward, fused AdamW, cudnn.benchmark. It is compared with
the recipe's own `main`, whose feed is replaced by one that gives, in turns, one batch that lies on the device, or JPEGs of 500
x 375 pixels: decoded by the workers, on the device, or once (`--cache`). The peer for JPEGs is timm's own loader with its
prefetcher, as many workers and the same augmentation, in front of the step written by hand.

The ways of a model take turns in one process, forwards and backwards. A turn starts with empty loader queues and some steps
that are not measured; clocks are read once the device is idle. A ratio is a ratio of medians. At the end: how often the host
waits for the device in a step, whether fp16 trains, and peak memory. Without a GPU only --quick runs.
"""

import argparse
import contextlib
import gc
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import timm.data
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from input_pipeline import make_photographs
from paired import LR, WEIGHT_DECAY, Enough, Setting, recipe
from table import Row, show
from timm.optim import create_optimizer_v2
from torchvision.datasets import ImageFolder

from common.classification import sources
from common.classification.augmentation import Normalize
from common.classification.batches import Batch, TrainingSamples
from common.classification.color_jitter import ColorJitter
from common.classification.transforms import training_transform
from common.config.fields import AugmentationConfig
from common.data import workers as data_workers
from common.data.batch_plan import BatchPlan
from common.data.cache import open_cache
from common.data.loader import Prefetcher, training_loader, worker_count
from common.data.stream import Stream
from common.launching import launch
from common.run.run import Run
from common.training import step as training_step

OF_LIMIT, OF_TIMM = 0.98, 2.0  # goals: share of the bound, times timm's loader
VARIED = AugmentationConfig(crop_scale=0.08, hflip=0.5, color_jitter=0.4)  # the defaults of timm's loader
CACHE = 1.5  # side of a cached image / side of a crop
WARM_UP = 3  # steps of a turn that are not measured
CLASSES = 2
FILES = ("worker", "device", "cache")


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    models: dict[str, bool]  # name: channels_last
    image_size: int
    batch_size: int
    photographs: int  # in each class
    seconds: float  # of a turn of the step written by hand
    quartets: int  # of turns on data on the device; half as many on files
    workers: int


FULL = Size(
    {"resnet50": True, "vit_small_patch16_224": False, "convnext_tiny": True}, 224, 256, 256, 1.2, 2, worker_count(-1)
)
BRIEF = replace(FULL, models={"resnet50": True}, quartets=1)
QUICK = Size({"test_resnet": True}, 64, 8, 16, 0.0, 1, 1)


def now(device: torch.device) -> float:
    """The time in seconds, once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- where batches come from


class Queue:
    """Batches of a loader whose workers live as long as the benchmark, and are stopped when it is not their turn."""

    def __init__(self, batches: Iterable, ready: int):
        others = multiprocessing.active_children()
        self.batches, self.ready = iter(batches), ready  # how many batches may be prefetched
        next(self.batches)  # starts the workers of a generator
        self.workers = [child.pid for child in multiprocessing.active_children() if child not in others]
        self._tell(signal.SIGSTOP)

    def __iter__(self) -> Iterator:
        return self.batches

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lets the workers run. Prefetched batches are skipped: they would make the first steps cheaper."""
        self._tell(signal.SIGCONT)
        try:
            for _ in range(self.ready):
                next(self.batches)
            yield
        finally:
            self._tell(signal.SIGSTOP)

    def _tell(self, number: int) -> None:
        for worker in self.workers:
            os.kill(worker, number)


@dataclass
class Sources:
    """One batch on the device, and the loaders. Their workers are forked before a model exists."""

    size: Size
    folder: Path
    device: torch.device
    queues: dict[str, Queue] = field(default_factory=dict)
    feeds: dict[str, Prefetcher] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.size
        train, _ = sources.load(sources.Spec(str(self.folder), seed=0, val_share=0.05))
        data = timm.data.resolve_data_config({"input_size": (3, size.image_size, size.image_size)})
        stream, transform = Stream(len(train), size.batch_size, 0), training_transform(VARIED, data)
        augmentations = [ColorJitter(0, VARIED.color_jitter), Normalize(data, torch.float32, torch.device("cpu"))]
        samples = TrainingSamples(train, stream, transform, 0, augmentations)  # which the recipe will have
        kinds = {
            "worker": samples,
            "device": replace(samples, decode="device"),
            "cache": replace(samples, cache=open_cache(len(train), int(CACHE * size.image_size), "")),
        }
        plan = BatchPlan(size.batch_size, 1, size.batch_size)
        for name in FILES:
            loader = training_loader(kinds[name], plan, 0, 10**9, size.workers)
            self.queues[name] = Queue(loader, 4 * size.workers)
        self.queues["timm"] = Queue(self._timm(data), 2 * size.workers)
        self.feeds = {name: Prefetcher(self.queues[name], self.device) for name in FILES}

        generator = torch.Generator().manual_seed(0)
        shape = (size.batch_size, size.image_size, size.image_size, 3)
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).permute(0, 3, 1, 2)
        labels = torch.randint(0, CLASSES, (size.batch_size,), generator=generator)
        none = [torch.zeros(size.batch_size, 0)] * len(augmentations)
        self.resident = Batch(images, labels, torch.arange(size.batch_size), none).to(self.device)
        mean, std = (255 * torch.tensor(data[key], device=self.device)[:, None, None] for key in ("mean", "std"))
        self.normalised = ((self.resident.images.float() - mean) / std).contiguous()

    def _timm(self, data: dict) -> Iterator:
        files = ImageFolder(self.folder)
        files.samples = files.samples * 2000  # a very long epoch: the loader pauses at its end
        loader = timm.data.create_loader(
            files,
            data["input_size"],
            self.size.batch_size,
            is_training=True,
            color_jitter=VARIED.color_jitter,
            scale=(VARIED.crop_scale, 1.0),
            hflip=VARIED.hflip,
            mean=data["mean"],
            std=data["std"],
            num_workers=self.size.workers,
            pin_memory=self.device.type == "cuda",
            device=self.device,
        )
        while True:
            yield from loader


# ---- the step written by hand


class Hand:
    """The step written by hand."""

    def __init__(self, name: str, size: Size, device: torch.device, compiled: bool):
        self.device = device
        self.layout = torch.channels_last if size.models[name] else torch.contiguous_format
        torch.manual_seed(0)
        options = {"img_size": size.image_size} if name.startswith("vit") else {}
        self.model = timm.create_model(name, num_classes=CLASSES, **options).to(device, memory_format=self.layout)
        self.optimizer = create_optimizer_v2(self.model, "adamw", lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
        if compiled:
            self.model.compile()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        images = images.contiguous(memory_format=self.layout)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(images)
        F.cross_entropy(logits.float(), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, batches: Iterator, steps: int) -> float:
        """Seconds of `steps`, after the warm-up."""
        own = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            for _ in range(WARM_UP):
                self.step(*next(batches))
            began = now(self.device)
            for _ in range(steps):
                self.step(*next(batches))
            return now(self.device) - began
        finally:
            torch.backends.cudnn.benchmark = own


# ---- the recipe


class Conducted:
    """Replaces the recipe's feed: gives it the batches of its turns; the others' turns run in between."""

    def __init__(self, batches: Iterator[Batch]):
        self.batches = batches

    def __next__(self) -> Batch:
        return next(self.batches)

    def take(self) -> tuple[float, tuple[str, ...]]:
        return 0.0, ()


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def train(data: Sources, name: str, compiled: bool, precision: str, batches: Iterator[Batch]) -> dict:
    """Runs the recipe on `batches` until they raise `Enough`; returns its accelerator and the losses of its last step."""
    size, seen, start, backward = data.size, {}, launch.start, Run.backward
    jitter = ColorJitter.apply

    def started(config, **options):
        seen["accelerator"] = start(config, **options)
        return seen["accelerator"]

    def passed_back(run, losses):
        seen["losses"] = losses.detach()
        backward(run, losses)

    def jittered(self, images, targets, draws):
        """The resident batch has no draws: its colours stay, as those of the step written by hand."""
        return jitter(self, images, targets, draws) if draws.numel() else (images, targets)

    AcceleratorState._reset_state(reset_partial_state=True)  # otherwise it keeps the precision of the previous run
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as switches:
        json.dump({"compile": compiled, "channels_last": size.models[name]}, switches)
        switches.flush()
        flags = {"config": switches.name, "data": data.folder, "val_share": 0.05, "image_size": size.image_size}
        flags |= {key: getattr(VARIED, key) for key in ("crop_scale", "hflip", "color_jitter")}
        quiet = io.StringIO()
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(training_step, "Prefetcher", lambda loader, device: Conducted(batches)))
            stack.enter_context(replaced(launch, "start", started))
            stack.enter_context(replaced(Run, "backward", passed_back))
            stack.enter_context(replaced(ColorJitter, "apply", jittered))
            # The end of a run kills all data workers of the process; those of the queues are needed for the next model.
            stack.enter_context(replaced(data_workers, "end", lambda: None))
            stack.enter_context(contextlib.redirect_stdout(quiet))
            stack.enter_context(contextlib.redirect_stderr(quiet))
            stack.enter_context(contextlib.suppress(Enough))
            recipe("cls", lambda setting: flags)(Setting(name, size.image_size, size.batch_size, 0))
    return seen


# ---- a model's turns


@dataclass
class Session:
    """One model, with or without torch.compile: images per second in each turn of each way, and other measurements."""

    model: str
    compiled: bool
    speeds: dict[str, list[float]] = field(default_factory=dict)
    syncs: float | None = None  # waits of the host for the device, per step
    memory: dict[str, float] = field(default_factory=dict)  # peak GiB: of the step written by hand, of the recipe
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.model}{', compiled' if self.compiled else ''}"


def run_session(data: Sources, session: Session) -> None:
    """Measures all turns of a model and fills `session`."""
    began, size, device = time.perf_counter(), data.size, data.device
    if session.compiled:
        torch._dynamo.reset()  # graphs of other models count towards its limit of recompilations
    before = allocated(device, peak=False)
    hand = Hand(session.model, size, device, session.compiled)
    resident = endless(data.normalised.contiguous(memory_format=hand.layout), data.resident.labels)
    hand.turn(resident, 2)
    reset_peak(device)
    a_step = hand.turn(resident, 3) / 3
    session.memory["by hand"] = allocated(device, peak=True) - before
    held = allocated(device, peak=False) - before
    steps = max(2, min(200, math.ceil(size.seconds / a_step)))

    def note(way: str, seconds: float) -> None:
        session.speeds.setdefault(way, []).append(size.batch_size * steps / seconds)

    def of_recipe(way: str) -> Iterator[Batch]:
        following = partial(next, data.feeds[way]) if way in data.feeds else lambda: data.resident
        for _ in range(WARM_UP):
            yield following()
        start = now(device)
        for _ in range(steps):
            yield following()
        note(way, now(device) - start)  # the recipe asks for the next batch: these steps are done

    def conduct() -> Iterator[Batch]:
        for _ in range(WARM_UP):
            yield data.resident
        reset_peak(device)
        for way in ["resident", "by hand", "by hand", "resident"] * size.quartets + files * max(1, size.quartets // 2):
            with data.queues[way].turn() if way in data.queues else contextlib.nullcontext():
                if way in ("by hand", "timm"):
                    note(way, hand.turn(resident if way == "by hand" else data.queues[way].batches, steps))
                else:
                    yield from of_recipe(way)
            session.memory.setdefault("recipe", allocated(device, peak=True) - before - held)
        if not session.compiled and device.type == "cuda":
            with counting() as count:
                for _ in range(10):
                    yield data.resident
            session.syncs = count() / 10
        raise Enough

    files = [*FILES, "timm"]
    files += files[::-1]
    train(data, session.model, session.compiled, "bf16", conduct())
    if len(session.speeds.get("timm", ())) < 2:
        raise RuntimeError(f"{session}: the recipe ended before its turns: {session.speeds}")
    session.seconds = time.perf_counter() - began


def endless(*batch: torch.Tensor) -> Iterator:
    while True:
        yield batch


def allocated(device: torch.device, *, peak: bool) -> float:
    """GiB; 0 on the CPU."""
    if device.type != "cuda":
        return 0.0
    return (torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)) / 2**30


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """Counts the waits for the device that torch reports; it does not see those inside nvJPEG."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("synchronizing CUDA operation" in str(warning.message) for warning in said)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def see_fp16(data: Sources, name: str) -> dict:
    """Trains some steps in fp16; returns loss scale, loss and the waits for the device per step."""
    result = {}

    def batches() -> Iterator[Batch]:
        for _ in range(20):
            yield data.resident
        with counting() as count:
            for _ in range(10):
                yield data.resident
        result["syncs"] = count() / 10
        raise Enough

    seen = train(data, name, False, "fp16", batches())
    losses = seen["losses"].float()
    result |= {"scale": seen["accelerator"].scaler.get_scale(), "loss": losses.mean().item()}
    result["works"] = bool(losses.isfinite().all()) and result["scale"] > 0 and result["syncs"] == 0
    tidy()
    return result


def rows_of(session: Session) -> list[Row]:
    median = {way: statistics.median(speeds) for way, speeds in session.speeds.items()}
    limit, rows = median["by hand"], []
    for way in ("resident", *FILES):
        peer, goal = "by hand", OF_LIMIT
        if way != "resident":  # if timm's loader nearly keeps up with the model, twice its speed is impossible
            peer, goal = "timm", min(OF_TIMM, OF_LIMIT * limit / median["timm"])
        what = "on the device" if way == "resident" else f"JPEG, {way}"
        name = "the step by hand" if peer == "by hand" else "timm's loader, the step by hand"
        ratio = median[way] / median[peer]
        rows.append(Row(f"{session}: {what}", "images/s", median[way], name, median[peer], ratio, limit, goal))
    return rows


def measure(
    size: Size, device: torch.device, seconds: float, write: Callable[[dict], None], ways: tuple[bool, ...]
) -> list[Row]:
    """Measures all rows and writes them after each session; sessions that would end after `seconds` are left out."""
    began, sessions, rows, fp16 = time.perf_counter(), [], [], {}
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), 500, 375, size.photographs)
        data = Sources(size, Path(folder), device)
        print(f"{size.workers} workers per loader, ready after {time.perf_counter() - began:.0f} s", flush=True)
        for compiled in ways:
            for name in size.models:
                session = Session(name, compiled)
                slowest = max((each.seconds for each in sessions), default=0)
                took = slowest * (2 if compiled and not any(each.compiled for each in sessions) else 1)
                if time.perf_counter() - began + took > seconds:
                    print(f"{session}: skipped, it would not end within {seconds:.0f} s", flush=True)
                    continue
                run_session(data, session)
                tidy()
                sessions.append(session)
                rows += rows_of(session)
                print(f"{session}: {session.seconds:.0f} s", flush=True)
                write({"rows": rows, "sessions": sessions, "fp16": fp16})
            if device.type == "cuda" and not fp16:
                fp16 |= see_fp16(data, next(iter(size.models)))
                write({"rows": rows, "sessions": sessions, "fp16": fp16})
    show(rows)
    for session in sessions:
        waits = "" if session.syncs is None else f"; the host waits {session.syncs:g} times per step (goal 0)"
        by_hand, ours = session.memory["by hand"], session.memory["recipe"]
        print(f"{session}: peak memory {by_hand:.2f} GiB by hand, {ours:.2f} GiB in the recipe{waits}")
    if fp16:
        print(
            f"fp16: {'works' if fp16['works'] else 'DOES NOT WORK'}; loss {fp16['loss']:.3f}, scale {fp16['scale']:g}, "
            f"the host waits {fp16['syncs']:g} times per step (goal 0)"
        )
    else:
        print("fp16: not tried, it needs a GPU")
    return rows


def fitting(size: Size) -> int:
    """Workers whose batches fit into /dev/shm. A worker holds 10 batches of pixels and 4 of files."""
    of_worker = size.batch_size * (10 * 3 * size.image_size**2 + 4 * 100_000)
    try:
        return max(1, min(size.workers, int(0.8 * shutil.disk_usage("/dev/shm").free) // of_worker))
    except OSError:  # a system without it
        return size.workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: a tiny model, also on a CPU")
    parser.add_argument("--brief", action="store_true", help="one model, without torch.compile, fewer repetitions")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--seconds", type=float, default=500, help="time limit: skip what would end later")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu and not arguments.quick:
        print("not measured: this needs a GPU; --quick shows that it works on any device")
        return
    if not gpu:
        os.environ["ACCELERATE_USE_CPU"] = "1"
        torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no stopped worker is left behind
    size = QUICK if arguments.quick else replace(BRIEF if arguments.brief else FULL, workers=fitting(FULL))
    ways = (False,) if arguments.brief or arguments.eager else (False, True)
    facts = {
        "device": torch.cuda.get_device_name(device) if gpu else "CPU",
        "torch": torch.__version__,
        "timm": timm.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "batch_size": size.batch_size,
        "image_size": size.image_size,
    }
    print(", ".join(f"{key} {value}" for key, value in facts.items()))

    def write(result: dict) -> None:
        if arguments.output:
            lists = {key: [asdict(each) for each in result[key]] for key in ("rows", "sessions")}
            arguments.output.write_text(json.dumps(facts | result | lists, indent=2) + "\n")

    try:
        measure(size, device, arguments.seconds, write, ways)
    finally:
        data_workers.end()  # stopped ones, too


if __name__ == "__main__":
    main()
