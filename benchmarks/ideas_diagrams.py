"""Diagrams of docs/ideas.md: what is drawn there without an experiment."""

from typing import TYPE_CHECKING

import ideas_measured as measured
import numpy as np
import torch
from matplotlib.patches import FancyBboxPatch

from common.run import plots
from common.run.plots import BLUE, GREEN, GREY, INK, ORANGE, PALE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 8.0  # inches: 1,200 pixels, readable when shown 900 wide
LIGHT = "#CFE3F1"
COLOURS = {"fp32": INK, "bf16": GREEN, "fp16": ORANGE, "scaled": BLUE}


def box(
    axes: "Axes",
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    colour: str = LIGHT,
    size: float = 9,
    ink: str = INK,
) -> None:
    """A rounded box with text in its middle."""
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor="none"))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=ink, linespacing=1.35)


def arrow(axes: "Axes", start: tuple, end: tuple, colour: str = GREY, both: bool = False) -> None:
    style = {"arrowstyle": "<|-|>" if both else "-|>", "color": colour, "linewidth": 1.4, "shrinkA": 2, "shrinkB": 2}
    axes.annotate("", end, start, arrowprops=style)


def canvas(height: float, right: float, top: float) -> tuple["Figure", "Axes"]:
    """A figure to draw boxes on; returns it and its axes, whose units are those of the drawing."""
    figure = plots.new_figure(WIDTH, height)
    axes = figure.subplots()
    axes.set(xlim=(0, right), ylim=(0, top))
    axes.set_axis_off()
    return figure, axes


def plain(axes: "Axes", **labels) -> None:
    """The style of all charts."""
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(**labels)


def processes() -> "Figure":
    """Two machines with two GPUs each: ranks, local ranks and one process group."""
    figure, axes = canvas(3.1, 10, 3.9)
    for machine in range(2):
        left = 0.1 + 5 * machine
        box(axes, left, 0.75, 4.8, 2.6, "", "#F3F3F3")
        axes.text(left + 0.15, 3.05, f"machine {machine}", fontsize=10, color=GREY, va="center")
        for gpu in range(2):
            rank = 2 * machine + gpu
            place = left + 0.2 + 2.25 * gpu
            box(axes, place, 1.7, 2.15, 1.05, f"process, RANK {rank}\nLOCAL_RANK {gpu}")
            box(axes, place + 0.4, 0.95, 1.35, 0.5, f"GPU {gpu}", "white", 9)
            arrow(axes, (place + 1.07, 1.7), (place + 1.07, 1.45))
    box(
        axes,
        0.1,
        0.05,
        9.8,
        0.5,
        "one process group, WORLD_SIZE 4: every collective is called by all four",
        BLUE,
        10,
        "white",
    )
    axes.text(
        5, 3.75, "accelerate launch starts one process per GPU", ha="center", fontsize=11, color=INK, weight="bold"
    )
    return figure


def data_parallel() -> "Figure":
    """Who talks to whom in a step, and in which order."""
    figure = plots.new_figure(WIDTH, 3.4)
    left, right = figure.subplots(1, 2)
    steps = {
        left: "weights to all GPUs · images to all GPUs · forward\nlogits to GPU 0 · loss on GPU 0 · backward\n"
        "gradients to GPU 0 · step on GPU 0",
        right: "each loads its images · forward · loss · backward,\nmeanwhile all-reduce of gradients · step, on all alike",
    }
    for axes, title in ((left, "DataParallel: one process"), (right, "DDP: a process per GPU")):
        axes.set(xlim=(0, 4.4), ylim=(-0.95, 3.3))
        axes.set_axis_off()
        axes.set_title(title, fontsize=11, color=INK, weight="bold")
        axes.text(2.2, -0.2, steps[axes], ha="center", va="top", fontsize=8.5, color=INK, linespacing=1.5)
    box(left, 0, 0, 4.4, 3.2, "", "#F3F3F3")
    box(left, 1.3, 2.1, 1.8, 0.85, "GPU 0\nmodel, optimizer", ORANGE, 9, "white")
    for gpu, place in ((1, 0.15), (2, 1.6), (3, 3.05)):
        box(left, place, 0.2, 1.2, 0.75, f"GPU {gpu}\na copy", LIGHT, 9)
        arrow(left, (2.2 + 0.6 * (gpu - 2), 2.1), (place + 0.6, 0.95), ORANGE, both=True)
    for rank, (x, y) in enumerate(((0.1, 1.95), (2.5, 1.95), (2.5, 0.1), (0.1, 0.1))):
        box(right, x - 0.1, y - 0.1, 2.0, 1.3, "", "#F3F3F3")
        box(right, x + 0.1, y + 0.1, 1.6, 0.9, f"GPU {rank}\nmodel, optimizer", LIGHT, 9)
    ring = ((2.0, 2.5), (2.4, 2.5)), ((3.4, 1.85), (3.4, 1.3)), ((2.4, 0.65), (2.0, 0.65)), ((1.0, 1.3), (1.0, 1.85))
    for start, end in ring:
        arrow(right, start, end, BLUE, both=True)
    right.text(2.2, 1.575, "gradients", ha="center", va="center", fontsize=9, color=BLUE)
    return figure


