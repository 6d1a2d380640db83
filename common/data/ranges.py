"""Reads ranges of bytes from shards: local files, http(s), and what fsspec names.

A fault that may pass, such as an answer of 503, a reset connection or a name server that is gone for a minute, is tried again
for `PATIENCE_S`. Then the same bytes come, or the run ends in one line that names shard, offset and cause.
"""

import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import BinaryIO, NamedTuple, TypeVar

from common.data.range_faults import Fault, ShardChanged, Unreadable
from common.data.shard_names import file_system, is_http, is_remote, printable_name
from common.errors import Refused, printable
from common.files import open_regular

PATIENCE_S = 180.0  # from the first fault of a range to the last attempt
START_PATIENCE_S = 30.0  # the same for `stat`, since a name may be mistyped
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
SPEAK_S = 5.0  # of waiting, after which people are told why
_CHECK_S = 60.0  # how often a file is compared with its tag if that takes a request of its own
_TAGS = "ETag etag blob_id md5Hash LastModified last_modified mtime updated modified created".split()

_Result = TypeVar("_Result")
_jitter = random.SystemRandom()  # takes no numbers from the generators that training draws from


class FileStamp(NamedTuple):
    size: int  # bytes
    tag: str  # differs once the file has changed: time of modification in ns, or what the server has: ETag, Last-Modified


def stat(name: str) -> FileStamp:
    """Raises `Unreadable`, or `Refused` if a package is missing."""
    if not is_remote(name):
        try:
            status = os.stat(name.removeprefix("file://"))
        except OSError as error:
            raise Unreadable(name, 0, error.strerror or str(error)) from error
        return FileStamp(status.st_size, str(status.st_mtime_ns))
    look, _ = _remote(name)
    return FileStamp(*_patiently(name, 0, lambda: look(name), START_PATIENCE_S))


def read(name: str, start: int, stop: int, tag: str) -> bytes:
    """The bytes `[start, stop)` of a shard that `stat` gave `tag` for. Raises `ShardChanged` or `Unreadable`.

    Several threads may call it at once, and a forked process may call it as well.
    """
    if stop <= start:
        return b""
    if not is_remote(name):
        return _read_local(name, start, stop, tag)
    _, fetch = _remote(name)
    return _patiently(name, start, lambda: fetch(name, start, stop, tag), PATIENCE_S)


class RangeFile(io.RawIOBase):
    """A shard as a file. At least `ahead` bytes are read at once, since headers of small members lie close."""

    def __init__(self, name: str, stamp: tuple[int, str], ahead: int = 0):
        self.size, self._name, self._tag, self._ahead = stamp[0], name, stamp[1], ahead
        self._at, self._start, self._data = 0, 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        stop = self.size if count < 0 else min(self.size, self._at + count)
        if self._at < self._start or stop > self._start + len(self._data):
            end = min(self.size, max(stop, self._at + self._ahead))
            self._start, self._data = self._at, read(self._name, self._at, end, self._tag)
        found = self._data[self._at - self._start : stop - self._start]
        self._at += len(found)
        return found


def _read_local(name: str, start: int, stop: int, tag: str) -> bytes:
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


@lru_cache(64)
def _opened(name: str, _tag: str) -> BinaryIO:
    """A file that stays open: if another takes its name, its own content can still be read."""
    return open_regular(name.removeprefix("file://"))


def _remote(name: str) -> tuple[Callable[[str], tuple[int, str]], Callable[[str, int, int, str], bytes]]:
    """What gives size and tag of a remote file, and what fetches a range of it once."""
    if is_http(name):
        from common.data import http_ranges  # its imports take a while

        return http_ranges.stat, http_ranges.fetch
    return _stat_by_fsspec, _fetch_by_fsspec


def _patiently(name: str, start: int, attempt: Callable[[], _Result], patience: float) -> _Result:
    """What `attempt` returns once it raises no `Fault`. Raises `Unreadable` after `patience` seconds of faults."""
    began, tries = 0.0, 0
    while True:
        try:
            return attempt()
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


# ---- what fsspec names


def _stat_by_fsspec(name: str) -> tuple[int, str]:
    with _faults_of_fsspec(name, 0):
        files, path = file_system(name)
        files.invalidate_cache()
        info = files.info(path)
        return info["size"], next((str(info[key]) for key in _TAGS if info.get(key)), f"{info['size']} bytes")


@lru_cache(1024)
def _stat_of_minute(name: str, _minute: int) -> tuple[int, str]:
    return _stat_by_fsspec(name)


def _fetch_by_fsspec(name: str, start: int, stop: int, tag: str) -> bytes:
    now = _stat_of_minute(name, int(time.monotonic() / _CHECK_S))[1]
    if now != tag:
        raise ShardChanged(name, start, now, tag)
    with _faults_of_fsspec(name, start):
        files, path = file_system(name)
        exactly = {} if files.async_impl else {"cache_type": "none"}  # others would read ahead beyond the range
        found = files.cat_file(path, start=start, end=stop, **exactly)
    if len(found) != stop - start:
        raise Fault(f"{len(found):,} bytes came instead of {stop - start:,}")
    return found


@contextmanager
def _faults_of_fsspec(name: str, start: int) -> Iterator[None]:
    """Errors in the block become `Unreadable` or `Fault`. Their texts are left out, since they may hold secrets."""
    try:
        yield
    except Refused:
        raise
    except (FileNotFoundError, PermissionError) as error:
        raise Unreadable(name, start, type(error).__name__) from None
    except Exception as error:  # each file system raises errors of its own
        raise Fault(type(error).__name__) from None
