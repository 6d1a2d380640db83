"""Shards: their names, and ranges of bytes from local files, a web server with every fault, and fsspec."""

import hashlib
import io
import multiprocessing
import os
import pickle
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import fsspec
import numpy as np
import pytest

from common.config.secrets import redact_name
from common.errors import Refused
from common.shards import ranges
from common.shards.names import expand, remove_signature
from common.shards.ranges import RangeFile, read, stat
from tests.harness.range_server import RangeServer

DATA = np.random.default_rng(0).bytes(100_000)
SECRETS = ("hunter2", "s3cr3t")


@pytest.fixture(scope="module")
def kept_server():
    with RangeServer() as server:
        yield server


@pytest.fixture
def server(kept_server, quick):
    kept_server.files = {"/a.tar": DATA, "/empty.tar": b""}
    for state in (kept_server.tags, kept_server.faults, kept_server.requests):
        state.clear()
    return kept_server


@pytest.fixture
def quick(monkeypatch):
    """Short waits, and no proxy."""
    for name, value in (
        ("FIRST_WAIT_S", 0.01),
        ("MAX_WAIT_S", 0.05),
        ("PATIENCE_S", 5.0),
        ("SILENCE_S", 0.3),
    ):
        monkeypatch.setattr(ranges, name, value)
    monkeypatch.setenv("no_proxy", "*")


# ---- names


def test_patterns_name_shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "b-01.tar b-00.tar b-02.tar index.json c.parquet one/x.tar one/._x.tar other/x.tar".split()
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(DATA)
    paths = [str(tmp_path / f"b-{number:02}.tar") for number in range(3)]
    for pattern in (
        "b-{00..02}.tar",
        "b-*.tar",
        "b-02.tar, b-{00,01}.tar, b-02.tar",
        str(tmp_path / "b-0[0-2].tar"),
    ):
        assert expand(pattern) == paths, pattern
    assert expand("one") == [str(tmp_path / "one/x.tar")]
    assert expand("o*/x.tar") == [str(tmp_path / f"{folder}/x.tar") for folder in ("one", "other")]
    Path("one").rename("a,{1..2}[x]")
    assert expand("a,{1..2}[x]") == [str(tmp_path / "a,{1..2}[x]/x.tar")]
    web = [f"https://h/{part}/{number:06}.tar?k=v" for part in ("a", "b") for number in (9, 10)]
    assert expand("https://h/{a,b}/{000009..000010}.tar?k=v") == web
    assert expand("http://h/{9..11}.tar") == [f"http://h/{number}.tar" for number in (10, 11, 9)]


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("s3://user:hunter2@bucket/{0..1}.tar", "s3://bucket/0.tar: Install s3fs to access S3"),
        ("odd://x.tar", "odd://x.tar: Protocol not known: odd"),
        (
            "https://u:hunter2@h/*.tar?k=s3cr3t",
            "https://h/*.tar: a web server does not list its files; name them",
        ),
        ("a{3..1}.tar", "a{3..1}.tar: {3..1} has to count up, by at most 1,000,000"),
        ("a{1..9999999999}.tar", "{1..9999999999} has to count up, by at most"),
        ("{tmp}/*.tar", "*.tar: names no shard; give a file, a folder, or a pattern"),
        ("a.tar,b.parquet", "names both *.tar and *.parquet"),
        (" , ", "names no shard"),
    ],
)
def test_refused_patterns(pattern, message, tmp_path):
    with pytest.raises(Refused) as refused:
        expand(pattern.replace("{tmp}", str(tmp_path)))
    assert message in str(refused.value)
    assert not any(secret in str(refused.value) for secret in SECRETS)


def test_printable_names():
    assert redact_name("https://u:p@ss@h:1/a.tar?X-Sig=1#x") == "https://h:1/a.tar"
    assert (
        redact_name("s3://key:secret@b/a?.tar,/local/a@b?.tar\n")
        == "s3://b/a?.tar,/local/a@b?.tar\\n"
    )


SIGNED = "https://h/a.tar?X-Amz-Date=1&X-Amz-Signature=2"


