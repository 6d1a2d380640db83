"""Exceptions whose text is one line for a person: a refused request, or a run that has to restart."""

_MIN_SECRET = 6  # characters: replacing shorter values would spoil other words
_placeholders: dict[str, str] = {}  # by secret


def hide(secret: str, placeholder: str) -> None:
    """From now on `redact` writes `placeholder`, such as `$TOKEN`, instead of `secret`."""
    if len(secret) >= _MIN_SECRET:
        _placeholders[secret] = placeholder


def redact(text: str) -> str:
    """`text` without the secrets that `hide` was given."""
    for secret in sorted(_placeholders, key=len, reverse=True):
        text = text.replace(secret, _placeholders[secret])
    return text


def make_printable(text: str) -> str:
    """`text` on one line, see `redact`: line breaks, control characters and undecodable bytes are escaped."""
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def describe_error(error: BaseException) -> str:
    """Type and text of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def get_line(error: BaseException) -> str:
    """The text of an error on one line; its type if it has none."""
    text = " ".join(str(error).split())
    return text if text else type(error).__name__


def get_os_reason(error: Exception) -> str:
    """The system's own words, such as "No space left on device"; the error's text if there are none."""
    return getattr(error, "strerror", None) or str(error)


def get_first_line(error: Exception) -> str:
    """The first line of an error's text; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def escape_csv_cell(value: object) -> object:
    """`value` for a CSV file.

    A text that a spreadsheet would take for a formula (=1, +a, -a, @a) begins with an apostrophe.
    """
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)  # a negative number
    except ValueError:
        return f"'{value}"
    return value


class _OneLineError(Exception):
    """Its text is one line, whatever names it contains."""

    def __str__(self) -> str:
        return make_printable(super().__str__())


class Refused(_OneLineError):
    """A request that can't be met. Its text is one line: the value, the limit and what to do instead."""


class RestartNeeded(_OneLineError):
    """A run that has to restart from its last checkpoint, such as after running out of memory.

    Its text is one line.
    """
