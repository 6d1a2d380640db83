"""Fonts for plots: finds installed fonts for letters that Matplotlib's own font lacks.

Matplotlib ships DejaVu Sans. It has Latin, Greek, Cyrillic, Arabic and Hebrew, but no Chinese, Japanese, Korean or Indian
scripts.
"""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fonts with many scripts come first, so that the letters of a text have the same style.
_FIRST = "notosanscjk sourcehan noto wqy pingfang hiragino msyh yugoth malgun arialuni droid".split()
_missing: set[str] = set()
_said: set[str] = set()


def provide(figure: "Figure") -> None:
    """Let the texts of `figure` use other installed fonts for letters that its font lacks."""
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.get_xticklabels(), axes.get_yticklabels()  # these calls create the labels
    texts = figure.findobj(Text)
    letters = "".join(sorted({letter for text in texts for letter in text.get_text() if letter.isprintable()}))
    lacking, families = _families(letters)
    for text in texts:
        if families and not lacking.isdisjoint(text.get_text()):
            text.set_fontfamily([*text.get_fontfamily(), *families])
            text.set_fontweight("normal")  # these fonts may have no bold style


def missing() -> str:
    """The first few letters in plots so far that no installed font has; each letter is returned only once."""
    new = sorted(_missing - _said)
    _said.update(new)
    return "".join(new[:10]) + "…" * (len(new) > 10)


@cache
def _families(letters: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """The `letters` that Matplotlib's default font lacks, and families of installed fonts that have them."""
    from matplotlib import font_manager

    lacking = rest = _without(letters, font_manager.findfont(font_manager.FontProperties()))
    families = []
    # Not Matplotlib's own list: it is cached on disk and not updated for new fonts.
    for path in sorted(font_manager.findSystemFonts(), key=_order) if lacking else ():
        if (without := _without(rest, path)) != rest:
            known = len(font_manager.fontManager.ttflist)
            try:
                font_manager.fontManager.addfont(path)
            except Exception:  # a font without a proper name: try the next one
                continue
            families.append(font_manager.fontManager.ttflist[known].name)
            rest = without
        if not rest:
            break
    _missing.update(rest)
    return frozenset(lacking), tuple(families)


def _without(letters: str, path: str) -> str:
    """The `letters` that the font at `path` lacks; all of them if it can't be read or is a bitmap font."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
        return "".join(letter for letter in letters if not (font.scalable and font.get_char_index(ord(letter))))
    except (OSError, RuntimeError):
        return letters


def _order(path: str) -> tuple[int, bool, str]:
    name = path.replace("\\", "/").rsplit("/", 1)[-1].lower().replace("-", "").replace("_", "")
    place = next((place for place, part in enumerate(_FIRST) if part in name), len(_FIRST))
    return place, "regular" not in name, path
