"""Measures a training step on a slow network, with and without compressed gradients.

    python benchmarks/network.py [--quick] [--output FILE]

recipes/cls.py runs on two machines with one process each, on the CPU: network namespaces of this machine, joined by a cable of
100 Mbit/s in each direction. The first machine's interface counts the bytes that it sends. They are compared with the bytes
that the gradients need: in a ring of W processes each sends 2 (W - 1) / W of the reduced data, with two processes exactly all
of it. A step can't be shorter than the cable needs for these. It takes root and iproute2 (ip and tc); without them it prints
that and ends.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from paired import ROOT, Enough
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.training import timm_models

CABLE_MBIT = 100
NAMESPACES = (f"network-{os.getpid()}-0", f"network-{os.getpid()}-1")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
CLASSES, IMAGE_SIZE = 10, 32  # digits: small, so that computing takes little of a step
WARM_UP = 1  # step at the start of a run that is not measured


@dataclass(frozen=True)
class Setting:
    """How a run sends its gradients."""

    comm_hook: str = "none"
    bucket_cap_mb: int = 25
    micro_steps: int = 1

    def needed(self, model: torch.nn.Module) -> int:
        """Bytes that each of two processes must send per step, for float32 weights."""
        numbers = 0
        for parameter in model.parameters():
            rows = len(parameter)
            columns = parameter.numel() // rows
            worth_it = 2 * (rows + columns) < rows * columns  # otherwise PowerSGD sends the matrix uncompressed
            numbers += rows + columns if self.comm_hook == "powersgd" and worth_it else parameter.numel()
        return numbers * (2 if self.comm_hook in ("fp16", "bf16") else 4)


SETTINGS = (
    Setting(),
    Setting(bucket_cap_mb=1),
    Setting(micro_steps=2),
    Setting("fp16"),
    Setting("bf16"),
    Setting("powersgd"),
    Setting("powersgd", micro_steps=2),
)


# --- two machines


@contextlib.contextmanager
def two_machines() -> Iterator[None]:
    """Creates two network namespaces joined by a slow cable; at the end kills what still runs there."""
    first, second = NAMESPACES
    try:
        for space in NAMESPACES:
            command("ip", "netns", "add", space)
        command("ip", "-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for space, address in zip(NAMESPACES, ADDRESSES, strict=True):
            command("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                command("ip", "-n", space, "link", "set", link, "up")
            # Packets within one machine have up to 64 KiB; a smaller burst would let none through.
            limit = ("rate", f"{CABLE_MBIT}mbit", "burst", "128kb", "latency", "400ms")
            command("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield
    finally:
        for space in set(NAMESPACES) & {line.split()[0] for line in command("ip", "netns", "list").splitlines()}:
            for process in command("ip", "netns", "pids", space).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            command("ip", "netns", "delete", space)


def command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def measure(work: dict) -> list[list[tuple[float, int]]]:
    """Runs `train` on both machines; returns, for each setting of `work`, time and bytes sent at the end of each step."""
    folder = Path(tempfile.mkdtemp())
    (folder / "work.json").write_text(json.dumps(work))
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    launcher += ["--config_file", "accelerate_configs/2node_cpu.yaml", "--main_process_ip", ADDRESSES[0]]
    machines, logs = [], [(folder / f"{number}.log").open("w+") for number in range(2)]
    try:
        for space, log in zip(NAMESPACES, logs, strict=True):
            words = ["ip", "netns", "exec", space, *launcher, __file__, "--work", str(folder)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(folder)}
            machines.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
        if any([machine.wait() for machine in machines]):  # noqa: C419 (waits for both)
            sys.exit(Path(logs[0].name).read_text())
        return json.loads((folder / "stamps.json").read_text())
    finally:
        for machine, log in zip(machines, logs, strict=False):
            machine.kill()
            log.close()
        shutil.rmtree(folder, ignore_errors=True)


# --- on each of them


def train(folder: Path) -> None:
    """Makes some steps of the recipe in each setting, and reads clock and byte counter after each."""
    work = json.loads((folder / "work.json").read_text())
    spec = importlib.util.spec_from_file_location("cls", ROOT / "recipes" / "cls.py")
    recipe = sys.modules["cls"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    everything = []

    def stamp(*_) -> None:
        everything[-1].append((time.perf_counter(), int(SENT.read_text())))
        if len(everything[-1]) == WARM_UP + work["steps"]:
            raise Enough

    register_optimizer_step_post_hook(stamp)
    for number, setting in enumerate(work["settings"]):
        flags = {
            "model": work["model"],
            "image_size": IMAGE_SIZE,
            "global_batch_size": 4,
            "max_micro_batch_size": 2 // setting.pop("micro_steps"),
            "max_steps": 1000,
            "eval_every": 1000,
            "checkpoint_every": 1000,
            "workers": 0,
            "tracker": "none",
            "output_dir": folder,
            "name": number,
        }
        sys.argv = ["cls.py", *(f"--{flag}={value}" for flag, value in (flags | setting).items())]
        everything.append([])
        with contextlib.suppress(Enough):
            recipe.main()
    if os.environ["RANK"] == "0":
        (folder / "stamps.json").write_text(json.dumps(everything))
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it works: a tiny model")
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON file")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # internal: folder with the work of a machine
    arguments = parser.parse_args()
    if arguments.work:
        return train(arguments.work)
    model, steps = ("test_vit", 10) if arguments.quick else ("convnext_pico", 3)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(two_machines())
        except (OSError, subprocess.CalledProcessError) as error:
            reason = " ".join((getattr(error, "stderr", "") or str(error)).split())
            print(f"not measured: two machines can't be made here ({reason}); it takes root, iproute2 and sch_tbf")
            return None
        stamps = measure({"model": model, "steps": steps, "settings": [asdict(setting) for setting in SETTINGS]})

    built = timm_models.build_classifier(
        model, CLASSES, pretrained=False, image_size=IMAGE_SIZE, drop=0, drop_path=0, seed=0
    )
    parameters = sum(parameter.numel() for parameter in built.parameters())
    print(f"{model}, {parameters / 1e6:.2f} M parameters; 2 machines, {CABLE_MBIT} Mbit/s; {steps} steps each")
    print(f"{'hook':10}{'bucket':>8}{'micro-steps':>13}{'bytes per step':>26}{'step (ms)':>12}{'cable alone':>13}")
    print(f"{'':31}{'measured':>13}{'needed':>13}")
    rows = []
    for setting, marks in zip(SETTINGS, stamps, strict=True):
        marks = marks[WARM_UP - 1 :]
        seconds = [end - begin for (begin, _), (end, _) in itertools.pairwise(marks)]
        row = asdict(setting) | {
            "step_ms": 1e3 * statistics.median(seconds),
            "least_ms": 1e3 * min(seconds),
            "most_ms": 1e3 * max(seconds),
            "sent": (marks[-1][1] - marks[0][1]) / len(seconds),
            "needed": setting.needed(built),
        }
        row["cable_ms"] = row["needed"] * 8 / CABLE_MBIT / 1e3
        rows.append(row)
        bucket = "all" if setting.comm_hook == "powersgd" else f"{setting.bucket_cap_mb} MiB"
        print(
            f"{setting.comm_hook:10}{bucket:>8}{setting.micro_steps:13}{row['sent']:13,.0f}{row['needed']:13,}"
            f"{row['step_ms']:12.0f}{row['cable_ms']:13.0f}"
        )
    if arguments.output:
        result = {"model": model, "parameters": parameters, "mbit": CABLE_MBIT, "steps": steps, "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
