"""Secrets in the names of data: passwords, and signatures of URLs, which are neither printed nor recorded."""

import re

from common.errors import Refused, make_printable, redact

# What may be secret in a URL: user and password, which may hold a slash, and the query, up to the
# next name of a list.
_LOGIN = re.compile(r"(?<=://)([^/?#]*|[^/?#:]*:(?!(\d+|\$\w+|\$\{\w+\})/).*)@", re.DOTALL)
_QUERY = re.compile(
    r"(https?://[^?#]*|\w+://[^?#]*(?=[?#][^,/]*=))[?#].*?(?=,\s*\w+://|$)",
    re.DOTALL | re.IGNORECASE,
)
# A variable of the environment, with its key in a query; and what is secret in a text without
# these.
_VARIABLE = re.compile(r"([\w.%-]+=)?(\$\w+|\$\{\w+\})[&;]?")
_SECRET = re.compile(
    r"://(?![^/?#:@]*:@|@)([^/?#]*|[^/?#:]*:(?!\d*/).*)@|https?://[^?#]*[?#](?!\s*(,|$))|\w+://[^?#,]*[?#][^,/]*=",
    re.DOTALL | re.IGNORECASE,
)


def printable_name(name: str) -> str:
    """`name`, or a list of names, without what may be secret: user and password, and the query of a
    presigned URL.
    """
    return make_printable(_QUERY.sub(r"\1", _LOGIN.sub("", redact(name))))


def check_secrets(data: str) -> None:
    """Raise `Refused` if `data`, which is printed and recorded, holds a password or signature itself."""
    if _SECRET.search(_VARIABLE.sub("", data)):
        raise Refused(
            f"--data {printable_name(data)}: a password or signature would be recorded; name "
            "environment variables that hold all of it, such as '?$SIGNATURE' or "
            "'user:$PASSWORD@', or use ~/.netrc"
        )
