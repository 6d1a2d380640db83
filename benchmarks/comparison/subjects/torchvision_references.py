"""torchvision's references/classification/train.py."""

import argparse

import torch
import torchvision
from image_folder import build_model
from launching import Launch, run_script
from torchvision.models._api import register_model

VARIANTS = {"torchvision references, classification": 17}
VERSION = torchvision.__version__
METRIC = r"Acc@1 ([\d.]+)"
CHANGES = "CPU, gloo, no device ids; test_vit at 32 pixels; Namespace in checkpoints; a seed"
ARGS = """--model test_vit --device cpu --epochs 2 --lr 0.02 --workers 0 --output-dir .
    --train-crop-size 32 --val-resize-size 32 --val-crop-size 32"""


def train(launch: Launch) -> None:
    register_model("test_vit")(lambda weights, num_classes: build_model())
    run_references(launch, "classification", ARGS)


def run_references(launch: Launch, task: str, args: str) -> None:
    """Run train.py of a task's references on the CPU: train, resume or only evaluate."""
    move_to_cpu()
    torch.serialization.add_safe_globals([argparse.Namespace])
    args += f" --data-path {launch.data} --batch-size {launch.batch_size}"
    if launch.resume:
        args += " --resume checkpoint.pth"
    if launch.weights:
        args += f" --test-only --resume {launch.weights}/checkpoint.pth"
    run_script(launch.checkouts / f"vision/references/{task}/train.py", args)


def move_to_cpu() -> None:
    """The references name CUDA and NCCL in their code."""
    build_tensor = torch.tensor
    start_group = torch.distributed.init_process_group
    torch.cuda.set_device = lambda device: None
    torch.tensor = lambda *args, device=None, **kwargs: build_tensor(*args, **kwargs)
    torch.distributed.init_process_group = lambda backend, **kwargs: start_group("gloo", **kwargs)
