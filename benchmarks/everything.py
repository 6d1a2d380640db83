"""Runs the benchmarks of this folder on this machine and prints one table. `make bench` calls it.

    python benchmarks/everything.py [--only SCRIPT ...] [--quick]

It takes some ten minutes. A ratio above 1 means that ours is better.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import Row, show

FOLDER = Path(__file__).resolve().parent
# In the order of docs/results.md.
SCRIPTS = ("input_pipeline", "loop", "detection", "startup", "checkpoint", "shards")


def run(script: str, flags: list[str]) -> list[Row]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, FOLDER / f"{script}.py", *flags, "--output", output]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"benchmarks/{script}.py failed")
        rows = json.loads(output.read_text())
    print(f"benchmarks/{script}.py: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return [Row(**row) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, help="scripts to run")
    parser.add_argument("--quick", action="store_true", help="only check that it works")
    args = parser.parse_args()
    flags = ["--quick"] if args.quick else ["--turns", "2"]
    rows = []
    for script in args.only:
        rows += run(script, flags)
    show(rows)


if __name__ == "__main__":
    main()
