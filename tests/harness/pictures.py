"""What is seen in a picture that was drawn: its pixels, colours and texts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def collect_texts(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], None]) -> list[str]:
    """All texts of what `draw` draws."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figures = []
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, file, **options: figures.append(figure))
        draw()
    return [text.get_text() for text in figures[0].findobj(Text) if text.get_text()]


def read_picture(path: Path) -> np.ndarray:
    """The picture's pixels; nothing else may lie beside it."""
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    pixels = np.asarray(Image.open(path).convert("RGB"))
    assert min(pixels.shape[:2]) > 150
    path.unlink()
    return pixels


def has_colour(pixels: np.ndarray, colour: str) -> bool:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return bool((np.abs(pixels.astype(int) - rgb).sum(2) < 12).any())