def formats() -> "Figure":
    """What the bits of each format are, and which numbers it can hold."""
    figure = plots.new_figure(WIDTH, 3.9)
    bits, axes = figure.subplots(2, height_ratios=(1, 1.25))
    bits.set(xlim=(-4.2, 32), ylim=(-0.3, 3.1))
    bits.set_axis_off()
    for row, (name, exponent, fraction) in enumerate((("fp32", 8, 23), ("bf16", 8, 7), ("fp16", 5, 10))):
        y = 2.2 - row
        bits.text(-0.6, y + 0.3, name, ha="right", va="center", fontsize=10, color=COLOURS[name], weight="bold")
        for start, width, colour, text in (
            (0, 1, GREY, "±"),
            (1, exponent, ORANGE, f"range: {exponent} bits"),
            (1 + exponent, fraction, BLUE, f"precision: {fraction} bits"),
        ):
            box(bits, start + 0.06, y, width - 0.12, 0.6, text, colour, 8.5, "white")
    for row, (name, dtype) in enumerate(measured.FORMATS.items()):
        least, normal, most = measured.limits(dtype)
        y = 2 - row
        axes.barh(y, most - normal, left=normal, height=0.5, color=COLOURS[name])
        axes.barh(y, normal - least, left=least, height=0.5, color=COLOURS[name], alpha=0.35)
        steps = f"next number after 1: 1 + 2$^{{{round(np.log2(torch.finfo(dtype).eps))}}}$"
        axes.text(133, y, steps, fontsize=8.5, va="center", color=INK)
    plain(axes, xlabel="power of two (pale: with fewer and fewer bits of precision)", xlim=(-152, 222))
    axes.set_yticks([2, 1, 0], list(measured.FORMATS))
    axes.set_xticks(range(-150, 126, 25))
    axes.set_ylim(-0.5, 2.5)
    axes.grid(axis="y", visible=False)
    return figure


def main_process() -> "Figure":
    """What every process does, and what the main process does alone."""
    figure, axes = canvas(2.5, 9.6, 3.6)
    axes.set_ylim(0.2, 3.6)
    rows = (
        "draws its samples",
        "forward, backward",
        "all-reduce, step",
        "evaluates its share",
        "log, dashboard",
        "checkpoint, best/",
    )
    for column, text in enumerate(rows):
        axes.text(
            1.55 + 1.42 * column, 3.3, text.replace(", ", ",\n"), ha="center", va="center", fontsize=8.5, color=INK
        )
    for rank in range(4):
        y = 2.35 - 0.68 * rank
        axes.text(0.75, y + 0.25, f"rank {rank}", ha="right", va="center", fontsize=9.5, color=INK)
        for column in range(len(rows)):
            alone = column > 3
            if not alone or rank == 0:
                box(
                    axes,
                    0.93 + 1.42 * column,
                    y,
                    1.25,
                    0.5,
                    "writes" if alone else "",
                    BLUE if alone else LIGHT,
                    9,
                    "white",
                )
    for column, text in ((2, "sum"), (3, "counts")):
        x = 1.55 + 1.42 * column
        arrow(axes, (x, 0.45), (x, 2.7), ORANGE, both=True)
        axes.text(x + 0.08, 1.57, text, fontsize=8.5, color=ORANGE, va="center")
    return figure
