"""What is said to a person when a request can't be met, or a run can't go on as it is?"""


def printable(text: str) -> str:
    """`text` on one line: line ends, a terminal's control characters and bytes that are no text are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _Line(Exception):
    """Its text is one line, whatever the names in it."""

    def __str__(self) -> str:
        return printable(super().__str__())


class Refused(_Line):
    """A request that can't be met. Its text is one line: the value, the limit and the way out."""


class Again(_Line):
    """A run that can't go on as it is, but can from its last checkpoint when it is started again. Its text is one line."""
