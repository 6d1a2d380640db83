"""How do samples get from the stream into batches on the device?

An endless batch sampler yields, micro-step after micro-step, the positions that are this rank's; a worker turns positions
into sample indices, reads, varies and stacks. It starts at any step at once and workers never restart.
"""

import atexit
import contextlib
import hashlib
import multiprocessing.queues
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from common import data_workers, device_decoding, drop_path, heartbeat, mixing
from common.augmentation import TrainingTransform
from common.cache import Cache
from common.collectives import local_world_size, rank, world_size
from common.config import AugmentationConfig
from common.decoding import Picture
from common.device_augmentation import draw_colours, draw_erasing
from common.device_decoding import Decoder, Encoded
from common.environment import cores
from common.handover import Handover
from common.images import BrokenImage
from common.plan import BatchPlan
from common.randomness import key_of, mix, seed_generators
from common.sources import Source
from common.stream import Stream

DRAWS = "VISION_RECIPES_DRAWS"  # names a folder, in the environment: what is drawn for training is written down there
_SMALL = 2**16  # bytes
_NEIGHBOURS = 100  # how many broken images in a row are passed over before a black one stands in


class Movable:
    """A dataclass whose tensors, also in lists and dicts, go to a device together."""

    def to(self, device: torch.device):
        # A copy to MPS would still read a batch that is gone (https://github.com/pytorch/pytorch/issues/189690).
        goes_on = torch.device(device).type == "cuda"
        return _map(self, lambda tensor: tensor.to(device, non_blocking=goes_on))

    def __getstate__(self) -> dict:
        """On the way out of a data worker: each tensor takes a file and a handshake, where small ones could just be sent."""
        return {name: _map(value, _small_as_array) for name, value in vars(self).items()}

    def __setstate__(self, state: dict) -> None:
        vars(self).update({name: _map(value, torch.from_numpy, np.ndarray) for name, value in state.items()})

    def pin_memory(self):
        return _map(self, torch.Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory, which another stream has filled, until `stream` has done what is asked of it so far."""
        _map(self, lambda tensor: tensor.record_stream(stream))


def _map(value, function, kind: type = torch.Tensor):
    """`function` of each `kind`, wherever it stands in lists, dicts and batches; all else as it is."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Movable):
        return type(value)(*(_map(getattr(value, field.name), function, kind) for field in fields(value)))
    if isinstance(value, list):
        return [_map(part, function, kind) for part in value]
    if isinstance(value, dict):
        return {key: _map(part, function, kind) for key, part in value.items()}
    return value


def _small_as_array(tensor: torch.Tensor) -> torch.Tensor | np.ndarray:
    return tensor.numpy() if tensor.device.type == "cpu" and tensor.nbytes <= _SMALL else tensor


@dataclass
class Batch(Movable):
    """A micro-batch of B samples."""

    images: torch.Tensor  # uint8[B, 3, H, W], of training with the colours of a pixel together (channels_last)
    labels: torch.Tensor  # int64[B], or bool[B, classes] for multi-label data
    positions: torch.Tensor  # int64[B], of the stream; sample indices in evaluation
    colours: torch.Tensor | None = None  # float32[B, 3], see common.device_augmentation.draw_colours
    erasing: torch.Tensor | None = None  # float32[B, 6], see common.device_augmentation.draw_erasing
    mixing: torch.Tensor | None = None  # float32[B / 2, 6], see common.mixing.draw
    drop_path: torch.Tensor | None = None  # float32[layers, B], see common.drop_path.draws
    readable: torch.Tensor | None = None  # bool[B] in evaluation; in training a neighbour stands in
    broken: tuple[str, ...] = ()  # images that could not be read: name and reason
    encoded: Encoded | None = None  # images that are not in `images` yet: `Feed` has the device decode them


@dataclass
class TrainingSamples(Dataset):
    """Positions of the stream -> `Batch`; a pure function, whichever worker computes it."""

    source: Source
    stream: Stream
    transform: TrainingTransform
    seed: int
    varied: AugmentationConfig  # of which the transform does one part, and the device will do the other
    drop_path_layers: int = 0
    cache: Cache | None = None
    decode: str = "worker"  # or "device"

    def __post_init__(self) -> None:
        if self.decode == "device":
            device_decoding.check(self.transform, self.cache is not None)

    def __getitems__(self, positions: np.ndarray) -> Batch:
        keys = mix(positions, key_of(self.seed, "augmentation")).tolist()
        images, indices, broken = [], [], []
        for index, key in zip(self.stream.indices(positions).tolist(), keys, strict=True):
            image, index = self._read(index, key, broken)
            images.append(image)
            indices.append(index)
        batch = self._batch(images, self.source.labels[indices], positions)
        batch.broken = tuple(broken)
        return batch

    def blank(self, count: int) -> Batch:
        """`count` samples of noise with everything that a batch of this run has: a step of them needs a step's memory."""
        if self.decode == "device":
            images = [device_decoding.noise()] * count
        else:
            images = list(torch.randint(256, (count, 3, *self.transform.size), dtype=torch.uint8))
        labels = np.zeros((count, *self.source.labels.shape[1:]), self.source.labels.dtype)
        return self._batch(images, labels, np.arange(count))

    def _batch(
        self, images: list[torch.Tensor | device_decoding.Jpeg], labels: np.ndarray, positions: np.ndarray
    ) -> Batch:
        """These images, and what is drawn for their positions."""
        images, encoded = device_decoding.stack(images, self.transform)
        batch = Batch(images, torch.from_numpy(labels), torch.from_numpy(positions), encoded=encoded)
        varied, size = self.varied, self.transform.size
        if varied.color_jitter:
            batch.colours = torch.from_numpy(draw_colours(positions, self.seed, varied.color_jitter))
        if varied.random_erasing:
            batch.erasing = torch.from_numpy(draw_erasing(positions, self.seed, varied.random_erasing, *size))
        if varied.mixup or varied.cutmix:
            batch.mixing = torch.from_numpy(mixing.draw(positions, self.seed, varied.mixup, varied.cutmix, *size))
        if self.drop_path_layers:
            batch.drop_path = torch.as_tensor(drop_path.draws(positions, self.seed, self.drop_path_layers))
        return batch

    def _read(self, index: int, key: int, broken: list[str]) -> tuple[torch.Tensor | device_decoding.Jpeg, int]:
        """The varied image at `index`, or its nearest readable neighbour above, and the index it really has."""
        for distance in range(_NEIGHBOURS):
            neighbour = (index + distance) % len(self.source)
            seed_generators(key)
            try:
                return self._varied(neighbour), neighbour
            except BrokenImage as error:
                if distance == 0:  # a broken neighbour counts when its own turn comes
                    broken.append(f"{self.source.name(index)}: {error}")
        seed_generators(key)
        return self.transform(Picture(_black())), index

    def _varied(self, index: int) -> torch.Tensor | device_decoding.Jpeg:
        if self.decode == "device":
            return device_decoding.varied(self.transform, self._picture(index), self.source.name(index))
        return self.transform(self._picture(index))

    def _picture(self, index: int) -> Picture:
        if self.cache is None:
            return Picture(self.source.content(index))
        return self.cache.picture(index, lambda: Picture(self.source.content(index)))


@dataclass
class RecordedSamples(Dataset):
    """Training samples, and a line for each that is drawn: its position, its index, and a hash of its varied pixels.

    A process appends to a file of its own in `folder`. Data workers draw ahead: a kill loses what they have drawn, and the
    next start draws it again.
    """

    samples: Dataset  # TrainingSamples, or another task's
    folder: Path

    def __getitems__(self, positions: np.ndarray):
        batch = self.samples.__getitems__(positions)
        shown = _decoded(batch, Decoder(torch.device("cpu")))
        indices = self.samples.stream.indices(positions).tolist()
        hashes = (hashlib.sha1(image.numpy().tobytes()).hexdigest() for image in shown.images)
        drawn = zip(positions.tolist(), indices, hashes, strict=True)
        with (self.folder / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{position} {index} {pixels}\n" for position, index, pixels in drawn)
        return batch


@dataclass
class EvaluationSamples(Dataset):
    """Sample indices -> `Batch`; an image that can't be read is black, and marked."""

    source: Source
    transform: Callable[[Image.Image], torch.Tensor]  # see common.augmentation.evaluation_transform

    def batches(self, most: int) -> list[np.ndarray]:
        """The indices of all samples, in order, in batches of up to `most`."""
        return [np.arange(start, min(start + most, len(self.source))) for start in range(0, len(self.source), most)]

    def __getitems__(self, indices: np.ndarray) -> Batch:
        images, broken = [], []
        readable = torch.ones(len(indices), dtype=torch.bool)
        for place, index in enumerate(indices.tolist()):
            try:
                image = self.transform(self.source.image(index))
            except BrokenImage as error:
                broken.append(f"{self.source.name(index)}: {error}")
                image, readable[place] = self.transform(_black()), False
            images.append(image)
        labels = torch.from_numpy(self.source.labels[indices])
        return Batch(torch.stack(images), labels, torch.from_numpy(indices), readable=readable, broken=tuple(broken))


@dataclass
class _Positions:
    """This rank's positions, one array a micro-step, for the steps `[start, stop)`."""

    stream: Stream
    plan: BatchPlan
    rank: int
    start: int
    stop: int

    def __iter__(self) -> Iterator[np.ndarray]:
        spans = [self.plan.span(self.rank, micro_step) for micro_step in range(self.plan.micro_steps)]
        for step in range(self.start, self.stop):
            for span in spans:
                yield self.stream.positions(step, span)


def training_loader(samples: TrainingSamples, plan: BatchPlan, start: int, stop: int, workers: int) -> DataLoader:
    """This rank's micro-batches of the steps `[start, stop)`, in order. Not for Accelerate's `prepare`: it is split already."""
    positions = _Positions(samples.stream, plan, rank(), start, stop)
    if folder := os.environ.get(DRAWS):
        Path(folder).mkdir(parents=True, exist_ok=True)
        samples = RecordedSamples(samples, Path(folder))
    return _loader(samples, positions, workers)


def evaluation_loader(samples: EvaluationSamples, batch_size: int, workers: int) -> DataLoader:
    """This rank's batches of a set that the ranks cover together, every sample once.

    The batches are the same on every layout, so that an image meets the same neighbours in them.
    """
    return _loader(samples, samples.batches(batch_size)[rank() :: world_size()], workers, _EvaluationLoader)


class _EvaluationLoader(DataLoader):
    """Each of its batches shows that the evaluation gets on."""

    def __iter__(self) -> Iterator:
        for batch in super().__iter__():
            heartbeat.note("evaluating")
            yield batch


class Feed:
    """The batches of a loader on the device, and what it took to get them.

    To a GPU they travel on a stream of their own, while it computes: training is queued ahead of it.
    """

    def __init__(self, loader: Iterable[Movable], device: torch.device):
        self._batches, self._device = iter(loader), device
        self._decoder = Decoder(device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waited, self._broken = 0.0, ()

    def __next__(self) -> Batch:
        began = time.perf_counter()
        heartbeat.note("waiting for data")
        try:
            batch = next(self._batches)
        except (ConnectionError, EOFError) as error:
            raise RuntimeError(
                "a data worker died as it handed over a batch: was it killed for want of memory? Take fewer --workers"
            ) from error
        heartbeat.note("training")
        self._waited += time.perf_counter() - began
        with torch.cuda.stream(self._copies) if self._copies else contextlib.nullcontext():
            batch = _decoded(batch.to(self._device), self._decoder)
        self._broken += batch.broken
        if self._copies:
            computing = torch.cuda.current_stream(self._device)
            computing.wait_stream(self._copies)
            batch.record_stream(computing)
        return batch

    def take(self) -> tuple[float, tuple[str, ...]]:
        """Seconds waited and images that could not be read since the last call."""
        taken = self._waited, self._broken
        self._waited, self._broken = 0.0, ()
        return taken


def _decoded(batch: Movable, decoder: Decoder) -> Movable:
    """The batch, on the decoder's device, with all of its images."""
    if not isinstance(batch, Batch) or batch.encoded is None:
        return batch
    images, broken = decoder(batch.images, batch.encoded)
    return replace(batch, images=images, broken=batch.broken + broken, encoded=None)


def worker_count(asked: int) -> int:
    """`asked`, or for -1 the cores this process may use, shared by the ranks of the machine, less one for training itself."""
    if asked >= 0:
        return asked
    return max(0, min(16, cores() // local_world_size() - 1))


def _loader(samples: Dataset, batches, workers: int, kind: type[DataLoader] = DataLoader) -> DataLoader:
    if workers:
        # It comes before multiprocessing asks them by SIGTERM, to which they are deaf, and waits for them.
        atexit.unregister(data_workers.end)
        atexit.register(data_workers.end)
    handover = Handover()
    return kind(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        multiprocessing_context=data_workers.context() if workers else None,
        collate_fn=handover,
        worker_init_fn=partial(_begin_worker, handover),
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=4 if workers else None,
        persistent_workers=workers > 0 and kind is _EvaluationLoader,  # the next evaluation finds them ready
    )


def _begin_worker(handover: Handover, worker: int) -> None:
    data_workers.begin(handover.far.fileno())
    # What can't be handed over (no memory, too few file descriptors) Python would drop, and training wait for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_die_of)


def _die_of(error: BaseException, batch: object) -> None:
    print(
        f"data worker {os.getpid()} can't hand over a batch ({error}): raise the limit of open files (ulimit -n), or take "
        "fewer --workers",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _black() -> Image.Image:
    return Image.new("RGB", (32, 32))
