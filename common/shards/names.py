"""Names of shards: which files or URLs `--data` stands for."""

import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.config.secrets import check_secrets, redact_name
from common.data.data_spec import list_tars
from common.data.huggingface import HUB_NAME
from common.data.tables import format_names
from common.errors import Refused, describe_error, hide
from common.files import match_files

_SUFFIXES = (".tar", ".parquet")
_MAX_RANGE = 1_000_000  # shards in one range
# Parameters of a query that sign a URL for a time: of S3, Google, CloudFront, and Azure's, which
# come with a `sig`.
_SIGNED = re.compile(
    "(x-(amz|goog)-.*|signature|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid)=", re.I
)
_SIGNED_AZURE = re.compile("(sv|ss|srt|sr|sp|se|st|spr|sip|sig|skoid|sktid|skt|ske|sks|skv)=")
_COMMA = re.compile(r",(?![^{}]*\})")  # not between braces
_BRACES = re.compile(r"(?<!\$)\{([^{}]*)\}")
_VARIABLE = re.compile(r"\$(\{)?(\w+)(?(1)\})", re.ASCII)  # $NAME or ${NAME}
_SHARD_IN_FOLDER = re.compile(r"(^|/)[^./][^/]*(\.tar|\.parquet)$")  # no hidden file


def is_http(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def is_remote(name: str) -> bool:
    """True if `name` is a URL, read by `requests` or fsspec, and not the path of a local file."""
    return "://" in name


def is_parquet(name: str) -> bool:
    return remove_query(name).endswith(".parquet")


def remove_query(name: str) -> str:
    if is_http(name):
        return re.sub(r"[?#].*", "", name, flags=re.DOTALL)
    return name


def remove_signature(name: str) -> str:
    """`name` without password and signature, which differ from time to time. All else of a query
    may select the content.
    """
    if not is_http(name):
        return redact_name(name)
    parameters = name.partition("?")[2].split("&")
    is_azure = any(parameter.startswith("sig=") for parameter in parameters)
    signatures = _SIGNED_AZURE if is_azure else _SIGNED
    query = "&".join(parameter for parameter in parameters if not signatures.match(parameter))
    return f"{redact_name(name)}?{query}"


def get_file_system(name: str) -> tuple[Any, str]:
    """fsspec's file system for `name`, and the path in it. Raises `Refused` if its package is not
    installed.
    """
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(name)
    except (ImportError, ValueError) as error:  # its text names the package or the protocol
        raise Refused(f"{redact_name(name)}: {error}") from None


# ---- shards of a folder or a pattern


def list_shards(data: str) -> list[str]:
    """The names of the shards that `data` stands for, sorted. Raises `Refused`."""
    tars = list_tars(Path(data).expanduser().absolute())
    if tars:
        return tars
    check_secrets(data)
    return expand(data)


def expand(pattern: str) -> list[str]:
    """The names of shards that `pattern` stands for, sorted, each once. Raises `Refused`.

    It is a file, a folder with *.tar or *.parquet in it, a URL, or several of them joined by
    commas. Braces stand for a range, `{000..127}`, or for alternatives, `{train,extra}`. *, ? and
    [...] are wildcards, but not over http(s), where files can't be listed. Variables of the
    environment are filled in last, so that their values stand for themselves.
    """
    patterns = [pattern]
    if not os.path.exists(pattern):
        parts = [part.strip() for part in _COMMA.split(pattern)]
        patterns = list(
            itertools.chain.from_iterable(_expand_braces(part) for part in parts if part)
        )
    names = sorted(set(itertools.chain.from_iterable(map(_list_files, patterns))))
    shown = redact_name(pattern)
    if not names:
        raise Refused(
            f"{shown}: names no shard; give a file, a folder, or a pattern such as "
            "train-{000..127}.tar"
        )
    for name in names:
        if not remove_query(name).endswith(_SUFFIXES):
            raise Refused(f"--data {shown}: {redact_name(name)} is neither a .tar nor a .parquet")
    if len(set(map(is_parquet, names))) > 1:
        raise Refused(
            f"{shown}: names both *.tar and *.parquet; name one kind, such as {shown}/*.tar"
        )
    return names


def _expand_braces(pattern: str) -> Iterator[str]:
    """`a{1..2}b` -> a1b, a2b."""
    choices = []
    for i, text in enumerate(_BRACES.split(pattern)):
        is_in_braces = i % 2 == 1
        choices.append(_list_choices(text, pattern) if is_in_braces else [text])
    return map("".join, itertools.product(*choices))


def _list_choices(text: str, pattern: str) -> list[str]:
    """What the text between braces stands for: `01..03` or `a,b`. Raises `Refused`."""
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if not ends:
        return text.split(",")
    first = int(ends[1])
    last = int(ends[2])
    if not 0 <= last - first < _MAX_RANGE:
        raise Refused(
            f"{redact_name(pattern)}: {{{text}}} has to count up, by at most {_MAX_RANGE:,}"
        )
    width = len(ends[1]) if text.startswith("0") else 0
    return [f"{number:0{width}}" for number in range(first, last + 1)]


def _fill_variables(name: str) -> str:
    """`name` with the values of variables of the environment, which are secrets from then on.
    Raises `Refused`.
    """

    def get_value(variable: re.Match) -> str:
        key = variable[2]
        if key not in os.environ:
            advice = "export it, or write %24 for a plain $"
            raise Refused(
                f"--data {redact_name(name)}: the environment has no variable {key}; {advice}"
            )
        hide(os.environ[key], f"${key}")
        return os.environ[key]

    return _VARIABLE.sub(get_value, name)


def _list_files(name: str) -> list[str]:
    """The shards that a name without braces stands for."""
    if is_http(name):
        if "*" in name or name.endswith("/"):
            advice = "name them, such as train-{000..127}.tar"
            raise Refused(f"{redact_name(name)}: a web server does not list its files; {advice}")
        return [_fill_variables(name)]
    name = _fill_variables(name) if is_remote(name) else os.path.expanduser(name)
    file_system, path = get_file_system(name)
    try:
        if glob.has_magic(path) and not file_system.exists(path):
            files = file_system.glob(path) if is_remote(name) else match_files(path)
        elif not path.endswith(_SUFFIXES) and file_system.isdir(path):
            files = [
                file for file in file_system.ls(path, detail=False) if _SHARD_IN_FOLDER.search(file)
            ]
        else:
            files = [path]
    except Exception as error:
        # Each file system raises errors of its own, whose texts may hold secrets.
        raise Refused(f"{redact_name(name)}: can't be listed: {type(error).__name__}") from None
    if is_remote(name):
        return [file_system.unstrip_protocol(file) for file in files]
    return list(files)


# ---- shards on the Hub


def list_hub_shards(data: str) -> dict[str, list[str]]:
    """The names of the shards of each split of a data set on the Hub. Raises `Refused`."""
    import datasets

    name = HUB_NAME.fullmatch(data)
    if not name or Path(data).expanduser().exists():
        raise Refused(
            f"--streaming: --data {data} is no name on the Hugging Face Hub, such as owner/name; "
            "leave it out"
        )
    try:
        builder = datasets.load_dataset_builder(name["name"], name["config"])
    except Exception as error:  # the client's HTTP library raises errors of its own
        reason = describe_error(error)
        raise Refused(f"--data {data}: can't be found on the Hugging Face Hub: {reason}") from error
    names_by_split = {}
    suffixes: set[str] = set()
    data_files = builder.config.data_files
    if data_files is None:
        data_files = {}
    for split, files in data_files.items():
        names = sorted(map(str, files))
        names_by_split[str(split)] = names
        suffixes.update(Path(file).suffix or file for file in names)
    if len(suffixes) != 1 or not suffixes <= set(_SUFFIXES):
        kinds = format_names(sorted(suffixes)) if suffixes else "no files"
        raise Refused(
            f"--streaming: --data {data} has {kinds}, not Parquet or tars; leave it out to "
            "download them"
        )
    return names_by_split
