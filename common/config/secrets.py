"""Secrets in the names of data: passwords, and signatures of URLs, which are neither printed nor recorded."""

import re

from common.errors import Refused, make_printable, redact

# What may be secret in a URL: user and password, which may hold a slash, and the query, up to the
# next name of a list.
_LOGIN_PATTERN = re.compile(r"(?<=://)([^/?#]*|[^/?#:]*:(?!(\d+|\$\w+|\$\{\w+\})/).*)@", re.DOTALL)
_QUERY_PATTERN = re.compile(
    r"(https?://[^?#]*|\w+://[^?#]*(?=[?#][^,/]*=))[?#].*?(?=,\s*\w+://|$)",
    re.DOTALL | re.IGNORECASE,
)
# A variable of the environment, with its key in a query; and what is secret in a text without
# these.
_VARIABLE_PATTERN = re.compile(r"([\w.%-]+=)?(\$\w+|\$\{\w+\})[&;]?")
_SECRET_PATTERN = re.compile(
    r"://(?![^/?#:@]*:@|@)([^/?#]*|[^/?#:]*:(?!\d*/).*)@|https?://[^?#]*[?#](?!\s*(,|$))|\w+://[^?#,]*[?#][^,/]*=",
    re.DOTALL | re.IGNORECASE,
)


def redact_name(name: str) -> str:
    """`name`, or a list of names, without what may be secret.

    That is user and password, and the query of a presigned URL.
    """
    name = _LOGIN_PATTERN.sub("", redact(name))
    return make_printable(_QUERY_PATTERN.sub(r"\1", name))


def check_secrets(data: str) -> None:
    """Raise `Refused` if `data`, which is printed and recorded, holds a password or signature itself."""
    if _SECRET_PATTERN.search(_VARIABLE_PATTERN.sub("", data)):
        raise Refused(
            f"--data {redact_name(data)}: a password or signature would be recorded; name "
            "environment variables that hold all of it, such as '?$SIGNATURE' or "
            "'user:$PASSWORD@', or use ~/.netrc"
        )
