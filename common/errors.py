"""What is said to a person when a request can't be met, or a run can't go on as it is?"""


class Refused(Exception):
    """A request that can't be met. Its text is one line: the value, the limit and the way out."""


def printable(text: str) -> str:
    """`text` on one line: line ends, a terminal's control characters and bytes that are no text are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Again(Exception):
    """A run that can't go on as it is, but can from its last checkpoint when it is started again. Its text is one line."""
