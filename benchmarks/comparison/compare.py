"""Trainers on one, two and three processes, and after a kill (docs/comparison.md).

    python benchmarks/comparison/compare.py [SUBJECT ...] [--repeat SEEDS]

adds what it measures to build/comparison/results.json, and draws chart.png of all that is there.
SUBJECTs are files of subjects/; one that can't run says why. Scripts that are in no package come from
build/checkouts/: timm/, vision/ and accelerate/, at the commits in requirements.txt.
"""

import argparse
import importlib
import json
import os
from pathlib import Path

from matplotlib.figure import Figure
from measuring import LAYOUTS, measure

FOLDER = Path("build/comparison").resolve()
SUBJECTS = [path.stem for path in Path(__file__).parent.glob("subjects/*.py")]


def compare(name: str, num_seeds: int) -> dict:
    """The results of each variant of a subject, or why there are none."""
    results = {}
    try:
        subject = importlib.import_module(f"subjects.{name}")
        for index, variant in enumerate(subject.VARIANTS):
            root = FOLDER / f"{name}-{index}"
            results[variant] = measure(subject, variant, root, num_seeds)
    except (ImportError, RuntimeError) as error:
        results[name] = str(error).splitlines()[-1]
    return results


def draw_chart(results: dict, path: Path) -> None:
    """A point for each seed and each change of the number of processes."""
    figure = Figure(figsize=(9, 4), layout="constrained")
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
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    os.environ.update(CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true")
    for name in args.subjects:
        measured = compare(name, args.repeat)
        print(json.dumps(measured, indent=1), flush=True)
        results |= measured
        path.write_text(json.dumps(results, indent=1))
    draw_chart(results, FOLDER / "chart.png")


if __name__ == "__main__":
    main()
