"""Reads ranges of bytes from shards: local files, http(s), and what fsspec names.

After a fault that may pass, such as an answer of 503 or a reset connection, a range is asked for again for `PATIENCE_S`. Then
the run ends in one line that names shard, offset and cause. No error holds credentials or a URL's query.
"""

import http.client
import io
import os
import random
import re
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO

from common.data.shard_names import file_system, is_http, is_remote, printable_name
from common.errors import Refused
from common.files import open_regular

if TYPE_CHECKING:
    import requests  # imported late, with urllib3: it takes a while

PATIENCE_S = 180.0  # for all attempts at a range
START_PATIENCE_S = 30.0  # the same for `stat`, since a name may be mistyped
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
CONNECT_S = 10.0  # until a server counts as gone
SILENCE_S = 20.0  # between two pieces of an answer
_CHECK_S = 60.0  # how often a file is compared with its tag if that takes a request of its own
_TAGS = "ETag etag blob_id md5Hash LastModified last_modified mtime updated modified created".split()
_WAY_IN = "; is the signature in the URL too old, or are credentials missing in ~/.netrc?"

Stamp = tuple[int, str]  # bytes; and a tag that differs once the file has changed: ETag, Last-Modified, or time in ns
Answer = tuple[bytes, int, str]  # bytes of a range, and of its file the size and tag

_jitter = random.SystemRandom()  # takes no numbers from the generators that training draws from


def _unreadable(name: str, start: int, cause: str) -> Refused:
    """A range that can't be read: one line that names shard, offset and cause, and holds no secret."""
    return Refused(f"{printable_name(name)}: byte {start:,}: {cause}")


def _changed(name: str, start: int, now: str, before: str) -> Refused:
    """A shard that is not the one that was indexed."""
    return _unreadable(name, start, f"it has changed since it was indexed: it is {now} now, and was {before}")


class Fault(Exception):
    """A fault that may pass: the range is asked for again. Its text holds no secret."""


def stat(name: str) -> Stamp:
    """Size and tag of a shard. Raises `Refused`."""
    if is_remote(name):
        return _patiently(START_PATIENCE_S, name, 0, 1, None)[1:]
    try:
        status = os.stat(name)
    except OSError as error:
        raise _unreadable(name, 0, error.strerror or str(error)) from error
    return status.st_size, str(status.st_mtime_ns)


def read(name: str, start: int, stop: int, tag: str) -> bytes:
    """The bytes `[start, stop)` of a shard that `stat` gave `tag` for. Raises `Refused`."""
    if stop <= start:
        return b""
    if is_remote(name):
        return _patiently(PATIENCE_S, name, start, stop, tag)[0]
    try:
        file = _opened(name, tag)
        found = os.pread(file.fileno(), stop - start, start)
        now = str(os.fstat(file.fileno()).st_mtime_ns)
    except OSError as error:
        raise _unreadable(name, start, error.strerror or str(error)) from error
    if now != tag:
        raise _changed(name, start, now, tag)
    if len(found) < stop - start:
        raise _unreadable(name, start, f"the file ends at byte {start + len(found):,}, not at {stop:,} or later")
    return found


class RangeFile(io.RawIOBase):
    """A shard as a file."""

    def __init__(self, name: str, stamp: Stamp):
        self.size, self._name, self._tag, self._at = stamp[0], name, stamp[1], 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = read(self._name, self._at, min(self.size, self._at + len(buffer)), self._tag)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


@lru_cache(64)
def _opened(name: str, _tag: str) -> BinaryIO:
    """A file that stays open: if another takes its name, its own content can still be read."""
    return open_regular(name)


# ---- URLs


def _patiently(patience: float, name: str, start: int, stop: int, tag: str | None) -> Answer:
    """The bytes `[start, stop)`, asked for until there is no `Fault`. Raises `Refused` after `patience` seconds."""
    ask = _ask_by_http if is_http(name) else _ask_by_fsspec
    end, tries = time.monotonic() + patience, 0
    while True:
        try:
            return ask(name, start, stop, tag)
        except Fault as error:
            wait, tries = _jitter.uniform(0.5, 1) * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**tries), tries + 1
            if time.monotonic() + wait > end:
                cause = f"{error}; {tries} attempts, the limit is {patience:.0f} s"
                raise _unreadable(name, start, cause) from None
        time.sleep(wait)


