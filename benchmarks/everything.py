"""Runs the benchmarks of this folder on this machine and prints one table. `make bench` calls it.

    python benchmarks/everything.py [--only SCRIPT ...] [--quick]

It takes some ten minutes: each script makes fewer repetitions than when it is called alone. Results are written to
benchmarks/results/<machine>.json. A ratio above 1 means that ours is better.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from table import Row, show

FOLDER = Path(__file__).resolve().parent
# In the order of docs/results.md.
SCRIPTS = ("input_pipeline", "loop", "detection", "startup", "checkpoint", "shards")
PACKAGES = ("torch", "torchvision", "timm", "accelerate", "datasets", "pillow", "simplejpeg")


def machine() -> dict:
    """Hardware and package versions."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    cores = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", cores.read_text() if cores.exists() else "", re.M)
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": gpus,
        "python": platform.python_version(),
        "packages": {package: version(package) for package in PACKAGES},
    }


def name_of(facts: dict) -> str:
    """File name for a machine: its GPUs, or if it has none its processor and cores."""
    text = (
        f"{len(facts['gpus'])}x {facts['gpus'][0]}" if facts["gpus"] else f"{facts['processor']} {facts['cores']} cores"
    )
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def measure(script: str, flag: str) -> dict:
    """Runs a script; returns its rows of the table, its figures and its duration in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        output, began = Path(folder) / "figures.json", time.perf_counter()
        command = [sys.executable, str(FOLDER / f"{script}.py"), flag, "--output", str(output)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"benchmarks/{script}.py ended with {done.returncode}:\n{done.stderr.strip()}")
        result = json.loads(output.read_text())
    return result | {"seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, help="scripts to run")
    parser.add_argument("--quick", action="store_true", help="only check that it works")
    parser.add_argument("--output", type=Path, default=FOLDER / "results", help="folder for the results")
    arguments = parser.parse_args()
    facts, began, results = machine(), time.perf_counter(), {}
    for script in arguments.only:
        if script == "shards" and not importlib.util.find_spec("webdataset"):
            print("benchmarks/shards.py: left out; pip install webdataset", file=sys.stderr, flush=True)
            continue
        results[script] = measure(script, "--quick" if arguments.quick else "--brief")
        print(f"benchmarks/{script}.py: {results[script]['seconds']:.0f} s", file=sys.stderr, flush=True)
    rows = [Row(**row) for result in results.values() for row in result["rows"]]
    gpus = ", ".join(facts["gpus"]) or "no GPU"
    print(f"{facts['processor']}, {facts['cores']} cores, {gpus}; torch {facts['packages']['torch']}")
    show(rows)
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{name_of(facts)}.json"
    record = {
        "machine": facts,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": time.perf_counter() - began,
        "scripts": results,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{time.perf_counter() - began:.0f} s; {path}")


if __name__ == "__main__":
    main()
