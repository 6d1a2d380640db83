"""Which installed font has the letters of a picture that Matplotlib's own font lacks?

Matplotlib ships DejaVu Sans: Latin, Greek, Cyrillic, Arabic, Hebrew, but no Chinese, Japanese, Korean or Indian letters.
"""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fonts of many scripts come first; a text then has letters of one style.
_FIRST = (
    "notosanscjk",
    "sourcehan",
    "noto",
    "wqy",
    "pingfang",
    "hiragino",
    "msyh",
    "yugoth",
    "malgun",
    "arialuni",
    "droid",
)
_missing: set[str] = set()
_said: set[str] = set()


def provide(figure: "Figure") -> None:
    """Let the texts of `figure` take letters that its font lacks from other installed fonts."""
    from matplotlib.text import Text

    for axes in figure.axes:
        axes.get_xticklabels(), axes.get_yticklabels()  # which are made when they are asked for
    texts = figure.findobj(Text)
    letters = "".join(sorted({letter for text in texts for letter in text.get_text() if letter.isprintable()}))
    lacking, families = _families(letters)
    for text in texts:
        if families and not lacking.isdisjoint(text.get_text()):
            text.set_fontfamily([*text.get_fontfamily(), *families])
            text.set_fontweight("normal")  # these fonts may have no other


def missing() -> str:
    """The first few letters of pictures so far that no installed font has; each is told once."""
    new = sorted(_missing - _said)
    _said.update(new)
    return "".join(new[:10]) + "…" * (len(new) > 10)


@cache
def _families(letters: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Those of `letters` that Matplotlib's default font lacks, and families of installed fonts that have them."""
    from matplotlib import font_manager

    lacking = rest = _without(letters, font_manager.findfont(font_manager.FontProperties()))
    families = []
    # Not Matplotlib's own list, which it keeps on disk and does not renew for a new font.
    for path in sorted(font_manager.findSystemFonts(), key=_order) if lacking else ():
        if (without := _without(rest, path)) != rest:
            known = len(font_manager.fontManager.ttflist)
            try:
                font_manager.fontManager.addfont(path)
            except Exception:  # a font without a proper name: the picture can do without it
                continue
            families.append(font_manager.fontManager.ttflist[known].name)
            rest = without
        if not rest:
            break
    _missing.update(rest)
    return frozenset(lacking), tuple(families)


def _without(letters: str, path: str) -> str:
    """Those of `letters` that the font at `path` lacks; all if it can't be read or has pictures of one size only."""
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
