"""Exceptions whose text is one line for a person: a refused request, or a run that has to be started again."""


def printable(text: str) -> str:
    """`text` on one line: line breaks, control characters and undecodable bytes are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Line(Exception):
    """Its text is one line, whatever names it contains."""

    def __str__(self) -> str:
        return printable(super().__str__())


class Refused(_Line):
    """A request that can't be met. Its text is one line: the value, the limit and what to do instead."""


class Again(_Line):
    """A run that has to be restarted from its last checkpoint, such as after running out of memory. Its text is one line."""
