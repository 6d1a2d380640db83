"""`make gpu`: runs the checks that need real GPUs, prints a table, and writes a file that can be attached to a report.

    python -m tests.gpu [--only NAME ...] [--quick] [--seconds 720] [--output build/gpu.json] [--through SCRIPT]

Each row is printed when its check ends: ok, FAILED with the cause, or not run with what the machine lacks. Each check starts
the recipes in separate processes and has a time limit, so that a crash or a hang is a row as well. The exit code is 0 if no row
is FAILED, 1 if one is, 2 if there is no GPU, and 130 after Ctrl-C, which ends all processes.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.gpu.checks import CHECKS, Check
from tests.gpu.machine import Failed, Machine, NotRun, private

LINES = 60  # of a failed process's output that the file keeps


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks whose names contain one of these words")
    parser.add_argument(
        "--quick", action="store_true", help="only check that it works: few steps, results and speed are ignored"
    )
    parser.add_argument(
        "--seconds", type=float, default=720, help="time limit of everything; those of the checks grow with it"
    )
    parser.add_argument("--output", type=Path, default=Path("build/gpu.json"), help="file for the report")
    parser.add_argument(
        "--through", nargs="+", default=[], metavar="SCRIPT", help="script that runs every script (pretended GPUs)"
    )
    arguments = parser.parse_args()
    checks = [c for c in CHECKS if not arguments.only or any(word in c.name for word in arguments.only)]
    if not checks:
        parser.error(f"--only: no check has one of these words in its name: {', '.join(c.name for c in CHECKS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    scratch, until = Path(tempfile.mkdtemp()), time.monotonic() + arguments.seconds
    machine = Machine(scratch / "gpu", until, tuple(arguments.through), arguments.quick)
    try:
        machine.facts = json.loads(machine.python("tests/gpu/facts.py"))
        if not machine.gpus:
            print("make gpu needs a GPU that torch sees: look at nvidia-smi and CUDA_VISIBLE_DEVICES", file=sys.stderr)
            sys.exit(2)
        print(describe(machine.facts), flush=True)
        sys.exit(report(machine, checks, arguments.seconds / 720, arguments.output))
    except Failed as failure:
        print(f"make gpu can't look at the GPUs: {failure}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the cleanup
        machine.end_all()
        shutil.rmtree(scratch, ignore_errors=True)


def describe(facts: dict) -> str:
    names = ", ".join(
        f"{count} x {name}" for name in dict.fromkeys(facts["gpus"]) if (count := facts["gpus"].count(name))
    )
    return (
        f"{names}, {facts['gpu_memory_gib'][0]:g} GiB, driver {facts['driver']}, CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, "
        f"NCCL {facts['nccl']}, torch {facts['packages']['torch']}"
    )


def report(machine: Machine, checks: list[Check], slower: float, output: Path) -> int:
    """Runs the checks, prints and writes the rows; returns the exit code."""
    rows, began, wide = [], time.monotonic(), max(len(check.name) for check in checks)
    for check in checks:
        row = make(replace(check, seconds=slower * check.seconds), machine)
        rows.append(row)
        print(f"{row['check']:{wide}}  {row['state']:8}{row['seconds']:5.0f} s  {row['told']}", flush=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        whole = len(rows) == len(CHECKS) and not machine.quick
        facts = {"machine": machine.facts, "whole": whole, "seconds": round(time.monotonic() - began, 1)}
        output.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    failed = sum(row["state"] == "FAILED" for row in rows)
    states = ", ".join(f"{sum(row['state'] == s for row in rows)} {s}" for s in ("ok", "FAILED", "not run"))
    print(f"{states}; {time.monotonic() - began:.0f} s; {output} can be attached to a report")
    return int(failed > 0)


def make(check: Check, machine: Machine) -> dict:
    """Runs a check and returns its row, whatever happens."""
    began, evidence = time.monotonic(), ""
    machine.check_until = min(began + check.seconds, machine.until)
    try:
        if began >= machine.until:
            raise Failed("not started: the time limit of everything has passed")
        state, told = "ok", check.make(machine)
    except NotRun as reason:
        state, told = "not run", str(reason)
    except Failed as failure:
        state, told, evidence = "FAILED", str(failure), failure.evidence
    except Exception as error:  # the files of a run are not as expected
        state, told = "FAILED", f"{type(error).__name__}: {error}"
    finally:
        machine.end_all()
    row = {"check": check.name, "state": state, "told": private(" ".join(told.split()))[:400]}
    row["seconds"] = round(time.monotonic() - began, 1)
    return row | ({"evidence": private(evidence).splitlines()[-LINES:]} if evidence else {})
