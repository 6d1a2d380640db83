"""What a rank of a run does, as lines of JSON: the files of each batch, each loss, each step.

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


def trace(path: Path, data: Path, kill_after: int, is_frozen: bool) -> None:
    """From here on, write the events of this process to `path`.

    kill_after: SIGKILL after so many steps; 0 for never.
    is_frozen: steps change nothing, for trainers that evaluate only after an epoch of training.
    """
    log = path.open("a", buffering=1)
    files: list[str] = []
    steps = itertools.count(1)
    backward = torch.Tensor.backward
    fetch = _MapDatasetFetcher.fetch

    def write(**event) -> None:
        log.write(f"{json.dumps(event)}\n")  # print is silenced by some trainers

    def note_open(event: str, args: tuple) -> None:
        path = args[0] if event == "open" else ""
        if str(path).startswith(f"{data}/") and path not in files[-1:]:  # some open it twice
            files.append(path)

    def note_fetch(fetcher, indices):
        files.clear()
        batch = fetch(fetcher, indices)
        dataset = fetcher.dataset
        # One without a length is ours, which is asked for positions of a stream.
        write(files=files, size=len(dataset) if hasattr(dataset, "__len__") else 0)
        return batch

    def note_backward(tensor, gradient=None, **kwargs):
        loss = tensor.detach().double()
        write(loss=float((loss if gradient is None else loss * gradient).sum()))
        return backward(tensor, gradient, **kwargs)

    def note_step(*_) -> None:
        step = next(steps)
        write(step=step)
        if step == kill_after:
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
