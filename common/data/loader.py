"""Data loaders: for each micro-step, a data worker makes a batch of this rank's positions of the stream."""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from common.data import workers as data_workers
from common.data.batch_plan import BatchPlan
from common.data.stream import Stream
from common.data.workers import Handover
from common.distributed import devices, watchdog
from common.distributed.collectives import local_world_size, rank, world_size
from common.distributed.environment import count_cores
from common.errors import Refused
from common.patches.multiprocessing import call_on_unsent


class DeviceBatch:
    """Base of a task's batch: a dataclass whose tensors, also in lists and dicts, move together."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    broken: tuple[str, ...]  # images that could not be read: name and reason

    def to(self, device: torch.device):
        # A copy to MPS would still read a batch that is gone
        # (https://github.com/pytorch/pytorch/issues/189690).
        in_stream = devices.has_streams(device)
        return _map(self, lambda tensor: tensor.to(device, non_blocking=in_stream))

    def pin_memory(self):
        return _map(self, torch.Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory, which another stream has filled, until `stream` has done its work so far."""
        _map(self, lambda tensor: tensor.record_stream(stream))


def _map(value, function):
    """Apply `function` to each tensor in nested lists, dicts and batches; keep everything else."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, DeviceBatch):
        return type(value)(*(_map(getattr(value, field.name), function) for field in fields(value)))
    if isinstance(value, list):
        return [_map(part, function) for part in value]
    return (
        {key: _map(part, function) for key, part in value.items()}
        if isinstance(value, dict)
        else value
    )


@dataclass
class _Positions:
    """This rank's positions, one array per micro-step, for the steps `[start, stop)`."""

    stream: Stream
    plan: BatchPlan
    rank: int
    start: int
    stop: int

    def __iter__(self) -> Iterator[np.ndarray]:
        spans = [
            self.plan.get_span(self.rank, micro_step) for micro_step in range(self.plan.micro_steps)
        ]
        for step in range(self.start, self.stop):
            for span in spans:
                yield self.stream.get_positions(step, span)

    def __len__(self) -> int:
        return (self.stop - self.start) * self.plan.micro_steps


def training_loader(
    samples: Any, plan: BatchPlan, start: int, stop: int, workers: int
) -> DataLoader:
    """This rank's micro-batches of the steps `[start, stop)`, in order: not for Accelerate's `prepare`."""
    return _loader(samples, _Positions(samples.stream, plan, rank(), start, stop), workers)


def evaluation_loader(samples: Any, batch_size: int, workers: int) -> DataLoader:
    """This rank's batches of a set that the ranks cover together, every sample once, in the same
    batches on any layout.
    """
    return _loader(
        samples, samples.batches(batch_size)[rank() :: world_size()], workers, evaluates=True
    )


def prefetch_images(source: Any, stream: Stream, positions: np.ndarray) -> None:
    """Begin to read the images at `positions`, and those at the next positions of this process, if
    they lie in blocks.
    """
    if stream.blocks is None:
        return
    worker = get_worker_info()
    # Until this process makes its next batch, or the one after it.
    num_steps = worker.num_workers if worker else 1
    next_positions = positions + num_steps * stream.global_batch_size
    source.expect(stream.get_indices(positions))
    source.expect(stream.get_indices(next_positions))


class _Loader(DataLoader):
    """Refuses to start data workers that lack locks, which lie in /dev/shm, or open files."""

    evaluates = False  # then the watchdog is told of each batch: the evaluation makes progress

    def __iter__(self) -> Any:
        try:
            batches = super().__iter__()
        except OSError as error:
            problem = (
                f"{self.num_workers} data workers can't be started ({error.strerror or error})"
            )
            needs = (
                "some MiB of /dev/shm that can be written to (docker run --shm-size 1g), memory, "
                "and open files"
            )
            raise Refused(
                f"{problem}: they need {needs} (ulimit -n); or take --workers 0"
            ) from error
        return self._told(batches)

    def _told(self, batches: Iterator) -> Iterator:
        """What a data worker refuses is one line, without the traceback that torch puts before it."""
        try:
            for batch in batches:
                if self.evaluates:
                    watchdog.note("evaluating")
                yield batch
        except Refused as error:
            raise type(error)(
                str(error.args[0]).rstrip().rpartition(f"{type(error).__name__}: ")[2]
            ) from error


class Prefetcher:
    """Batches of a loader on the device, with the time spent waiting for them.

    To a GPU they travel on a stream of their own, while it computes: training is queued ahead of it.
    """

    def __init__(self, loader: Iterable[DeviceBatch], device: torch.device):
        self._batches, self._device = iter(loader), device
        self._copies = torch.Stream(device) if devices.has_streams(device) else None
        self._waited, self._broken = 0.0, ()

    def __next__(self) -> DeviceBatch:
        began = time.perf_counter()
        watchdog.note("waiting for data")
        try:
            batch = next(self._batches)
        except (ConnectionError, EOFError) as error:
            problem = "a data worker died as it handed over a batch"
            raise RuntimeError(
                f"{problem}: was it killed for want of memory? Take fewer --workers"
            ) from error
        watchdog.note("training")
        self._waited += time.perf_counter() - began
        with self._copies or contextlib.nullcontext():
            batch = batch if self._device.type == "cpu" else batch.to(self._device)
        self._broken += batch.broken
        if self._copies:
            computing = torch.accelerator.current_stream(self._device)
            computing.wait_stream(self._copies)
            batch.record_stream(computing)
        return batch

    def take(self) -> tuple[float, tuple[str, ...]]:
        """Seconds waited and images that could not be read since the last call."""
        taken = self._waited, self._broken
        self._waited, self._broken = 0.0, ()
        return taken


def worker_count(asked: int) -> int:
    """`asked`, or for -1 this rank's share of the machine's cores, less one for training itself."""
    if asked >= 0:
        return asked
    return max(0, min(16, count_cores() // local_world_size() - 1))


def _loader(samples: Dataset, batches, workers: int, evaluates: bool = False) -> DataLoader:
    # A worker that is never asked for a batch prints tracebacks at the end: torch first writes to
    # its queue while Python's garbage collector is closing that.
    workers = min(worker_count(workers), len(batches))
    if workers:
        # Runs before multiprocessing sends SIGTERM, which workers ignore, and waits for them.
        atexit.unregister(data_workers.end)
        atexit.register(data_workers.end)
    handover = Handover()
    loader = _Loader(
        samples,
        batch_sampler=batches,
        num_workers=workers,
        multiprocessing_context=data_workers.context() if workers else None,
        collate_fn=handover,
        worker_init_fn=partial(_begin_worker, handover),
        pin_memory=devices.has_streams(),
        prefetch_factor=4 if workers else None,
        persistent_workers=workers > 0 and evaluates,  # the next evaluation finds them ready
    )
    loader.evaluates = evaluates
    return loader


def _begin_worker(handover: Handover, _worker: int) -> None:
    data_workers.begin(handover.far.fileno())
    call_on_unsent(_die_of)


def _die_of(error: BaseException, _batch: object) -> None:
    problem = f"data worker {os.getpid()} can't hand over a batch ({error})"
    advice = "raise the limit of open files (ulimit -n), or take fewer --workers"
    print(f"{problem}: {advice}", file=sys.stderr, flush=True)
    os._exit(1)
