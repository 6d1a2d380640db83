"""Draws the figures of docs/ideas.md, and prints the numbers that its text claims.

    python benchmarks/ideas.py [--quick] [--output FOLDER]

The experiments are in ideas_measured.py and ideas_profile.py, and take about a minute on two cores. `--quick` shortens the
curves of trainings and the profile; gradients and master weights stay as they are.
"""

import argparse
import json
import os
from pathlib import Path

import ideas_measured as measured
import ideas_profile
import numpy as np
import torch
from ideas_diagrams import COLOURS, WIDTH, data_parallel, formats, main_process, plain, processes
from matplotlib.patches import Rectangle

from common.run import plots
from common.run.plots import BLUE, GREEN, GREY, INK, ORANGE

FOLDER = Path(__file__).parent.parent / "docs/pictures"


def overlap(found: dict):
    """Layers of the backward pass above the all-reduces of their buckets, for both ways."""
    figure = plots.new_figure(WIDTH, 4.6)
    panels = figure.subplots(2, sharex=True)
    colours = (BLUE, GREEN, ORANGE, "#7A5195")
    for axes, way, title in zip(panels, ("overlap", "after"), ("DDP", "All-reduce only at the end"), strict=True):
        axes.set_yticks([3.0, 2.35, 1.0, 0.35], ["rank 0  backward", "all-reduce", "rank 1  backward", "all-reduce"])
        for rank, ranked in enumerate(found[way]):
            base = 3.0 - 2 * rank
            for number, (start, end) in enumerate(ranked["layers"]):
                bucket = 0 if number < 3 else 1 + (number - 3) // 2
                axes.add_patch(
                    Rectangle((start, base - 0.27), end - start, 0.54, color=colours[bucket], alpha=0.55, linewidth=0)
                )
                axes.add_patch(
                    Rectangle((start, base - 0.27), end - start, 0.54, fill=False, edgecolor="white", linewidth=1.2)
                )
            for bucket, (start, end) in enumerate(ranked["reduces"]):
                axes.add_patch(
                    Rectangle((start, base - 0.9), end - start, 0.5, facecolor=colours[bucket], edgecolor="white")
                )
        late, complete = ideas_profile.exposed(found[way])
        axes.axvline(complete, color=INK, linewidth=1, linestyle=":")
        axes.set_title(
            f"{title}: {late:,.0f} ms of all-reduce after the end of the backward pass",
            fontsize=10,
        )
        axes.set(ylim=(-0.1, 3.5))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[1].set_xlim(0, 1.02 * max(ideas_profile.exposed(found[way])[1] for way in ("overlap", "after")))
    panels[1].set_xlabel("milliseconds since the backward pass began; a colour is a bucket")
    return figure


def gradients(found: dict):
    """Histograms of gradients: fp32, bf16 and fp16, and fp16 with a scaled loss."""
    figure = plots.new_figure(WIDTH, 4.6)
    panels = figure.subplots(2, 2, sharex=True, sharey=True).ravel()
    centres = np.array(measured.BINS[:-1]) + 0.5
    least, normal, _ = measured.limits(torch.float16)
    titles = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "scaled": "fp16, loss scaled by 2$^{16}$"}
    for axes, (name, part) in zip(panels, found.items(), strict=True):
        shares = 100 * np.array(part["histogram"])
        axes.bar(centres, shares, width=0.9, color=COLOURS[name])
        axes.axvspan(measured.BINS[0], least - 1, color=ORANGE, alpha=0.12, linewidth=0, zorder=0)
        axes.axvline(normal, color=GREY, linewidth=0.9, linestyle=":")
        plain(
            axes,
            title=f"{titles[name]}: {round(100 * part['zeros'], 1 if part['zeros'] > 0.01 else 2):g} % became zero",
        )
        axes.title.set_fontsize(10)
    panels[0].text(
        least - 1.6, 0.97 * panels[0].get_ylim()[1], "zero in fp16", ha="right", va="top", fontsize=8.5, color=ORANGE
    )
    panels[0].text(
        normal + 0.5, 0.97 * panels[0].get_ylim()[1], "full precision in fp16", va="top", fontsize=8.5, color=GREY
    )
    for axes in panels[2:]:
        axes.set_xlabel("size of a gradient: power of two")
    for axes in panels[::2]:
        axes.set_ylabel("gradients (%)")
    panels[0].set_xlim(measured.BINS[0], 4)
    return figure


def master_weights(found: dict):
    """One weight that only grows where it is kept in fp32, and a training that stops when its weights are bf16."""
    figure = plots.new_figure(WIDTH, 3.3)
    single, training = figure.subplots(1, 2)
    for name, path in found["single"].items():
        style = {"fp32": "-", "bf16": "-", "fp16": (0, (4, 3))}[name]
        single.plot(
            np.linspace(0, found["steps"], len(path)),
            path,
            color=COLOURS[name],
            linestyle=style,
            linewidth=2,
            label=name,
        )
    plain(single, xlabel="step", ylabel="weight", title="add 0.0001 in every step")
    single.legend(frameon=False)
    colours = {"fp32": INK, "bf16 with fp32 master": BLUE, "bf16": GREEN}
    for name, rows in found["training"].items():
        label = {"fp32": "fp32", "bf16": "bf16 weights"}.get(name, "bf16, fp32 master weights")
        training.plot(
            *smooth(rows, 20).T,
            color=colours[name],
            label=label,
            linewidth=2,
            linestyle=(0, (3, 3)) if name == "fp32" else "-",
            zorder=4 if name == "fp32" else 2,
        )
    plain(training, xlabel="epoch", ylabel="training loss", title="digits, a small rate")
    training.legend(frameon=False)
    return figure


