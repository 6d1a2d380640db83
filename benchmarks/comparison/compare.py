"""Trainers on one, two and three processes, and after a kill (docs/comparison.md).

    python benchmarks/comparison/compare.py [SUBJECT ...] [--checkouts FOLDER] [--repeat SEEDS]

prints the table and writes results.json and chart.png to build/comparison/. SUBJECTs are files of
subjects/; one that can't run says why.
"""

import argparse
import importlib
import json
import os
import shutil
from pathlib import Path

from data import CLASSIFICATION, DETECTION, save_digits, save_scenes
from matplotlib.figure import Figure
from measuring import measure

FOLDER = Path("build/comparison").resolve()
SUBJECTS = [path.stem for path in Path(__file__).parent.glob("subjects/*.py")]
LAYOUTS = "loss 1 to 2, 2 to 3"
COLUMNS = [LAYOUTS, "evaluated on 1, 2, 3", "killed: samples more / less often", "killed: loss"]


def compare(name: str, checkouts: Path, num_seeds: int) -> dict[str, dict | str]:
    """The results of each variant of a subject, or why there are none."""
    results = {}
    try:
        subject = importlib.import_module(f"subjects.{name}")
        for index, variant in enumerate(subject.VARIANTS):
            root = FOLDER / f"{name}-{index}"
            shutil.rmtree(root, ignore_errors=True)
            results[variant] = measure(subject, variant, root, checkouts, num_seeds)
    except (ImportError, RuntimeError) as error:
        results[name] = str(error).splitlines()[-1]
    return results


def format_row(name: str, cells: dict | str) -> str:
    """A line of the table, in Markdown."""
    if isinstance(cells, dict):
        cells = " | ".join(format_value(cells[column]) for column in COLUMNS)
    return f"| {name} | {cells} |"


def format_value(value: object) -> str:
    """Losses have two digits; there are two for each seed."""
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    return f"{value:.1e}" if isinstance(value, float) else str(value)


def draw_chart(results: dict[str, dict | str], path: Path) -> None:
    """A point for each seed and each change of the number of processes."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, result in results.items():
        if isinstance(result, dict):
            for pair in result[LAYOUTS]:
                axes.scatter(pair, [name, name], c=["C0", "C1"])
    axes.set(xscale="log", xlabel="difference of losses: 1 to 2 processes (blue), 2 to 3 (orange)")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="*", default=SUBJECTS)
    parser.add_argument("--checkouts", type=Path, default="build", help="timm/, vision/, ...")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    os.environ.update(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    shutil.rmtree(FOLDER, ignore_errors=True)
    for sizes, save in ((CLASSIFICATION, save_digits), (DETECTION, save_scenes)):
        for num_train in (sizes.num_train, sizes.num_train_even):
            save(FOLDER / str(num_train), num_train)
    results = {}
    print(format_row("trainer", " | ".join(COLUMNS)), "| --- | --- | --- | --- | --- |", sep="\n")
    for name in args.subjects:
        for variant, result in compare(name, args.checkouts.resolve(), args.repeat).items():
            results[variant] = result
            print(format_row(variant, result), flush=True)
    (FOLDER / "results.json").write_text(json.dumps(results, indent=1))
    draw_chart(results, FOLDER / "chart.png")


if __name__ == "__main__":
    main()
