"""Draws one metric of several runs over each other.

    python benchmarks/curves.py --key eval/AP50 --output curves.png "ImageNet weights=runs/a" "from nothing=runs/b"

docs/results.md has such pictures.
"""

import argparse
import json
from pathlib import Path

from common.run import plots

COLOURS = (plots.ORANGE, plots.BLUE, plots.GREEN, plots.INK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER", help=f"run folders, at most {len(COLOURS)}")
    parser.add_argument("--key", required=True, help="of metrics.jsonl, such as eval/top1: a share, drawn in per cent")
    parser.add_argument("--output", type=Path, required=True, help="the PNG file")
    arguments = parser.parse_args()

    figure = plots.new_figure(7.5, 4.2)
    axes = figure.subplots()
    for run, colour in zip(arguments.runs, COLOURS, strict=False):
        label, _, folder = run.rpartition("=")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        points = [(row["step"], 100 * row[arguments.key]) for row in rows if arguments.key in row]
        axes.plot(*zip(*points, strict=True), color=colour, label=label, linewidth=1.8, marker="o", markersize=4)
    axes.set(xlabel="step", ylabel=f"{plots.display_name(arguments.key.removeprefix('eval/'))} (%)")
    axes.set_ylim(0)
    axes.grid(color=plots.PALE, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    plots.save(figure, arguments.output)


if __name__ == "__main__":
    main()
