"""Pictures of a `Judgement`: what errors cost, and how far scores can be trusted."""

from pathlib import Path

import numpy as np

from common.detection.evaluation.errors import KINDS
from common.detection.evaluation.judgement import BINS, Judgement
from common.run.plots import BLUE, GREY, INK, ORANGE, PALE, evaluation_of, new_figure, save, title

_MEANINGS = {
    "localisation": "localisation: right class, badly placed",
    "class": "class: well placed, wrong class",
    "both": "both: wrong class, badly placed",
    "duplicate": "duplicate: a second time",
    "background": "background: nothing there",
    "missed": "missed: object without any of these",
    "false_positives": "all false positives",
    "false_negatives": "all false negatives",
}


def errors(judgement: Judgement, path: Path) -> None:
    """Draw how much AP50 each kind of error costs, and how often it occurs."""
    costs, counts = judgement.errors.costs, judgement.errors.counts
    figure = new_figure(8.2, 4.6)
    axes = figure.subplots()
    places = [*range(len(KINDS)), *(len(KINDS) + 0.5 + number for number in range(len(costs) - len(KINDS)))]
    values = [100 * (cost or 0) for cost in costs.values()]
    colours = [BLUE if name in KINDS else GREY for name in costs]
    axes.barh(places, values, color=colours, height=0.7)
    for place, value, name in zip(places, values, costs, strict=True):
        text = f" {value:.1f}  ({counts[name]:,})"
        axes.text(max(value, 0), place, text, color=INK, va="center", fontsize=9)
    axes.set_yticks(places, [_MEANINGS[name] for name in costs])
    axes.set(
        xlim=(min(0, *values), max(1, *values) * 1.2), xlabel="AP50 gained without this error (points), (how many)"
    )
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    ap = judgement.errors.ap50
    headline = "no objects" if ap is None else f"errors behind an AP50 of {100 * ap:.1f} %"
    title(figure.suptitle, f"{evaluation_of(path)}: {headline}")
    save(figure, path)


def confidence(judgement: Judgement, path: Path) -> None:
    """Draw how many detections with a score are right and wrong, and how the share of right ones compares with the score."""
    right, wrong = judgement.confidence
    edges = np.arange(BINS) / BINS
    figure = new_figure(9.6, 4.4)
    numbers, shares = figure.subplots(1, 2)
    numbers.stairs(right, np.arange(BINS + 1) / BINS, fill=True, color=BLUE, label="right")
    numbers.stairs(wrong, np.arange(BINS + 1) / BINS, color=ORANGE, linewidth=2, label="wrong")
    numbers.axvline(judgement.matches.threshold, color=INK, linewidth=1.2, linestyle=":", label="threshold of best F1")
    numbers.set_yscale("symlog", linthresh=1)  # most detections have a low score
    numbers.set(ylabel="detections", ylim=(0, 30 * max(5, right.max(), wrong.max())))  # room for the legend
    numbers.yaxis.set_major_formatter("{x:,.0f}")
    numbers.legend(frameon=True, framealpha=1, edgecolor="white", loc="upper right")
    some = np.flatnonzero(right + wrong)
    share = right[some] / (right + wrong)[some]
    shares.bar(edges[some], share, 1 / BINS, align="edge", color=BLUE, edgecolor="white", label="right ones")
    shares.plot((0, 1), (0, 1), color=INK, linewidth=1.2, linestyle="--", label="calibrated")
    shares.set(ylabel="share of detections that are right", ylim=(0, 1))
    shares.set_box_aspect(1)
    shares.legend(frameon=False, loc="upper left")
    for axes in (numbers, shares):
        axes.set(xlim=(0, 1), xlabel="score")
        axes.spines[["top", "right"]].set_visible(False)
    error = judgement.calibration_error()
    headline = "no detections" if error is None else f"calibration error of {100 * error:.1f} %"
    title(figure.suptitle, f"{evaluation_of(path)}: {headline} (right: IoU ≥ 0.5 with an object of the class)")
    save(figure, path)
