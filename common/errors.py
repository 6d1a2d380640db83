"""Exceptions whose text is one line for a person: a refused request, or a run that has to be
started again.
"""

_MIN_SECRET = 6  # characters: replacing shorter values would spoil other words
_shown_by_secret: dict[str, str] = {}


def hide(value: str, shown: str) -> None:
    """From now on `redact` shows `shown`, such as `$TOKEN`, instead of `value`."""
    if len(value) >= _MIN_SECRET:
        _shown_by_secret[value] = shown


def redact(text: str) -> str:
    """`text` without the values that `hide` was given."""
    for secret in sorted(_shown_by_secret, key=len, reverse=True):
        text = text.replace(secret, _shown_by_secret[secret])
    return text


def make_printable(text: str) -> str:
    """`text` on one line, see `redact`: line breaks, control characters and undecodable bytes are escaped."""
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe_error(error: Exception) -> str:
    """Type and text of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def get_first_line(error: Exception) -> str:
    """The first line of an error's text; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def escape_csv_cell(value: object) -> object:
    """`value` for a CSV file: a text that a spreadsheet would take for a formula (=1, +a, -a, @a)
    begins with an apostrophe.
    """
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)  # a negative number
    except ValueError:
        return f"'{value}"
    return value


class _Line(Exception):
    """Its text is one line, whatever names it contains."""

    def __str__(self) -> str:
        return make_printable(super().__str__())


class Refused(_Line):
    """A request that can't be met. Its text is one line: the value, the limit and what to do instead."""


class RestartNeeded(_Line):
    """A run that has to be restarted from its last checkpoint, such as after running out of memory.
    Its text is one line.
    """
