"""The plot of the most confident mistakes shows images of all shapes, with class names and the ends of file names."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.classification.metrics import Mistake
from common.classification.plots import mistakes

RED = (200, 0, 0)


class Source:
    """A stand-in for a source of images."""

    def __init__(self, images: list, classes: list[str]):
        self.images, self.classes = images, classes

    def image(self, index: int):
        return self.images[index]

    def name(self, index: int) -> str:
        return f"/data/a very long path to/where/the images are/train/{self.classes[0]}/{index}.png"


def test_mistakes_of_all_shapes(tmp_path: Path) -> None:
    path = tmp_path / "pictures" / "mistakes.png"
    images = [Image.new("RGB", (8, 8), RED), Image.new("RGB", (3000, 20), "blue"), Image.new("RGB", (1, 1))]
    for count in (0, 1, 3):
        mistakes(Source(images, ["a $ 猫", "b" * 200]), [Mistake(n, 0, 1, 0.97) for n in range(count)], path)
        assert [file.name for file in path.parent.iterdir()] == [path.name]
        pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
        assert min(pixels.shape[:2]) > 150
        assert (np.abs(pixels - RED).sum(2) < 12).any() == (count > 0)


def test_mistakes_carry_the_ends_of_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: figures.append(figure))
    mistakes(Source([Image.new("RGB", (9, 9))], ["cat", "dog"]), [Mistake(0, 0, 1, 0.9)], tmp_path / "a.png")
    texts = [text.get_text() for text in figures[0].findobj(Text)]
    assert "cat → dog\n90 %" in texts and "…/the images are/train/cat/0.png" in texts
