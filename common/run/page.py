"""Page: the look of a self-contained HTML page, and its parts: tables and pictures.

Whatever is no `Html` yet is escaped, so names of classes and files can't become markup. The page's policy lets a browser load
nothing and run no script.
"""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from common.files import read_bytes

NOTHING = "-"  # in place of a number that there is not
_MOST = 2**27  # bytes of a picture that is read
_LARGE = 300_000  # bytes: larger pictures are stored again as JPEG, at most so many pixels wide
_WIDEST, _QUALITY = 1600, 85
_WIDE = 1400  # pixels: wider pictures get a line of their own


class Html(str):
    """A text that is markup already."""


def escaped(value: object) -> Html:
    """Markup that shows `value` as it is."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(parts: Iterable[object]) -> Html:
    return Html("".join(map(escaped, parts)))


def element(tag: str, *content: object, **attributes: object) -> Html:
    """An element; `kind` is its class, and an underscore in the name of an attribute stands for a dash."""
    named = {{"kind": "class"}.get(key, key.replace("_", "-")): value for key, value in attributes.items()}
    words = "".join(f' {key}="{escaped(value)}"' for key, value in named.items())
    return Html(f"<{tag}{words}>{join(content)}</{tag}>")


def section(title: str, *content: object) -> Html:
    return element("section", element("h2", title), *content)


def facts(rows: Iterable[tuple[str, object]]) -> Html:
    """A table of names and values, without the rows that have no value."""
    lines = [
        element("tr", element("th", name, scope="row"), element("td", value)) for name, value in rows if value != ""
    ]
    return element("div", element("table", *lines, kind="facts"), kind="scroll")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table with a line of names; numbers stand at the right."""
    names = [element("th", name, scope="col") for name in head]
    lines = [element("tr", *map(_cell, row)) for row in rows]
    body = element("table", element("thead", element("tr", *names)), element("tbody", *lines))
    return element("div", body, kind="scroll long")


def _cell(value: object) -> Html:
    if isinstance(value, float) and 0 <= value <= 1:
        return element("td", f"{100 * value:.1f} %", kind="number share", style=f"--share:{value:.3f}")
    if isinstance(value, int | float):
        return element("td", f"{value:,}", kind="number")
    return element("td", NOTHING, kind="number") if value is None else element("td", value)


def picture(path: Path, caption: str) -> Html:
    """The picture with its content in the page. Raises OSError if it can't be read."""
    from PIL import Image

    content, kind = read_bytes(path, _MOST), "png"
    image: Image.Image = Image.open(io.BytesIO(content))
    place = "wide" if image.width > _WIDE else "half"
    if len(content) > _LARGE:
        stored = io.BytesIO()
        image = image.convert("RGB")
        image.thumbnail((_WIDEST, 10 * _WIDEST))
        image.save(stored, "jpeg", quality=_QUALITY)
        content, kind = stored.getvalue(), "jpeg"
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    shown = Html(f'<img src="{source}" alt="{escaped(caption)}" width="{image.width}" height="{image.height}">')
    return element("figure", shown, element("figcaption", caption), kind=place)


def in_words(value: float | None, share: bool = True) -> str:
    """A result; a `share` of 1 in per cent."""
    if value is None:
        return NOTHING
    if isinstance(value, int):
        return f"{value:,}"
    return f"{100 * value:.2f} %" if share and 0 <= value <= 1 else f"{value:,.5g}"


def listed(value: object) -> str:
    """A value of a configuration or an environment, lists in one line."""
    if isinstance(value, list):
        same = len(value) > 1 and len(set(map(str, value))) == 1
        return f"{len(value)} × {value[0]}" if same else ", ".join(map(str, value))
    return "" if value is None else str(value)


def duration(seconds: float | None) -> str:
    """Seconds, minutes or hours."""
    if seconds is None:
        return NOTHING
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 100 else f"{hours:.1f} h"


def page(title: str, *body: object) -> str:
    """The whole page."""
    return _PAGE.substitute(title=escaped(title), style=_STYLE, body=join(body))


_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")

_STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, CanvasText 15%, Canvas); --soft: GrayText;
  --c0: #0072B2; --c1: #D55E00; --c2: #009E73; --c3: #9a6fb0; }
* { box-sizing: border-box; }
body { margin: 0; background: Canvas; color: CanvasText; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere; }
p { margin: 6px 0; overflow-wrap: anywhere; }
.soft, figcaption, .tile span, .facts th { color: var(--soft); font-size: 13px; font-weight: 400; }
.status { padding: 2px 12px; border-radius: 99px; border: 1px solid; font-weight: 600; }
.finished { color: var(--c2); } .failed { color: var(--c1); } .resumable, .running, .unknown { color: var(--c3); }
.tiles, .pictures { display: grid; gap: 14px 24px; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); }
.tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin: 20px 0; }
.tile, section { border: 1px solid var(--line); border-radius: 10px; padding: 12px 18px; margin: 16px 0; }
.tile { margin: 0; } .tile b { display: block; font-size: 21px; overflow-wrap: anywhere; }
figure { margin: 0; } .wide { grid-column: 1 / -1; }
figure img { display: block; max-width: 100%; height: auto; margin: 0 auto 6px; background: #fff; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 16px; justify-content: space-between; }
.scroll { overflow-x: auto; } .long { max-height: 560px; overflow-y: auto; }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 5px 14px 5px 0; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { position: sticky; top: 0; background: Canvas; }
td { overflow-wrap: anywhere; } .number { text-align: right; white-space: nowrap; }
.share { background: linear-gradient(color-mix(in srgb, var(--c0) 22%, Canvas) 0 0) no-repeat 0 50% /
  calc(var(--share) * (100% - 66px)) 70%; min-width: 150px; }
pre { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 520px) { .pictures { grid-template-columns: 1fr; } }
"""