def smooth(rows: list[list[float]], window: int) -> np.ndarray:
    """[n, 2]: means of `window` neighbouring rows."""
    data = np.array(rows)
    kernel = np.ones(window) / window
    return np.stack([np.convolve(column, kernel, "valid") for column in data.T], 1) if len(data) > 2 * window else data


def batch_and_rate(found: dict):
    """What more GPUs do to a run if the batch grows with them, and if it doesn't."""
    figure = plots.new_figure(WIDTH, 3.9)
    axes = figure.subplots()
    (one, rows), (same, again), *others = found.items()
    axes.plot(*smooth(rows, 45).T, color=INK, linewidth=2.2, label=one)
    axes.plot(*smooth(again, 45)[::25].T, "o", color=INK, fillstyle="none", markersize=7, label=f"{same}: the same run")
    for (name, rows), colour in zip(others, (ORANGE, GREEN, BLUE), strict=True):
        axes.plot(*smooth(rows, 6).T, color=colour, linewidth=1.8, label=name.replace(" x ", " × "))
    plain(axes, xlabel="epoch", ylabel="training loss", yscale="log")
    axes.legend(frameon=False)
    return figure


def batch_norms(found: dict):
    """Statistics of few samples scatter, and so the same batch trains another model on other numbers of GPUs."""
    figure = plots.new_figure(WIDTH, 3.4)
    scatter, curves = figure.subplots(1, 2)
    names = [str(samples) for samples in found["spread"]]
    scatter.bar(names, [100 * share for share in found["spread"].values()], color=BLUE, width=0.65)
    plain(scatter, xlabel="samples per GPU", ylabel="scatter of the variance (%)", title="statistics of one channel")
    scatter.grid(axis="x", visible=False)
    for (samples, rows), colour in zip(found["curves"].items(), (ORANGE, GREEN, BLUE), strict=True):
        gpus = 64 // int(samples)
        label = f"{gpus} GPU{'s' * (gpus > 1)} x {samples}".replace("x", "×")
        curves.plot(*np.array(rows).T, color=colour, marker="o", markersize=3, linewidth=1.8, label=label)
    plain(curves, xlabel="epoch", ylabel="evaluation loss", title="local batch norm, global batch 64", yscale="log")
    curves.set_yticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    curves.minorticks_off()
    curves.legend(frameon=False)
    return figure


def draw(quick: bool, folder: Path) -> dict[str, float]:
    """Writes all figures into `folder`; returns the numbers that docs/ideas.md claims."""
    experiments: dict[str, dict] = {}
    for experiment in (ideas_profile.overlap, measured.batch_and_rate, measured.batch_norms):
        experiments[experiment.__name__] = experiment(quick)
    for experiment in (measured.gradients, measured.master_weights):
        experiments[experiment.__name__] = experiment()
    for drawing in (processes, data_parallel, formats, main_process):
        plots.save(drawing(), folder / f"ideas_{drawing.__name__}.png")
    for drawing in (overlap, gradients, master_weights, batch_and_rate, batch_norms):
        plots.save(drawing(experiments[drawing.__name__]), folder / f"ideas_{drawing.__name__}.png")
    return numbers(experiments)


def numbers(experiments: dict) -> dict[str, float]:
    """What the text claims."""
    one, same = (np.array(rows)[:, 1] for rows in [*experiments["batch_and_rate"].values()][:2])
    found = {f"{name} zeros %": 100 * part["zeros"] for name, part in experiments["gradients"].items()}
    found |= {f"{name} weight after": path[-1] for name, path in experiments["master_weights"]["single"].items()}
    found |= {f"{name} updates lost %": 100 * share for name, share in experiments["master_weights"]["lost"].items()}
    found |= {
        f"{name} last loss": smooth(rows, 20)[-1, 1] for name, rows in experiments["master_weights"]["training"].items()
    }
    found["same batch, largest difference of loss"] = np.abs(one - same).max()
    found |= {f"{name}, last loss": smooth(rows, 5)[-1, 1] for name, rows in experiments["batch_and_rate"].items()}
    found |= {f"scatter of {samples} %": 100 * share for samples, share in experiments["batch_norms"]["spread"].items()}
    found |= {
        f"batch norm over {samples}, last loss": rows[-1][1]
        for samples, rows in experiments["batch_norms"]["curves"].items()
    }
    for way in ("overlap", "after"):
        found[f"{way}: late ms"], found[f"{way}: complete ms"] = ideas_profile.exposed(experiments["overlap"][way])
    return {name: float(value) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter trainings, a smaller profile")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder for the figures (default: docs/pictures)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(draw(arguments.quick, arguments.output), indent=1))


if __name__ == "__main__":
    main()