def _ask_by_fsspec(name: str, start: int, stop: int, tag: str | None) -> Answer:
    """Each file system raises errors of its own. Their texts are left out, since they may hold secrets."""
    look = _stat_of_minute if tag else _stat_of_minute.__wrapped__
    try:
        size, now = look(name, int(time.monotonic() / _CHECK_S))
        if not tag:
            return b"", size, now
        if tag != now:
            raise _changed(name, start, now, tag)
        files, path = file_system(name)
        exactly = {} if files.async_impl else {"cache_type": "none"}  # others would read ahead beyond the range
        found = files.cat_file(path, start=start, end=stop, **exactly)
    except Refused:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise _unreadable(name, start, type(error).__name__) from None
    except Exception as error:
        raise Fault(type(error).__name__) from None
    if len(found) != stop - start:
        raise Fault(f"{len(found):,} bytes came instead of {stop - start:,}")
    return found, size, now


@lru_cache(1024)
def _stat_of_minute(name: str, _minute: int) -> Stamp:
    files, path = file_system(name)
    files.invalidate_cache()
    info = files.info(path)
    return info["size"], next((str(info[key]) for key in _TAGS if info.get(key)), f"{info['size']} bytes")


# ---- http


def _ask_by_http(name: str, start: int, stop: int, tag: str | None) -> Answer:
    """The bytes `[start, stop)`, size and tag of a file. Raises `Fault` if it is worth asking again, else `Refused`."""
    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    try:
        with _session(os.getpid()).get(name, headers=headers, timeout=(CONNECT_S, SILENCE_S), stream=True) as answer:
            size, now = _check(name, start, stop, tag, answer)
            found = answer.raw.read(stop - start)
    except (Fault, Refused):
        raise
    except Exception as error:  # requests, urllib3 and http.client let errors of many kinds through
        if isinstance(error, ValueError):  # The URL is wrong. A wrong answer has one only as its cause.
            raise _unreadable(name, start, f"{type(error).__name__}: a wrong URL, or a redirect to one") from None
        cause: BaseException = error
        while inner := cause.__cause__ or cause.__context__:  # texts of errors that follow the first may hold the URL
            cause = inner
        raise Fault((isinstance(cause, OSError) and cause.strerror) or type(cause).__name__) from None
    if len(found) < stop - start:
        raise Fault("the answer ended early")
    return found, size, now


def _check(name: str, start: int, stop: int, tag: str | None, answer: "requests.Response") -> Stamp:
    """Size and tag of the file if the answer brings the bytes `[start, stop)` of it, else raises why not."""
    status, sent = answer.status_code, answer.headers.get("Content-Range", "")
    said = f"{status} {http.client.responses.get(status, '')}".rstrip()
    denied = status in (401, 403)
    if status in (408, 425, 429) or status >= 500 or (denied and answer.history):  # a redirect brings a new signature
        raise Fault(said)
    if status >= 300:
        raise _unreadable(name, start, said + _WAY_IN * denied)
    found = re.fullmatch(f"bytes {start}-{stop - 1}/([0-9]{{1,18}})", sent)
    if status != 206 or not found or answer.headers.get("Content-Encoding", "identity") != "identity":
        sent = sent[:80] or "the whole file"
        raise Fault(f"asked for bytes {start}-{stop - 1}, the server sends {sent}; it has to serve ranges")
    now = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or f"{found[1]} bytes"
    if tag not in (None, now):
        raise _changed(name, start, now, str(tag))
    return int(found[1]), now


@lru_cache
def _session(_process: int) -> "requests.Session":
    """Connections of a process, since a fork inherits its parent's."""
    import requests
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=64))  # urllib3 warns of more threads
    return session
