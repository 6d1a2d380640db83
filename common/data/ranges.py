"""Reads ranges of bytes from shards: local files, http(s), and what fsspec names.

A fault that may pass, such as an answer of 503, a reset connection or a name server that is gone for a minute, is tried again
for `PATIENCE_S`. Then the same bytes come, or the run ends in one line that names shard, offset and cause.
"""

import io
import os
import random
import sys
import time
from functools import lru_cache
from typing import Any, BinaryIO

from common.data.range_faults import Answer, Fault, ShardChanged, Unreadable
from common.data.shard_names import file_system, is_http, is_remote, printable_name
from common.errors import Refused, printable
from common.files import open_regular

PATIENCE_S = 180.0  # from the first fault of a range to the last attempt
START_PATIENCE_S = 30.0  # the same for `stat`, since a name may be mistyped
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
SPEAK_S = 5.0  # of waiting, after which people are told why
_CHECK_S = 60.0  # how often a file is compared with its tag if that takes a request of its own
_TAGS = "ETag etag blob_id md5Hash LastModified last_modified mtime updated modified created".split()

Stamp = tuple[int, str]  # bytes; and a tag that differs once the file has changed: ETag, Last-Modified, or time in ns

_jitter = random.SystemRandom()  # takes no numbers from the generators that training draws from


def stat(name: str) -> Stamp:
    """Size and tag of a shard. Raises `Unreadable`, or `Refused` if a package is missing."""
    if is_remote(name):
        return _patiently(START_PATIENCE_S, name, 0, 1, None)[1:]
    try:
        status = os.stat(name.removeprefix("file://"))
    except OSError as error:
        raise Unreadable(name, 0, error.strerror or str(error)) from error
    return status.st_size, str(status.st_mtime_ns)


def read(name: str, start: int, stop: int, tag: str) -> bytes:
    """The bytes `[start, stop)` of a shard that `stat` gave `tag` for. Raises `ShardChanged` or `Unreadable`.

    Several threads may call it at once, and a forked process may call it as well.
    """
    if stop <= start:
        return b""
    if is_remote(name):
        return _patiently(PATIENCE_S, name, start, stop, tag)[0]
    try:
        file = _opened(name, tag)
        found = os.pread(file.fileno(), stop - start, start)
        now = str(os.fstat(file.fileno()).st_mtime_ns)
    except OSError as error:
        raise Unreadable(name, start, error.strerror or str(error)) from error
    if now != tag:
        raise ShardChanged(name, start, now, tag)
    if len(found) < stop - start:
        raise Unreadable(name, start, f"the file ends at byte {start + len(found):,}, not at {stop:,} or later")
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
    return open_regular(name.removeprefix("file://"))


# ---- what is not in local files


def _patiently(patience: float, name: str, start: int, stop: int, tag: str | None) -> Answer:
    """The bytes `[start, stop)`, asked for until there is no `Fault`. Raises `Unreadable` after `patience` seconds of them."""
    from common.data import http_ranges  # its imports take a while

    ask = http_ranges.ask if is_http(name) else _ask_by_fsspec
    began, tries = 0.0, 0
    while True:
        try:
            return ask(name, start, stop, tag)
        except Fault as error:
            fault = error
        now, tries = time.monotonic(), tries + 1
        began = began or now
        wait = fault.wait + _jitter.uniform(0.5, 1) * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (tries - 1))
        if now + wait > began + patience:
            asked = f"; it asks to wait {fault.wait:,.0f} s" if fault.wait else ""
            limit = f"{tries} attempts in {now - began:.0f} s, the limit is {patience:.0f} s"
            raise Unreadable(name, start, f"{fault.cause}{asked}; {limit}")
        if now + wait > began + SPEAK_S and os.environ.get("RANK", "0") == "0":
            _tell_once(f"data: {printable_name(name)}: {fault.cause}; trying again for {patience:.0f} s")
        time.sleep(wait)


@lru_cache
def _tell_once(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _ask_by_fsspec(name: str, start: int, stop: int, tag: str | None) -> Answer:
    """Each file system raises errors of its own. Their texts are left out, since they may hold secrets."""
    look = _stat_of_minute if tag else _stat_of_minute.__wrapped__
    try:
        size, now = look(name, int(time.monotonic() / _CHECK_S))
        if not tag:
            return b"", size, now
        if tag != now:
            raise ShardChanged(name, start, now, tag)
        files, path = file_system(name)
        exactly = {} if files.async_impl else {"cache_type": "none"}  # others would read ahead beyond the range
        found = files.cat_file(path, start=start, end=stop, **exactly)
    except Refused:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise Unreadable(name, start, type(error).__name__) from None
    except Exception as error:
        raise Fault(type(error).__name__) from None
    if len(found) != stop - start:
        raise Fault(f"{len(found):,} bytes came instead of {stop - start:,}")
    return found, size, now


@lru_cache(1024)
def _stat_of_minute(name: str, _minute: int) -> tuple[int, str]:
    files, path = file_system(name)
    files.invalidate_cache()
    info = files.info(path)
    return info["size"], next((str(info[key]) for key in _TAGS if info.get(key)), f"{info['size']} bytes")
