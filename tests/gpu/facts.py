"""Prints the facts of a machine for the report of `make gpu`, as JSON. A process of its own: the checks get whole GPUs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from everything import machine  # noqa: E402

from common.distributed import environment  # noqa: E402


def driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return None


def main() -> None:
    facts = machine()
    if facts["gpus"]:
        properties = [torch.cuda.get_device_properties(number) for number in range(len(facts["gpus"]))]
        facts["gpu_memory_gib"] = [round(each.total_memory / 2**30, 1) for each in properties]
        facts["compute_capability"] = [f"{each.major}.{each.minor}" for each in properties]
        facts["precisions"] = ["fp32", *["bf16"] * torch.cuda.is_bf16_supported(including_emulation=False), "fp16"]
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["cudnn"] = torch.backends.cudnn.version()
    versions = {"driver": driver(), "cuda": torch.version.cuda, "commit": environment._commit(ROOT / "Makefile")}
    print(json.dumps(facts | versions | {"date": time.strftime("%Y-%m-%d %H:%M:%S %z")}))


if __name__ == "__main__":
    main()
