"""Measures whole runs of `recipes/cls.py`, launch and evaluation included, beside timm's and torchvision's parts.

    python benchmarks/whole_run.py [--quick] [--brief] [--output FILE]

4,000 + 400 JPEGs of 500 x 375 pixels, 4 epochs, the same model, batch and augmentation (crops, mirrored half the time) on two
CPU processes with a data worker each. Peers are two loops as people write them, started by torchrun: one of timm's data set,
loader, optimizer, scheduler and checkpoint saver, in the order of its train script; one of torchvision's v2 transforms, with
torch's loader and optimizer. Each evaluates once per epoch and writes a checkpoint. Runs take turns; a ratio is the median of
the ratios of turns.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from input_pipeline import make_photographs
from table import Row, compare, script, take_turns
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

ROOT = Path(__file__).resolve().parent.parent
EPOCHS, BATCH, LR, WEIGHT_DECAY, CROP_SCALE = 4, 64, 1e-3, 0.05, 0.08
# Where reading is the cost, and where the model is: name, pixels, goal.
SETTINGS = (("test_resnet", 64, 2.0), ("resnet18", 64, 1.0))
Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]


def ours(folder: Path, model: str, size: int, output: str) -> list[object]:
    """The command of a run."""
    flags = {
        "data": folder,
        "model": model,
        "image_size": size,
        "crop_scale": CROP_SCALE,
        "epochs": EPOCHS,
        "global_batch_size": BATCH,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "workers": 1,
        "tracker": "none",
        "output_dir": output,
    }
    launch = ["accelerate", "launch", "--config_file", ROOT / "accelerate_configs/multi_cpu.yaml"]
    return [*launch, ROOT / "recipes/cls.py", *(f"--{flag}={value}" for flag, value in flags.items())]


def theirs(peer: str, folder: Path, model: str, size: int, output: str) -> list[object]:
    """The command of a peer's run."""
    launch = ["torchrun", "--nproc_per_node", 2, "--standalone", Path(__file__).resolve()]
    return [*launch, "--peer", peer, folder, model, size, output]


# ---- the peers


def timm_loaders(folder: Path, network: nn.Module, size: int) -> tuple[Batches, Batches]:
    data = resolve_data_config({"img_size": size}, model=network)
    train, val = (
        create_dataset("", root=str(folder), split=split, is_training=split == "train") for split in ("train", "val")
    )
    options = {"mean": data["mean"], "std": data["std"], "interpolation": data["interpolation"], "num_workers": 1}
    options |= {"distributed": True, "device": torch.device("cpu")}
    share = BATCH // dist.get_world_size()
    training = create_loader(
        train, data["input_size"], share, is_training=True, scale=(CROP_SCALE, 1.0), color_jitter=None, **options
    )
    return training, create_loader(val, data["input_size"], share, crop_pct=data["crop_pct"], **options)


def torchvision_loaders(folder: Path, _: nn.Module, size: int) -> tuple[Batches, Batches]:
    end = [
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    vary = [v2.RandomResizedCrop(size, (CROP_SCALE, 1.0), antialias=True), v2.RandomHorizontalFlip()]
    transforms = {"train": v2.Compose([*vary, *end]), "val": v2.Compose([v2.Resize(size), v2.CenterCrop(size), *end])}
    loaders = []
    for split, transform in transforms.items():
        images = ImageFolder(folder / split, transform)
        sampler = DistributedSampler(images, shuffle=split == "train")
        share = BATCH // dist.get_world_size()
        loaders.append(
            DataLoader(
                images, share, sampler=sampler, num_workers=1, drop_last=split == "train", persistent_workers=True
            )
        )
    return loaders[0], loaders[1]


def evaluate(network: nn.Module, batches: Batches) -> float:
    """Top-1 over all ranks."""
    network.eval()
    counts = torch.zeros(2)
    with torch.inference_mode():
        for images, labels in batches:
            counts += torch.tensor([(network(images).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train_peer(peer: str, folder: str, model: str, size: str, output: str) -> None:
    """The run of a peer on this rank."""
    dist.init_process_group("gloo")
    plain = timm.create_model(model, num_classes=2)
    network = DistributedDataParallel(plain)
    loaders = timm_loaders if peer == "timm" else torchvision_loaders
    training, validation = loaders(Path(folder), plain, int(size))
    optimizer = create_optimizer_v2(plain, "adamw", lr=LR, weight_decay=WEIGHT_DECAY)
    updates = len(training)
    schedule, _ = create_scheduler_v2(optimizer, num_epochs=EPOCHS, step_on_epochs=False, updates_per_epoch=updates)
    Path(output).mkdir(parents=True, exist_ok=True)
    saver = (
        CheckpointSaver(plain, optimizer, checkpoint_dir=output, recovery_dir=output) if dist.get_rank() == 0 else None
    )
    for epoch in range(EPOCHS):
        training.sampler.set_epoch(epoch)
        network.train()
        for place, (images, labels) in enumerate(training):
            loss = F.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step_update(epoch * updates + place + 1)
            if place % 50 == 0:
                loss.item()  # as for a line of the log
        top1 = evaluate(plain, validation)
        if saver:
            saver.save_checkpoint(epoch, top1)
    dist.destroy_process_group()


# ---- turns


def environment() -> dict[str, str]:
    """One thread per process; commands are found beside this Python."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def seconds(command: list[object]) -> float:
    began = time.perf_counter()
    done = subprocess.run([*map(str, command)], env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr.strip()}")
    return time.perf_counter() - began


def measure(quick: bool, brief: bool) -> tuple[list[Row], None]:
    turns, images = (1, 40) if quick else (1 if brief else 3, 2000)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "photographs"
        make_photographs(folder / "train", 500, 375, images)
        make_photographs(folder / "val", 500, 375, max(8, images // 10))
        for model, size, goal in SETTINGS[: 1 if quick else None]:

            def run(command: Callable[..., list[object]], model: str = model, size: int = size) -> float:
                return seconds(command(folder, model, size, tempfile.mkdtemp(dir=scratch)))

            peers = {f"{peer}'s parts": partial(run, partial(theirs, peer)) for peer in ("timm", "torchvision")}
            times = take_turns({"ours": partial(run, ours)} | peers, turns)
            what = f"a run of cls.py, {model}, {size} px"
            rows += [compare(what, "s", times, peer, goal=goal) for peer in peers]
    return rows, None


if __name__ == "__main__":
    if "--peer" in sys.argv:
        train_peer(*sys.argv[2:])
    else:
        script(__doc__, measure)
