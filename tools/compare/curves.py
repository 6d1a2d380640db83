"""Picture of several runs' curves, one colour for each run."""

from collections.abc import Sequence
from pathlib import Path

from common.run.past_run import PastRun
from common.run.plots import BLUE, GREEN, GREY, INK, ORANGE, draw_line, finish_curves, new_figure, save, short, title
from common.run.progress import display_name, is_share

COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", INK, GREY)


def draw(runs: Sequence[PastRun], path: Path) -> None:
    """Draw training loss, the leading result and learning rate over the steps. Raises OSError."""
    figure = new_figure(8.5, 8)
    loss, quality, rate = figure.subplots(3, sharex=True, height_ratios=(3, 3, 1.4))
    for number, run in enumerate(runs):
        colour, name = COLOURS[number % len(COLOURS)], short(run.name, 40)
        draw_line(loss, run.rows, "train/loss", name, colour, style=_style(number))
        metric = run.leading.removeprefix("eval/").removeprefix("ema_")
        scale = 100 if is_share(metric) else 1
        draw_line(quality, run.rows, run.leading, "", colour, scale, _style(number))
        value, step = run.evaluation("best").get(run.leading), run.step_of("best")
        if value is not None:
            quality.plot(step, value * scale, "o", color=colour, fillstyle="none", markersize=10)
        draw_line(rate, run.rows, "train/lr", "", colour, style=_style(number))
    names = dict.fromkeys(display_name(run.leading) for run in runs if run.leading)
    finish_curves(figure, {"training loss": loss, f"{', '.join(names)} (%)": quality, "learning rate": rate})
    title(figure.suptitle, f"{len(runs)} runs; a ring marks the best model")
    save(figure, path)


def _style(number: int) -> str:
    return ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
