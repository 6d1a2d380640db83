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
from common.errors import Refused, get_os_reason
from common.patches.multiprocessing import call_on_unsent


class DeviceBatch:
    """Base of a task's batch: a dataclass whose tensors, also in lists and dicts, move together."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    broken: tuple[str, ...]  # images that could not be read: name and reason

    def to(self, device: torch.device):
        # A copy to MPS would still read a batch that is gone
        # (https://github.com/pytorch/pytorch/issues/189690).
        non_blocking = devices.has_streams(device)
        return _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self):
        return _map_tensors(self, torch.Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """Reserve the memory, which another stream has filled, until `stream` has done its work so far."""
        _map_tensors(self, lambda tensor: tensor.record_stream(stream))


def _map_tensors(value, function):
    """Apply `function` to each tensor in nested lists, dicts and batches; all else stays as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, DeviceBatch):
        items = [_map_tensors(getattr(value, field.name), function) for field in fields(value)]
        return type(value)(*items)
    if isinstance(value, list):
        return [_map_tensors(item, function) for item in value]
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    return value


@dataclass
class _Positions:
    """This rank's positions, one array per micro-step, for the steps `[start, stop)`."""

    stream: Stream
    plan: BatchPlan
    rank: int
    start: int
    stop: int

    def __iter__(self) -> Iterator[np.ndarray]:
        spans = []
        for micro_step in range(self.plan.micro_steps):
            spans.append(self.plan.get_span(self.rank, micro_step))
        for step in range(self.start, self.stop):
            for span in spans:
                yield self.stream.get_positions(step, span)

    def __len__(self) -> int:
        return (self.stop - self.start) * self.plan.micro_steps


def create_train_loader(
    samples: Any, plan: BatchPlan, start: int, stop: int, num_workers: int
) -> DataLoader:
    """This rank's micro-batches of the steps `[start, stop)`, in order: not for Accelerate's `prepare`."""
    positions = _Positions(samples.stream, plan, rank(), start, stop)
    return _create_loader(samples, positions, num_workers)


def create_eval_loader(samples: Any, batch_size: int, num_workers: int) -> DataLoader:
    """This rank's batches of a set that the ranks cover together, every sample once.

    The batches are the same on any layout.
    """
    batches = samples.batches(batch_size)[rank() :: world_size()]
    return _create_loader(samples, batches, num_workers, is_evaluation=True)


def prefetch_images(source: Any, stream: Stream, positions: np.ndarray) -> None:
    """Start to read the images at `positions` and at the next positions of this process.

    Only images that lie in blocks are read ahead.
    """
    if stream.blocks is None:
        return
    worker = get_worker_info()
    # Until this process makes its next batch, or the one after it.
    num_steps = worker.num_workers if worker else 1
    next_positions = positions + num_steps * stream.global_batch_size
    source.prefetch(stream.get_indices(positions))
    source.prefetch(stream.get_indices(next_positions))


class _Loader(DataLoader):
    """Refuses to start data workers that lack locks, which lie in /dev/shm, or open files."""

    is_evaluation = False  # then the watchdog is told of each batch: the evaluation makes progress

    def __iter__(self) -> Any:
        try:
            batches = super().__iter__()
        except OSError as error:
            reason = get_os_reason(error)
            requirements = (
                "some MiB of /dev/shm that can be written to (docker run --shm-size 1g), memory, "
                "and open files"
            )
            raise Refused(
                f"{self.num_workers} data workers can't be started ({reason}): they need "
                f"{requirements} (ulimit -n); or take --workers 0"
            ) from error
        return self._iterate(batches)

    def _iterate(self, batches: Iterator) -> Iterator:
        """The batches; what a data worker refuses is one line, without torch's traceback before it."""
        try:
            for batch in batches:
                if self.is_evaluation:
                    watchdog.note("evaluating")
                yield batch
        except Refused as error:
            name = type(error).__name__
            message = str(error.args[0]).rstrip().rpartition(f"{name}: ")[2]
            raise type(error)(message) from error


class Prefetcher:
    """Batches of a loader on the device, with the time spent waiting for them.

    To a GPU they travel on a stream of their own, while it computes: training is queued ahead of it.
    """

    def __init__(self, loader: Iterable[DeviceBatch], device: torch.device):
        self._batches = iter(loader)
        self._device = device
        self._copy_stream = torch.Stream(device) if devices.has_streams(device) else None
        self._wait_s = 0.0
        self._broken: tuple[str, ...] = ()

    def __next__(self) -> DeviceBatch:
        start = time.perf_counter()
        watchdog.note("waiting for data")
        try:
            batch = next(self._batches)
        except (ConnectionError, EOFError) as error:
            problem = "a data worker died as it handed over a batch"
            raise RuntimeError(
                f"{problem}: was it killed for want of memory? Take fewer --workers"
            ) from error
        watchdog.note("training")
        self._wait_s += time.perf_counter() - start
        if self._device.type != "cpu":
            with self._copy_stream or contextlib.nullcontext():
                batch = batch.to(self._device)
        self._broken += batch.broken
        if self._copy_stream:
            compute_stream = torch.accelerator.current_stream(self._device)
            compute_stream.wait_stream(self._copy_stream)
            batch.record_stream(compute_stream)
        return batch

    def pop_stats(self) -> tuple[float, tuple[str, ...]]:
        """Seconds waited and images that could not be read since the last call."""
        wait_s = self._wait_s
        broken = self._broken
        self._wait_s = 0.0
        self._broken = ()
        return wait_s, broken


def count_workers(requested: int) -> int:
    """`requested`, or for -1 this rank's share of the machine's cores, less one for training itself."""
    if requested >= 0:
        return requested
    return max(0, min(16, count_cores() // local_world_size() - 1))


def _create_loader(
    samples: Dataset, batches, num_workers: int, is_evaluation: bool = False
) -> DataLoader:
    # A worker that never gets a batch to make prints tracebacks when it ends: torch first writes to
    # its queue while Python's garbage collector is closing that.
    num_workers = min(count_workers(num_workers), len(batches))
    if num_workers:
        # Runs before multiprocessing sends SIGTERM, which workers ignore, and waits for them.
        atexit.unregister(data_workers.stop_workers)
        atexit.register(data_workers.stop_workers)
    handover = Handover()
    loader = _Loader(
        samples,
        batch_sampler=batches,
        num_workers=num_workers,
        multiprocessing_context=data_workers.get_context() if num_workers else None,
        collate_fn=handover,
        worker_init_fn=partial(_init_worker, handover),
        pin_memory=devices.has_streams(),
        prefetch_factor=4 if num_workers else None,
        persistent_workers=num_workers > 0
        and is_evaluation,  # the next evaluation finds them ready
    )
    loader.is_evaluation = is_evaluation
    return loader


def _init_worker(handover: Handover, _worker: int) -> None:
    data_workers.init_worker(handover.sender.fileno())
    call_on_unsent(_exit_with_error)


def _exit_with_error(error: BaseException, _batch: object) -> None:
    problem = f"data worker {os.getpid()} can't hand over a batch ({error})"
    advice = "raise the limit of open files (ulimit -n), or take fewer --workers"
    print(f"{problem}: {advice}", file=sys.stderr, flush=True)
    os._exit(1)
