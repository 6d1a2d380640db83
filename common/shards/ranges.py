"""Ranges of bytes of shards: in local files, over http(s), and in what fsspec names.

After a fault that may pass, such as an answer of 503 or a reset connection, a range is asked for
again for `PATIENCE_S`. Then the run ends in one line that names shard, offset and cause. No error
holds credentials or a URL's query.
"""

import http.client
import io
import os
import random
import re
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO

from common.config.secrets import redact_name
from common.errors import Refused, get_os_reason
from common.files import open_regular
from common.shards.names import get_file_system, is_http, is_remote

if TYPE_CHECKING:
    import requests  # imported late, with urllib3: it takes a while

PATIENCE_S = 180.0  # for all attempts at a range
START_PATIENCE_S = 30.0  # the same for `stat`, since a name may be mistyped
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 15.0
CONNECT_S = 10.0  # until a server counts as gone
SILENCE_S = 20.0  # between two pieces of an answer
_CHECK_S = 60.0  # how often a file is compared with its tag if that takes a request of its own
_TAGS = (
    "ETag etag blob_id md5Hash LastModified last_modified mtime updated modified created".split()
)
_WAY_IN = "; is the signature in the URL too old, or are credentials missing in ~/.netrc?"

# Bytes; and a tag that differs once the file has changed: ETag, Last-Modified, or time in ns.
Stamp = tuple[int, str]
Answer = tuple[bytes, int, str]  # bytes of a range, and of its file the size and tag

_jitter = random.SystemRandom()  # takes no numbers from the generators that training draws from


def _describe_unreadable(name: str, start: int, cause: str) -> Refused:
    """A range that can't be read: one line that names shard, offset and cause, and holds no secret."""
    return Refused(f"{redact_name(name)}: byte {start:,}: {cause}")


def _describe_change(name: str, start: int, tag: str, indexed_tag: str) -> Refused:
    """A shard that is not the one that was indexed."""
    return _describe_unreadable(
        name, start, f"it has changed since it was indexed: it is {tag} now, and was {indexed_tag}"
    )


class Fault(Exception):
    """A fault that may pass: the range is asked for again. Its text holds no secret."""


def stat(name: str) -> Stamp:
    """Size and tag of a shard. Raises `Refused`."""
    if is_remote(name):
        _, size, tag = _ask_patiently(START_PATIENCE_S, name, 0, 1, None)
        return size, tag
    try:
        status = os.stat(name)
    except OSError as error:
        raise _describe_unreadable(name, 0, get_os_reason(error)) from error
    return status.st_size, str(status.st_mtime_ns)


def read(name: str, start: int, stop: int, tag: str) -> bytes:
    """The bytes `[start, stop)` of a shard that `stat` gave `tag` for. Raises `Refused`."""
    if stop <= start:
        return b""
    if is_remote(name):
        data, _, _ = _ask_patiently(PATIENCE_S, name, start, stop, tag)
        return data
    try:
        file = _open_file(name, tag)
        data = os.pread(file.fileno(), stop - start, start)
        mtime = str(os.fstat(file.fileno()).st_mtime_ns)
    except OSError as error:
        raise _describe_unreadable(name, start, get_os_reason(error)) from error
    if mtime != tag:
        raise _describe_change(name, start, mtime, tag)
    if len(data) < stop - start:
        raise _describe_unreadable(
            name, start, f"the file ends at byte {start + len(data):,}, not at {stop:,} or later"
        )
    return data


class RangeFile(io.RawIOBase):
    """A shard as a file."""

    def __init__(self, name: str, stamp: Stamp):
        self.size, self._tag = stamp
        self._name = name
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}
        self._position = offset + starts[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self.size, self._position + len(buffer))
        data = read(self._name, self._position, stop, self._tag)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@lru_cache(64)
def _open_file(name: str, _tag: str) -> BinaryIO:
    """A file that stays open: if another takes its name, its own content can still be read."""
    return open_regular(name)


# ---- URLs


def _ask_patiently(patience: float, name: str, start: int, stop: int, tag: str | None) -> Answer:
    """The bytes `[start, stop)`, asked for until there is no `Fault`. Raises `Refused` after
    `patience` seconds.
    """
    ask = _ask_by_http if is_http(name) else _ask_by_fsspec
    deadline = time.monotonic() + patience
    num_attempts = 0
    while True:
        try:
            return ask(name, start, stop, tag)
        except Fault as error:
            wait = _jitter.uniform(0.5, 1) * min(MAX_WAIT_S, FIRST_WAIT_S * 2**num_attempts)
            num_attempts += 1
            if time.monotonic() + wait > deadline:
                cause = f"{error}; {num_attempts} attempts, the limit is {patience:.0f} s"
                raise _describe_unreadable(name, start, cause) from None
        time.sleep(wait)


