"""Exceptions whose text is one line for a person: a refused request, or a run that has to be started again."""


def printable(text: str) -> str:
    """`text` on one line: line breaks, control characters and undecodable bytes are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def csv_cell(value: object) -> object:
    """`value` for a CSV file: a text that a spreadsheet would take for a formula (=1, +a, -a, @a) begins with an apostrophe."""
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
        return printable(super().__str__())


class Refused(_Line):
    """A request that can't be met. Its text is one line: the value, the limit and what to do instead."""


class RestartNeeded(_Line):
    """A run that has to be restarted from its last checkpoint, such as after running out of memory. Its text is one line."""
