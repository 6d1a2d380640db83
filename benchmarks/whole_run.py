"""Measures whole runs of the recipes, launch, evaluations and checkpoints included, beside timm's
and torchvision's parts.

    python benchmarks/whole_run.py [--quick] [--turns N]

Both train the same model on the same JPEGs with the same batch and augmentation (random crops and
flips, or flips), on two CPU processes with a data worker each. The peers are in `peers.py`. Runs
take turns; a ratio is the median of the ratios of turns.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import peers
from photographs import write_boxes, write_classes
from table import Row, compare, run_script, take_turns

ROOT = Path(__file__).resolve().parent.parent
BIN_FOLDER = Path(sys.executable).parent
PEERS = {"cls": "timm's parts", "det": "torchvision's parts"}


@dataclass(frozen=True)
class Setting:
    """What a run trains: an image classifier (cls) at `size` pixels, or a detector (det) at this
    short side.
    """

    task: str
    size: int
    width: int  # of the JPEGs
    height: int
    num_train: int
    num_val: int
    epochs: int
    goal: float

    def __str__(self) -> str:
        images = f"{self.num_train} + {self.num_val} of {self.width} x {self.height}"
        return f"run of {self.task}.py, {self.size} px, {images}"


SETTINGS = (
    Setting("cls", 64, 4000, 3000, 300, 40, 6, goal=4.0),
    Setting("cls", 64, 500, 375, 4000, 400, 4, goal=1.15),
    Setting("det", 128, 4000, 3000, 300, 40, 6, goal=2.5),
    Setting("det", 128, 640, 480, 1000, 100, 4, goal=1.3),
)


def build_our_command(setting: Setting, folder: Path, output: str) -> list[object]:
    flags = {
        "data": folder,
        "model": peers.MODEL,
        "epochs": setting.epochs,
        "workers": 1,
        "tracker": "none",
        "output_dir": output,
    }
    if setting.task == "cls":
        flags |= {
            "image_size": setting.size,
            "crop_scale": peers.CROP_SCALE,
            "global_batch_size": peers.BATCH_SIZE,
        }
    else:
        flags |= {
            "short_sides": setting.size,
            "long_side": 1333,
            "global_batch_size": peers.BOX_BATCH_SIZE,
        }
        flags |= peers.FCOS_FLAGS
    launch = [
        BIN_FOLDER / "accelerate",
        "launch",
        "--config_file",
        ROOT / "accelerate_configs/multi_cpu.yaml",
    ]
    return [
        *launch,
        ROOT / f"recipes/{setting.task}.py",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]


def build_peer_command(setting: Setting, folder: Path, output: str) -> list[object]:
    launch = [BIN_FOLDER / "torchrun", "--nproc_per_node", 2, "--standalone", peers.__file__]
    return [*launch, setting.task, folder, setting.size, setting.epochs, output]


def time_run(build_command, setting: Setting, scratch: Path) -> tuple[float, float]:
    """Seconds, and CPU seconds of all processes, each with one thread."""
    words = [
        str(word)
        for word in build_command(setting, scratch / "data", tempfile.mkdtemp(dir=scratch))
    ]
    start = os.times()
    subprocess.run(
        words, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, check=True
    )
    end = os.times()
    cpu = end.children_user + end.children_system - start.children_user - start.children_system
    return end.elapsed - start.elapsed, cpu


def measure_setting(setting: Setting, turns: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "data"
        for seed, (split, num_images) in enumerate(
            (("train", setting.num_train), ("val", setting.num_val))
        ):
            if setting.task == "cls":
                write_classes(folder / split, setting.width, setting.height, num_images, seed)
            else:
                write_boxes(folder, split, setting.width, setting.height, num_images, seed)
        peer = PEERS[setting.task]
        commands = {"ours": build_our_command, peer: build_peer_command}
        ways = {
            name: partial(time_run, command, setting, Path(scratch))
            for name, command in commands.items()
        }
        times = take_turns(ways, turns)
    seconds = {name: [run[0] for run in runs] for name, runs in times.items()}
    cpu = {name: [run[1] for run in runs] for name, runs in times.items()}
    return [
        compare(str(setting), "s", seconds, peer, goal=setting.goal),
        compare(str(setting), "s of CPU", cpu, peer),
    ]


def measure(turns: int, quick: bool) -> list[Row]:
    settings = SETTINGS
    if quick:
        settings = [
            replace(setting, num_train=64, num_val=8, epochs=1)
            for setting in (SETTINGS[1], SETTINGS[-1])
        ]
    return [row for setting in settings for row in measure_setting(setting, turns)]


if __name__ == "__main__":
    run_script(__doc__, measure)
