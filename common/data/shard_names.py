"""Names of shards: which ones `--data` stands for."""

import glob
import itertools
import os
import re
from collections.abc import Iterator
from typing import Any

from common.config.secrets import printable_name
from common.errors import Refused, hide
from common.files import match_files

_SUFFIXES = (".tar", ".parquet")
_LIMIT = 1_000_000  # shards in one range
# Parameters of a query that sign a URL for a time: of S3, Google, CloudFront, and Azure's, which come with a `sig`.
_SIGNED = re.compile("(x-(amz|goog)-.*|signature|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid)=", re.I)
_SIGNED_AZURE = re.compile("(sv|ss|srt|sr|sp|se|st|spr|sip|sig|skoid|sktid|skt|ske|sks|skv)=")
_COMMA = re.compile(r",(?![^{}]*\})")  # not between braces
_BRACES = re.compile(r"(?<!\$)\{([^{}]*)\}")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


def without_signature(name: str) -> str:
    """`name` without password and signature, which differ from time to time. All else of a query may select the content."""
    if not is_http(name):
        return printable_name(name)
    parameters = name.partition("?")[2].split("&")
    signatures = _SIGNED_AZURE if any(each.startswith("sig=") for each in parameters) else _SIGNED
    kept = [each for each in parameters if not signatures.match(each)]
    return f"{printable_name(name)}?{'&'.join(kept)}"


def is_http(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def without_query(name: str) -> str:
    return re.sub(r"[?#].*", "", name, flags=re.DOTALL) if is_http(name) else name


def is_remote(name: str) -> bool:
    """True if `name` is a URL, read by `requests` or fsspec, and not the path of a local file."""
    return "://" in name


def expand(pattern: str) -> list[str]:
    """The names of shards that `pattern` stands for, sorted, each once. Raises `Refused`.

    It is a file, a folder with *.tar or *.parquet in it, a URL, or several of them joined by commas. Braces stand for a range,
    `{000..127}`, or for alternatives, `{train,extra}`. *, ? and [...] are wildcards, but not over http(s), where files can't
    be listed. Variables of the environment are filled in last, so that their values stand for themselves.
    """
    parts = [part.strip() for part in _COMMA.split(pattern) if part.strip()]
    ones = [pattern] if os.path.exists(pattern) else (one for part in parts for one in _without_braces(part))
    names = sorted({name for one in ones for name in _found(one)})
    shown = printable_name(pattern)
    if not names:
        raise Refused(f"{shown}: names no shard; give a file, a folder, or a pattern such as train-{{000..127}}.tar")
    if others := [name for name in names if not without_query(name).endswith(_SUFFIXES)]:
        raise Refused(f"--data {shown}: {printable_name(others[0])} is neither a .tar nor a .parquet")
    if len({suffix for suffix in _SUFFIXES if any(without_query(name).endswith(suffix) for name in names)}) > 1:
        raise Refused(f"{shown}: names both *.tar and *.parquet; name one kind, such as {shown}/*.tar")
    return names


def file_system(name: str) -> tuple[Any, str]:
    """fsspec's file system for `name`, and the path in it. Raises `Refused` if its package is not installed."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(name)
    except (ImportError, ValueError) as error:  # its text names the package or the protocol
        raise Refused(f"{printable_name(name)}: {error}") from None


def _without_braces(pattern: str) -> Iterator[str]:
    """`a{1..2}b` -> a1b, a2b."""
    texts = _BRACES.split(pattern)  # every second one was in braces
    choices: list[list[str]] = [[text] for text in texts]
    for place, inside in [*enumerate(texts)][1::2]:
        choices[place] = inside.split(",")
        if ends := re.fullmatch(r"(\d+)\.\.(\d+)", inside):
            first, last = map(int, ends.groups())
            if not 0 <= last - first < _LIMIT:
                raise Refused(f"{printable_name(pattern)}: {{{inside}}} has to count up, by at most {_LIMIT:,}")
            width = len(ends[1]) if inside.startswith("0") else 0
            choices[place] = [f"{number:0{width}}" for number in range(first, last + 1)]
    return map("".join, itertools.product(*choices))


def _with_variables(name: str) -> str:
    """`name` with the values of variables of the environment, which are secrets from then on. Raises `Refused`."""

    def get_value(variable: re.Match) -> str:
        key = variable[1] or variable[2]
        if key not in os.environ:
            advice = "export it, or write %24 for a plain $"
            raise Refused(f"--data {printable_name(name)}: the environment has no variable {key}; {advice}")
        hide(os.environ[key], f"${key}")
        return os.environ[key]

    return _VARIABLE.sub(get_value, name)


def _found(name: str) -> list[str]:
    """The shards that a name without braces stands for."""
    if is_http(name):
        if "*" in name or name.endswith("/"):
            way_out = "name them, such as train-{000..127}.tar"
            raise Refused(f"{printable_name(name)}: a web server does not list its files; {way_out}")
        return [_with_variables(name)]
    name = _with_variables(name) if is_remote(name) else os.path.expanduser(name)
    files, path = file_system(name)
    try:
        if glob.has_magic(path) and not files.exists(path):
            found = files.glob(path) if is_remote(name) else match_files(path)
        elif not path.endswith(_SUFFIXES) and files.isdir(path):
            found = [
                file for file in files.ls(path, detail=False) if re.search(r"(^|/)[^./][^/]*(\.tar|\.parquet)$", file)
            ]
        else:
            found = [path]
    except Exception as error:  # each file system raises errors of its own, whose texts may hold secrets
        raise Refused(f"{printable_name(name)}: can't be listed: {type(error).__name__}") from None
    return [files.unstrip_protocol(file) if is_remote(name) else file for file in found]
