"""Ranges of bytes over http(s), on connections that are kept and that no other process shares.

Credentials come from the URL or ~/.netrc, proxies and certificate authorities from the environment, and a redirect to another
host does not get them: all as `requests` does it. No error or line of a log holds credentials or the query of a URL.
"""

import http.client
import logging
import os
import re
import ssl
import time
from contextlib import closing
from functools import lru_cache
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Retry
from urllib3.exceptions import HTTPError

from common.data.range_faults import Answer, Fault, ShardChanged, Unreadable

CONNECT_S = 10.0  # until a server counts as gone
SILENCE_S = 20.0  # between two pieces of an answer
SLOWEST = 2**15  # bytes per second; a slower answer is asked for again
_PIECE = 2**18  # bytes that are taken at once
_WAY_IN = "; is the signature in the URL too old, or are credentials missing in ~/.netrc?"
_ENDED_EARLY = "the answer ended early"


def ask(name: str, start: int, stop: int, tag: str | None) -> Answer:
    """The bytes `[start, stop)` of a file, its size, and its tag, which has to be `tag` unless that is None.

    Raises `Fault` if it is worth asking again, else `ShardChanged` or `Unreadable`.
    """
    headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    try:
        answer = _session(os.getpid()).get(name, headers=headers, timeout=(CONNECT_S, SILENCE_S), stream=True)
        with closing(answer):
            size, now = _check(name, start, stop, tag, answer)
            return _body(answer.raw, stop - start), size, now
    except (requests.RequestException, HTTPError, OSError) as error:
        cause = _first_of(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        way_out = "name the file of its authority in REQUESTS_CA_BUNDLE"
        raise Unreadable(name, start, f"certificate: {cause.verify_message}; {way_out}")
    if isinstance(cause, ValueError):  # of the URL
        raise Unreadable(name, start, type(cause).__name__)
    raise Fault(_text(cause))


def _check(name: str, start: int, stop: int, tag: str | None, answer: requests.Response) -> tuple[int, str]:
    """Size and tag of the file if the answer brings the bytes `[start, stop)` of it, else raises why not."""
    status, sent = answer.status_code, answer.headers.get("Content-Range", "")
    said = f"{status} {http.client.responses.get(status, '')}".rstrip()
    if name.startswith("https:") and not answer.url.startswith("https:"):
        raise Unreadable(name, start, "redirected from https to http, where nothing is checked")
    if status in (401, 403) and answer.history:  # each redirect brings a new signature
        raise Fault(f"{said}, after a redirect")
    if status in (408, 425, 429) or status >= 500:
        raise Fault(said, Retry().get_retry_after(answer.raw) or 0.0)
    if status == 416 and tag:
        raise ShardChanged(name, start, sent or "shorter", f"{stop} bytes or more")
    if status >= 300:
        raise Unreadable(name, start, said + _WAY_IN * (status in (401, 403)))
    found = re.fullmatch(f"bytes {start}-{stop - 1}/([0-9]+)", sent)
    if status != 206 or not found or answer.headers.get("Content-Encoding", "identity") != "identity":
        sent = "the whole file" if status == 200 else sent[:80] or "something else"
        raise Fault(f"asked for bytes {start}-{stop - 1}, the server sends {sent}; it has to serve ranges")
    now = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or f"{found[1]} bytes"
    if tag not in (None, now):
        raise ShardChanged(name, start, now, str(tag))
    return int(found[1]), now


def _body(raw: Any, size: int) -> bytes:
    """`size` bytes. An answer that drips is cut off."""
    found: list[bytes] = []
    left, latest = size, time.monotonic() + SILENCE_S + size / SLOWEST
    while left:
        if not (piece := raw.read1(min(left, _PIECE))):
            raise Fault(_ENDED_EARLY)
        if time.monotonic() > latest:
            raise Fault(f"slower than {SLOWEST / 2**10:.0f} KiB/s")
        found.append(piece)
        left -= len(piece)
    return b"".join(found)


def _first_of(error: BaseException) -> BaseException:
    """The first error of a chain: the texts of those that follow may hold the URL."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return error


def _text(cause: BaseException) -> str:
    if isinstance(cause, http.client.IncompleteRead):
        return _ENDED_EARLY
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return (isinstance(cause, OSError) and cause.strerror) or type(cause).__name__


@lru_cache
def _session(_process: int) -> requests.Session:
    """Connections of a process, since a fork inherits its parent's."""
    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=64))
    session.max_redirects = 5
    return session


def _without_query(record: logging.LogRecord) -> bool:
    record.msg, record.args = re.sub(r"\?[^\s\"'>]*", "", record.getMessage()), ()
    return True


logging.getLogger("urllib3.connectionpool").addFilter(_without_query)  # it logs URLs
