"""What a rank of a run does: for each step, a line of JSON with its loss and the files it saw.

All is seen from below the trainer: files as Python opens them while a data set is asked for a
batch, losses as `Tensor.backward` is called on them, steps as torch's optimizers make them.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.optim import optimizer
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _MapDatasetFetcher

# accelerate's example has images to train on and to evaluate on in one folder: sizes tell them apart.
VAL_SIZES = (101, 96)


def trace(path: Path, data: Path, kill_after: int, is_frozen: bool) -> None:
    """From here on, write the steps of this process to `path`.

    kill_after: SIGKILL after so many steps; 0 for never.
    is_frozen: steps change nothing, for trainers that evaluate only after an epoch of training.
    """
    log = path.open("a", buffering=1)
    opened = []
    batches = []  # fetched, and not trained on yet: in this order they will be
    losses = []
    steps = itertools.count(1)
    backward = torch.Tensor.backward
    fetch = _MapDatasetFetcher.fetch

    def note_open(event: str, args: tuple) -> None:
        path = args[0] if event == "open" else ""
        if str(path).startswith(f"{data}/") and path not in opened[-1:]:  # some open it twice
            opened.append(path)

    def note_fetch(fetcher, indices):
        opened.clear()
        batch = fetch(fetcher, indices)
        # A data set without a length is ours, which is asked for positions of a stream.
        size = len(fetcher.dataset) if hasattr(fetcher.dataset, "__len__") else 0
        if opened and size not in VAL_SIZES and "/val" not in opened[0]:
            batches.append(opened.copy())
        return batch

    def note_backward(tensor, gradient=None, **kwargs):
        if batches:  # a loss before the first batch is no part of training
            weight = 1 if gradient is None else gradient
            losses.append(float((tensor.detach().double() * weight).sum()))
        return backward(tensor, gradient, **kwargs)

    def note_step(*_) -> None:
        files = []
        for _ in losses:
            files += batches.pop(0)
        log.write(f"{json.dumps([sum(losses), files])}\n")  # print is silenced by some trainers
        losses.clear()
        if next(steps) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note_open)
    torch.Tensor.backward = note_backward
    _MapDatasetFetcher.fetch = note_fetch
    # Whatever a trainer asks for: data workers would read the files in another process.
    DataLoader.num_workers = property(lambda _: 0, lambda *_: None)
    DataLoader.prefetch_factor = property(lambda *_: None, lambda *_: None)
    if is_frozen:
        optimizer.register_optimizer_step_pre_hook(lambda instance, *_: instance.zero_grad())
    optimizer.register_optimizer_step_post_hook(note_step)
