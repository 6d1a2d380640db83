"""Letters that Matplotlib's own font lacks come from another installed font; those without any font are noted."""

from pathlib import Path

import matplotlib
import pytest

from common.run import fonts
from common.run.plots import new_figure

OWN = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def test_letters_come_from_an_installed_font_or_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "noto.ttf").write_text("no font")
    installed = [str(tmp_path / "noto.ttf"), str(OWN / "STIXGeneral.ttf")]
    monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda: installed)
    monkeypatch.setattr(fonts, "missing", set())
    for name in ("a ᶁ", "猫 cat", "кошка قطة \u200e 犬"):  # DejaVu Sans lacks the first and Chinese
        figure = new_figure(1, 1)
        axes = figure.subplots()
        axes.set_xticks([0], [name])
        fonts.provide(figure)
        assert ("STIXGeneral" in axes.get_xticklabels()[0].get_fontfamily()) == ("ᶁ" in name)
    assert fonts.missing == {*"犬猫"}
