"""Line chart: curves over steps as SVG in a page, in the colours of the page."""

import math
from collections.abc import Sequence

import numpy as np

from common.run.page import Html, element, escaped

_POINTS = 300  # of a line; a longer one is drawn pale, under its mean over windows
_W, _H, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 250, 52, 10, 12, 26  # of a chart and its margins


def chart(
    title: str, lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], marks: Sequence[tuple[float, str]] = ()
) -> Html:
    """A chart of `lines`, each a name and points (step, value); `marks` are steps with what happened there."""
    arrays = [(name, np.array(points, float)) for name, points in lines if len(points)]
    if not arrays:
        return Html("")
    every = np.concatenate([points for _, points in arrays])
    (x_low, y_low), (x_high, y_high) = every.min(0), every.max(0)
    y_ticks, x_ticks = _ticks(y_low, y_high, 5), [tick for tick in _ticks(x_low, x_high, 5) if tick == int(tick)]
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def place(points: np.ndarray) -> np.ndarray:
        share = (points - (x_low, y_low)) / (max(x_high - x_low, 1e-12), max(y_high - y_low, 1e-12))
        return share * (_W - _LEFT - _RIGHT, _TOP + _BOTTOM - _H) + (_LEFT, _H - _BOTTOM)

    parts = []
    for tick in y_ticks:
        y = place(np.array([x_low, tick]))[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick, y_high)}</text>')
    for tick in (tick for tick in x_ticks if x_low <= tick <= x_high):
        x = place(np.array([tick, y_low]))[0]
        anchor = "end" if x > _W - 30 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{_H - 8}" text-anchor="{anchor}">{tick:,.0f}</text>')
    for step, what in marks:
        if x_low <= step <= x_high:
            x = place(np.array([step, y_low]))[0]
            line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_H - _BOTTOM}">'
            parts.append(f"{line}<title>{escaped(what)}</title></line>")
    for number, (_, points) in enumerate(arrays):
        colour = f"line c{number % 4}"
        if len(points) > _POINTS:
            parts.append(_path(place(points[:: math.ceil(len(points) / 1500)]), f"{colour} pale"))
            points = np.array([window.mean(0) for window in np.array_split(points, _POINTS // 3)])
        parts.append(_path(place(points), colour))
        if len(points) <= 30:
            parts += [
                f'<circle class="dot c{number % 4}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in place(points)
            ]
    keys = [element("span", element("i", kind=f"c{number % 4}"), name) for number, (name, _) in enumerate(arrays)]
    drawn = Html(f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="{escaped(title)}">{"".join(parts)}</svg>')
    head = [title, element("span", *keys, kind="keys")] if any(name for name, _ in arrays) else [title]
    return element("figure", element("figcaption", *head), drawn, kind="chart")


def _path(points: np.ndarray, kind: str) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _ticks(low: float, high: float, limit: int) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    span = (high - low) or abs(high) or 1.0
    raw = span / limit
    size = 10 ** math.floor(math.log10(raw))
    size *= next(factor for factor in (1, 2, 5, 10) if raw <= factor * size * (1 + 1e-9))
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [number * size for number in range(first, max(last, first + 1) + 1)]


def _number(value: float, largest: float) -> str:
    return f"{value:.0e}" if value and abs(largest) < 1e-3 else f"{value:,.10g}" if abs(value) >= 1 else f"{value:.4g}"
