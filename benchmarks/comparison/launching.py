"""Starts a training as ranks on the CPU, with the environment that torchrun gives."""

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.distributed.elastic.utils.distributed import get_free_port
from torchvision.transforms import RandomHorizontalFlip, RandomResizedCrop
from tracing import trace

CHECKOUTS = Path("build/checkouts").resolve()  # of the scripts that are in no package


@dataclass(frozen=True)
class Launch:
    """One start of a training, of two epochs."""

    folder: Path  # where the ranks work; a resumed start has that of the killed one
    data: Path
    variant: str  # of the subject
    num_processes: int
    global_batch_size: int
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

    def get_checkpoint(self, name: str) -> str | None:
        """The path of a checkpoint to resume from or to evaluate; None to train from scratch."""
        folder = self.folder if self.resume else self.weights
        return f"{folder}/{name}" if folder else None


def start(launch: Launch, train: Callable[[Launch], None]) -> None:
    """Run `train` on each rank, in forks of this process.

    Raises RuntimeError with the output if one fails that was not to be killed.
    """
    launch.log.mkdir(parents=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(get_free_port()))
    ranks = []
    for rank in range(launch.num_processes):
        ranks.append(get_context("fork").Process(target=run_rank, args=(launch, train, str(rank))))
        ranks[-1].start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks) and not launch.kill_after:
        raise RuntimeError("".join(path.read_text() for path in launch.log.glob("*.txt")))


def run_rank(launch: Launch, train: Callable[[Launch], None], rank: str) -> None:
    sys.stdout = sys.stderr = (launch.log / f"{rank}.txt").open("w")
    os.chdir(launch.folder)
    size = str(launch.num_processes)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # checkpoints have options in them, too
    torch.manual_seed(launch.seed)  # for trainers that don't
    if not launch.augment:  # of torchvision; other trainers have a flag
        RandomResizedCrop.get_params = lambda _, image, *args: (0, 0, image.height, image.width)
        RandomHorizontalFlip.p = property(lambda _: 0, lambda *_: None)
    trace(launch.log / f"{rank}.jsonl", launch.data, launch.kill_after, launch.weights is not None)
    train(launch)


def run_script(path: Path, args: str, changes: Mapping[str, str] | None = None) -> None:
    """Be the script at `path` with this command line, or a copy with changes of its folder's texts."""
    if changes:
        folder = Path(tempfile.mkdtemp())
        for source in path.parent.glob("*.py"):
            text = source.read_text()
            for old, new in changes.items():
                text = text.replace(old, new)
            (folder / source.name).write_text(text)
        path = folder / path.name
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *args.split()]
    runpy.run_path(str(path), run_name="__main__")
