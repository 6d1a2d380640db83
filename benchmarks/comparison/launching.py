"""Starts a training as ranks on the CPU, with the environment that torchrun gives."""

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import RandomHorizontalFlip, RandomResizedCrop
from tracing import trace


@dataclass(frozen=True)
class Launch:
    """One start of a training, of two epochs."""

    folder: Path  # where the ranks work; a resumed start has that of the killed one
    data: Path
    checkouts: Path  # has folders with the scripts of some trainers
    variant: str  # of the subject
    num_processes: int
    global_batch_size: int = 24
    augment: bool = True
    seed: int = 0
    kill_after: int = 0  # steps; 0 for never
    resume: bool = False
    weights: Path | None = None  # folder of a finished training: only evaluate its weights

    @property
    def log(self) -> Path:
        """Folder with the events and the output of each rank."""
        return self.folder / f"log-{self.resume}"

    @property
    def batch_size(self) -> int:
        return self.global_batch_size // self.num_processes


def start(launch: Launch, train: Callable[[Launch], None]) -> None:
    """Run `train` on each rank, in forks of this process.

    Raises RuntimeError with the output if one fails that was not to be killed.
    """
    launch.log.mkdir(parents=True)
    port = get_free_port()
    ranks = []
    for rank in range(launch.num_processes):
        ranks.append(get_context("fork").Process(target=run_rank, args=(launch, train, rank, port)))
        ranks[-1].start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks) and not launch.kill_after:
        raise RuntimeError("".join(path.read_text() for path in launch.log.glob("*.txt")))


def run_rank(launch: Launch, train: Callable[[Launch], None], rank: int, port: int) -> None:
    sys.stdout = sys.stderr = (launch.log / f"{rank}.txt").open("w")
    os.chdir(launch.folder)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(launch.num_processes)))
    torch.manual_seed(launch.seed)  # for trainers that don't
    forget_device_ids()
    if not launch.augment:  # of torchvision; other trainers have a flag
        RandomResizedCrop.get_params = lambda _, image, *args: (0, 0, image.height, image.width)
        RandomHorizontalFlip.forward = lambda _, image: image
    trace(launch.log / f"{rank}.jsonl", launch.data, launch.kill_after, launch.weights is not None)
    train(launch)


def forget_device_ids() -> None:
    """Trainers that are written for GPUs name a device to DDP, which refuses one on the CPU."""
    initialize = DistributedDataParallel.__init__

    def initialize_on_cpu(network, module, **kwargs):
        initialize(network, module, **kwargs | {"device_ids": None})

    DistributedDataParallel.__init__ = initialize_on_cpu


def run_script(path: Path, args: str) -> None:
    """Be the script at `path` with this command line."""
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *args.split()]
    runpy.run_path(str(path), run_name="__main__")
