"""Secrets in the names of data: passwords, and signatures of URLs, which are neither printed nor recorded."""

import re
from typing import Any

from common.errors import Refused, printable, redact

COMMA = re.compile(r",(?![^{}]*\})")  # not between braces
# What may be secret in a URL: user and password, which may hold a slash, and the query, up to the next name of a list.
_LOGIN = re.compile(r"(?<=://)([^/?#]*|[^/?#:]*:(?!(\d+|\$\w+|\$\{\w+\})/).*)@", re.DOTALL)
_QUERY = re.compile(r"(https?://[^?#]*|\w+://[^?#]*(?=[?#][^,/]*=))[?#].*?(?=,\s*\w+://|$)", re.DOTALL | re.IGNORECASE)
# The same without a secret: all of it stands in variables of the environment.
_OPEN_LOGIN = re.compile(r"([^:$]*:)?(\$\w+|\$\{\w+\})+@")
_OPEN_QUERY = re.compile(r"[?#](([\w.%-]+=)?(\$\w+|\$\{\w+\})[&;]?)*")


def printable_name(name: str) -> str:
    """`name`, or a list of names, without what may be secret: user and password, and the query of a presigned URL."""
    return printable(_QUERY.sub(r"\1", _LOGIN.sub("", redact(name))))


def check_secrets(data: str) -> None:
    """Raise `Refused` if `data`, which is printed and recorded, holds a password or signature itself."""
    for name in COMMA.split(data):
        login = _LOGIN.search(name)
        query = _QUERY.search(name)
        is_open = not login or _OPEN_LOGIN.fullmatch(login[0])
        if query:
            is_open = is_open and _OPEN_QUERY.fullmatch(name[query.end(1) :].strip())
        if not is_open:
            raise Refused(
                f"--data {printable_name(data)}: a password or signature would be recorded; name environment variables "
                "that hold all of it, such as '?$SIGNATURE' or 'user:$PASSWORD@', or use ~/.netrc"
            )


def refuse_variables(of_file: dict[str, Any], given: dict[str, Any], where: str) -> None:
    """Raise `Refused` for a URL in a file that names a variable of the environment, unless a flag replaces it.

    A stranger may have written the file, and its server would get the value. `where` begins messages.
    """
    for name, value in of_file.items():
        if name not in given and isinstance(value, str) and "://" in value and "$" in value:
            raise Refused(
                f"{where}--{name} {printable_name(value):.200} with a variable of the environment, which is filled in "
                f"only where you type it; give --{name} again as a flag"
            )
