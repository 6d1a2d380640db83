"""Picture of several runs' curves, one colour for each run."""

from collections.abc import Sequence
from pathlib import Path

from common.run.past_run import LEADING, PastRun
from common.run.plots import BLUE, GREEN, GREY, INK, ORANGE, PALE, draw_line, new_figure, save, short, title
from common.run.progress import display_name

COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", INK, GREY)


def draw(runs: Sequence[PastRun], path: Path) -> None:
    """Draw training loss, the leading result and learning rate over the steps. Raises OSError."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8.5, 8)
    loss, quality, rate = figure.subplots(3, sharex=True, height_ratios=(3, 3, 1.4))
    for number, run in enumerate(runs):
        colour, name = COLOURS[number % len(COLOURS)], short(run.name, 40)
        draw_line(loss, run.rows, "train/loss", name, colour, style=_style(number))
        metric = run.leading.removeprefix("eval/").removeprefix("ema_")
        scale = 100 if metric in LEADING else 1
        draw_line(quality, run.rows, run.leading, name, colour, scale, _style(number))
        value, step = run.evaluation("best").get(run.leading), run.step_of("best")
        if value is not None:
            quality.plot(step, value * scale, "o", color=colour, fillstyle="none", markersize=10)
        draw_line(rate, run.rows, "train/lr", name, colour, style=_style(number))
    names = dict.fromkeys(display_name(run.leading) for run in runs if run.leading)
    for axes, label in ((loss, "training loss"), (quality, f"{', '.join(names)} (%)"), (rate, "learning rate")):
        axes.set_ylabel(label)
        axes.grid(color=PALE, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    if loss.lines:
        loss.legend(frameon=False)
    rate.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    rate.set_ylim(bottom=0)
    rate.set_xlabel("step")
    rate.xaxis.set_major_locator(MaxNLocator(integer=True))
    rate.xaxis.set_major_formatter("{x:,.0f}")
    figure.align_ylabels()
    title(figure.suptitle, f"{len(runs)} runs; a ring marks the best model")
    save(figure, path)


def _style(number: int) -> str:
    return ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