def _ask_by_fsspec(name: str, start: int, stop: int, tag: str | None) -> Answer:
    """Each file system raises errors of its own. Their texts are left out, since they may hold secrets."""
    get_stamp = _get_stamp_of_minute if tag else _get_stamp_of_minute.__wrapped__
    try:
        size, new_tag = get_stamp(name, int(time.monotonic() / _CHECK_S))
        if not tag:
            return b"", size, new_tag
        if tag != new_tag:
            raise _describe_change(name, start, new_tag, tag)
        file_system, path = get_file_system(name)
        # Others would read ahead beyond the range.
        options = {} if file_system.async_impl else {"cache_type": "none"}
        data = file_system.cat_file(path, start=start, end=stop, **options)
    except Refused:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise _describe_unreadable(name, start, type(error).__name__) from None
    except Exception as error:
        raise Fault(type(error).__name__) from None
    if len(data) != stop - start:
        raise Fault(f"{len(data):,} bytes came instead of {stop - start:,}")
    return data, size, new_tag


@lru_cache(1024)
def _get_stamp_of_minute(name: str, _minute: int) -> Stamp:
    file_system, path = get_file_system(name)
    file_system.invalidate_cache()
    info = file_system.info(path)
    tags = [str(info[key]) for key in _TAGS if info.get(key)]
    size = info["size"]
    return size, tags[0] if tags else f"{size} bytes"


# ---- http


def _ask_by_http(name: str, start: int, stop: int, tag: str | None) -> Answer:
    """The bytes `[start, stop)`, size and tag of a file. Raises `Fault` if it is worth asking
    again, else `Refused`.
    """
    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    try:
        session = _open_session(os.getpid())
        with session.get(
            name, headers=headers, timeout=(CONNECT_S, SILENCE_S), stream=True
        ) as answer:
            size, new_tag = _check_answer(name, start, stop, tag, answer)
            data = answer.raw.read(stop - start)
    except (Fault, Refused):
        raise
    except Exception as error:  # requests, urllib3 and http.client let errors of many kinds through
        # The URL is wrong. A wrong answer has one only as its cause.
        if isinstance(error, ValueError):
            raise _describe_unreadable(
                name, start, f"{type(error).__name__}: a wrong URL, or a redirect to one"
            ) from None
        cause: BaseException = error
        # Texts of errors that follow the first may hold the URL.
        while inner := cause.__cause__ or cause.__context__:
            cause = inner
        reason = type(cause).__name__
        if isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror
        raise Fault(reason) from None
    if len(data) < stop - start:
        raise Fault("the answer ended early")
    return data, size, new_tag


def _check_answer(
    name: str, start: int, stop: int, tag: str | None, answer: "requests.Response"
) -> Stamp:
    """Size and tag of the file if the answer brings the bytes `[start, stop)` of it, else raises why not."""
    status = answer.status_code
    reason = f"{status} {http.client.responses.get(status, '')}".rstrip()
    is_denied = status in (401, 403)
    has_expired = is_denied and bool(answer.history)  # a redirect brings a new signature
    if status in (408, 425, 429) or status >= 500 or has_expired:
        raise Fault(reason)
    if status >= 300:
        advice = _WAY_IN if is_denied else ""
        raise _describe_unreadable(name, start, reason + advice)
    content_range = answer.headers.get("Content-Range", "")
    match = re.fullmatch(f"bytes {start}-{stop - 1}/([0-9]{{1,18}})", content_range)
    is_encoded = answer.headers.get("Content-Encoding", "identity") != "identity"
    if status != 206 or not match or is_encoded:
        sent_range = content_range[:80] if content_range else "the whole file"
        raise Fault(
            f"asked for bytes {start}-{stop - 1}, the server sends {sent_range}; it has to serve "
            "ranges"
        )
    size = match[1]
    new_tag = f"{size} bytes"
    for header in ("Last-Modified", "ETag"):
        if answer.headers.get(header):
            new_tag = answer.headers[header]
    if tag is not None and tag != new_tag:
        raise _describe_change(name, start, new_tag, tag)
    return int(size), new_tag


@lru_cache
def _open_session(_process: int) -> "requests.Session":
    """Connections of a process, since a fork inherits its parent's."""
    import requests
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=64))  # urllib3 warns of more threads
    return session
