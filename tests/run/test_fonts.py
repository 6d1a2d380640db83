"""Letters that Matplotlib's own font lacks come from another installed font; those without any font are noted."""

from pathlib import Path

import matplotlib
import pytest

from common.run import fonts
from common.run.plots import new_figure, title

OWN = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """`installed(paths)`: these are the fonts of the system, and nothing has been looked for yet."""
    from matplotlib import font_manager

    def install(*paths: Path) -> None:
        fonts.missing.clear()
        monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(path) for path in paths])

    yield install
    install()


def test_a_text_takes_letters_from_an_installed_font_and_others_stay(installed, tmp_path: Path) -> None:
    (tmp_path / "noto.ttf").write_text("no font")
    installed(tmp_path / "noto.ttf", OWN / "STIXGeneral.ttf")
    figure = new_figure(1, 1)
    axes = figure.subplots()
    axes.set_xticks([0], ["a ᶁ"])  # which DejaVu Sans lacks
    title(axes.set_title, "plain")
    fonts.provide(figure)
    family = axes.get_xticklabels()[0].get_fontfamily()
    assert family == ["sans-serif", "STIXGeneral"]
    assert not fonts.missing


def test_letters_without_a_font_are_noted(installed) -> None:
    installed()
    for name in ("猫 cat", "猫", "犬"):
        figure = new_figure(1, 1)
        title(figure.suptitle, f"{name} кошка قطة \u200e")
        fonts.provide(figure)
    assert fonts.missing == {*"犬猫"}