@pytest.mark.parametrize(
    "name, other_name, is_same",
    [
        (SIGNED, "https://h/a.tar?X-Amz-Date=3&X-Amz-Signature=4", True),
        (
            "https://h/a.tar?se=1&sig=2&versionid=7",
            "https://me:pw@h/a.tar?se=3&sig=4&versionid=7",
            True,
        ),
        ("https://h/a.tar?se=1&sig=2&versionid=7", "https://h/a.tar?se=1&sig=2&versionid=8", False),
        (SIGNED + "&versionId=7", SIGNED + "&versionId=8", False),
        ("https://h/get?file=a.tar", "https://h/get?file=b.tar", False),
        ("https://h/a.tar?se=1", "https://h/a.tar?se=2", False),
        ("/a.tar?expires=1", "/a.tar?expires=2", False),
    ],
)
def test_only_the_signature_of_a_url_identifies_nothing(name, other_name, is_same):
    assert (remove_signature(name) == remove_signature(other_name)) == is_same


# ---- local files and fsspec


def test_local_ranges(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    name = str(path)
    size, tag = stat(name)
    assert size == len(DATA)
    assert (read(name, 5, 1000, tag), read(name, 7, 7, tag)) == (DATA[5:1000], b"")
    with pytest.raises(
        Refused, match=r"a\.tar: byte 99,990: the file ends at byte 100,000, not at 100,010"
    ):
        read(name, 99_990, 100_010, tag)
    os.utime(path, ns=(1, 1))
    with pytest.raises(Refused, match=r"a\.tar: byte 5: it has changed .* 1 now, and was \d+"):
        read(name, 5, 1000, tag)
    tag = stat(name)[1]
    file = io.BufferedReader(RangeFile(name, (len(DATA), tag)), 100)
    assert (file.seek(-10, 2), file.read(4), file.tell(), file.read()) == (
        99_990,
        DATA[-10:-6],
        99_994,
        DATA[-6:],
    )
    assert (file.read(1), file.seek(7), file.read(10), file.read(10)) == (
        b"",
        7,
        DATA[7:17],
        DATA[17:27],
    )
    path.unlink()
    for call in (lambda: stat(name), lambda: read(name, 5, 6, "another")):
        with pytest.raises(Refused, match=r"byte [05]: No such file or directory"):
            call()


def test_ranges_of_fsspec(quick, monkeypatch):
    files = fsspec.filesystem("memory")
    files.pipe({"/kept/a.tar": DATA, "/kept/b.tar": DATA[::-1], "/kept/notes": b""})
    a, b = names = ["memory:///kept/a.tar", "memory:///kept/b.tar"]
    for pattern in ("memory://kept", "memory://kept/*.tar", "memory://kept/{a,b}.tar"):
        assert expand(pattern) == names
    tags = {name: stat(name)[1] for name in names}
    assert [read(name, 500, 600, tags[name]) for name in names] == [
        DATA[500:600],
        DATA[::-1][500:600],
    ]

    failure = OSError("https://h/?s3cr3t")
    monkeypatch.setattr(
        type(files), "cat_file", MagicMock(side_effect=[failure, failure, DATA[:100]])
    )
    assert read(a, 0, 100, tags[a]) == DATA[:100]
    monkeypatch.setattr(type(files), "cat_file", MagicMock(side_effect=failure))
    monkeypatch.setattr(ranges, "PATIENCE_S", 0.1)
    with pytest.raises(
        Refused,
        match=r"memory:///kept/a\.tar: byte 0: OSError; [1-9]\d* attempts, the limit is 0 s",
    ) as error:
        read(a, 0, 100, tags[a])
    assert "s3cr3t" not in str(error.value)
    monkeypatch.undo()
    files.pipe("/kept/b.tar", DATA)
    ranges._get_stamp_of_minute.cache_clear()
    with pytest.raises(Refused, match=r"b\.tar: byte 500"):
        read(b, 500, 600, tags[b])
    files.rm("/kept/b.tar")
    with pytest.raises(Refused, match="byte 0: FileNotFoundError"):
        stat(b)
    assert stat(a) == (len(DATA), tags[a])


# ---- http


def test_http_ranges(server):
    name = f"{server.url}/a.tar"
    size, tag = stat(name)
    assert (size, tag) == (len(DATA), '"first"')
    for start, stop in ((0, 1), (17, 60_000), (99_999, 100_000), (5, 5)):
        assert read(name, start, stop, tag) == DATA[start:stop]
    assert len({port for _, _, port in server.requests}) == 1, "the connection is kept"
    with pytest.raises(Refused, match=r"empty\.tar: byte 0: 416 Requested Range Not Satisfiable"):
        stat(f"{server.url}/empty.tar")
    server.tags["/a.tar"], server.files["/a.tar"] = '"second"', DATA[::-1]
    with pytest.raises(
        Refused, match=r'a\.tar: byte 3: it has changed .*: it is "second" now, and was "first"'
    ):
        read(name, 3, 9, tag)
    del server.files["/a.tar"]
    with pytest.raises(Refused, match=r"a\.tar: byte 3: 404 Not Found"):
        read(name, 3, 9, tag)


PASSING = "status_503 status_429 reset short torn silent other whole encoded digits".split()
PASSING += ["redirect_/moved.tar", "redirect_/signed.tar"]


@pytest.mark.parametrize("fault", PASSING)
def test_passing_faults(server, fault):
    """The same bytes come after two such answers, of `stat` as well as of `read`."""
    server.files |= {"/moved.tar": DATA, "/signed.tar": DATA}
    server.faults["/signed.tar"] = ["status 403", "", "status 403"]
    name = f"{server.url}/a.tar"
    fault = fault.replace("_", " ")
    server.faults["/a.tar"] = [fault] * 2
    if fault != "short":  # of one byte
        assert stat(name) == (len(DATA), '"first"')
    num_requests = len(server.requests)
    server.faults["/a.tar"] = [fault] * 2
    assert read(name, 1000, 3000, '"first"') == DATA[1000:3000]
    assert len(server.requests) - num_requests >= 2
    assert not server.faults["/a.tar"] or "redirect" in fault


@pytest.mark.parametrize(
    "fault, message",
    [
        (
            "status 403",
            "403 Forbidden; is the signature in the URL too old, or are credentials missing in "
            "~/.netrc?",
        ),
        ("status 503", "503 Service Unavailable; "),
        (
            "whole",
            "asked for bytes 10-19, the server sends the whole file; it has to serve ranges; ",
        ),
        (
            "other",
            "asked for bytes 10-19, the server sends bytes 11-20/100000; it has to serve ranges; ",
        ),
        ("short", "the answer ended early; "),
        ("reset", "Connection reset by peer; "),
        ("silent", "TimeoutError; "),
        ("torn", "IncompleteRead; "),
        ("redirect file:///etc/passwd", "InvalidSchema: a wrong URL, or a redirect to one"),
        (
            "redirect http://[::bad/?X-Amz-Signature=s3cr3t",
            "ValueError: a wrong URL, or a redirect to one",
        ),
    ],
)
def test_faults_that_last(server, monkeypatch, fault, message):
    """One line names shard, offset and cause, and no secret."""
    monkeypatch.setattr(ranges, "PATIENCE_S", 0.2)
    server.faults["/a.tar"] = [fault] * 1000
    name = f"http://me:hunter2@127.0.0.1:{server.server_port}/a.tar?X-Amz-Signature=s3cr3t"
    with pytest.raises(Refused) as error:
        read(name, 10, 20, '"first"')
    server.faults["/a.tar"] = []
    text = str(error.value)
    assert text.startswith(f"{server.url}/a.tar: byte 10: {message}")
    assert "\n" not in text
    trace = "".join(traceback.format_exception(error.value))
    assert not any(secret in trace for secret in SECRETS)
    unpickled = pickle.loads(pickle.dumps(error.value))
    assert (type(unpickled), str(unpickled)) == (Refused, text)


def compute_digest(ranges: list) -> str:
    with ThreadPoolExecutor(8) as pool:
        return hashlib.sha256(b"".join(pool.map(lambda args: read(*args), ranges))).hexdigest()


def test_other_processes_have_their_own_connections(server):
    """Forked ones as well, whose parent keeps reading on the connections that they inherit."""
    name = f"{server.url}/a.tar"
    ranges = [(name, start, start + 5000, '"first"') for start in range(0, 94_000, 2350)]
    digest = compute_digest(ranges)
    ports = {port for _, _, port in server.requests}
    server.requests.clear()

    def child(results) -> None:
        results.put(compute_digest(ranges))

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=child, args=(results,)) for _ in range(2)]
    for process in children:
        process.start()
    digests = [results.get(timeout=30) for _ in children]
    for process in children:
        process.join()
    assert digests == [digest] * 2
    assert not ports & {port for _, _, port in server.requests}
    assert compute_digest(ranges) == digest
