"""Measures how fast samples come from tars on a web server, compared with webdataset over as many connections.

    pip install webdataset
    python benchmarks/shards_http.py [--quick] [--brief] [--output FILE]

A server on loopback answers after 0, 20 or 100 ms. Ours reads blocks of neighbours as training does, in one process with one
thread per connection; webdataset reads whole tars through `pipe:curl`, in a data worker per connection. Images are not
decoded. Both take turns in one run; a ratio is the median of the ratios of turns.
"""

import importlib
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from table import Row, script

from common.classification import sources
from common.data import Stream, block_cache, shards

LATENCIES = (0, 20, 100)  # ms until an answer begins
CASES = ((1, 1024), (4, 1024), (4, 128))  # connections, and MiB as --shard_memory: all images in the window, or a fifth
BATCH = 256  # samples
TAG = '"same"'  # of every file
WINDOW = 500  # samples that webdataset shuffles


class Server(BaseHTTPRequestHandler):
    """Serves files of a folder, whole or in part, each answer after some time: /<milliseconds>/<file>."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        latency, name = self.path.strip("/").split("/")
        time.sleep(int(latency) / 1000)
        with open(name, "rb") as file:
            size, asked = os.fstat(file.fileno()).st_size, self.headers.get("Range")
            first, last = map(int, asked.removeprefix("bytes=").split("-")) if asked else (0, size - 1)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("ETag", TAG)
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            self.wfile.flush()
            while first <= last:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, last - first + 1)


def serve() -> None:
    """Prints a port and serves the current folder on it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


def make_tars(folder: Path, count: int, samples: int) -> int:
    """Tars of about 48 kB per sample; returns the bytes of all images."""
    random, total = np.random.default_rng(0), 0
    for number in range(count):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for sample in range(samples):
                image = random.bytes(int(np.clip(random.lognormal(10.65, 0.5), 4000, 300_000)))
                total += len(image)
                for suffix, data in (("jpg", image), ("cls", b"7")):
                    member = tarfile.TarInfo(f"{number:03}{sample:05}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return total


def ours(source: sources.Source, connections: int, memory: int, epoch: int) -> int:
    """Reads all images once, in the order of an epoch of training; returns their bytes."""
    block_cache.IN_FLIGHT = connections
    cached, _ = shards.shared([source, source], memory)  # an empty cache
    stream, total = Stream(len(source), BATCH, 0, blocks=cached.blocks), 0
    for start in range(0, len(source), BATCH):
        positions = epoch * len(source) + np.arange(start, min(start + BATCH, len(source)))
        shards.expect(cached, stream, positions)
        total += sum(len(cached.content(index)) for index in stream.indices(positions).tolist())
    return total


def webdataset(url: str, count: int, connections: int) -> int:
    """The same with webdataset."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore")
    names = [f"pipe:curl -s {url}/{number}.tar" for number in range(count)]
    samples = wds.WebDataset(names, shardshuffle=len(names), seed=0, workersplitter=wds.split_by_worker)
    sizes = samples.shuffle(WINDOW).map(lambda sample: len(sample["jpg"]))
    workers = connections if connections > 1 else 0
    return sum(int(batch.sum()) for batch in DataLoader(sizes, batch_size=64, num_workers=workers))


def seconds(read: Callable[[], int], total: int) -> float:
    began = time.perf_counter()
    if (found := read()) != total:
        raise RuntimeError(f"{found} bytes of images came instead of {total}")
    return time.perf_counter() - began


def measure(quick: bool, brief: bool) -> list[Row]:
    importlib.import_module("webdataset")  # before any clock runs
    sources.refuse_broken = lambda *_: None  # they are no images

    rows, tars, samples = [], 8, 10 if quick else 500
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VISION_RECIPES_CACHE"] = f"{folder}/index"
        total = make_tars(Path(folder), tars, samples)
        paths = os.pathsep.join([str(Path(__file__).resolve().parent), *sys.path])
        command = [sys.executable, "-c", "import shards_http; shards_http.serve()"]
        environ = os.environ | {"PYTHONPATH": paths}
        server = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
        try:
            port = int(server.stdout.readline())  # type: ignore[union-attr]
            for connections, memory in CASES:
                for latency in LATENCIES:
                    url = f"http://127.0.0.1:{port}/{latency}"
                    source, _ = sources.load(sources.Spec(f"{url}/{{0..{tars - 1}}}.tar", 0, 0.2, alone=True))
                    rates = []
                    for turn in range(1 if quick else 3 if brief else 5):
                        mine = partial(ours, source, connections, memory, turn)
                        theirs = partial(webdataset, url, tars, connections)
                        rates.append([tars * samples / seconds(read, total) for read in (mine, theirs)])
                    medians = [statistics.median(column) for column in zip(*rates, strict=True)]
                    ratio = statistics.median(mine / theirs for mine, theirs in rates)
                    what = f"tars over http, {latency} ms, {connections} connection{'s' * (connections > 1)}"
                    what += ", window of a fifth" * (memory < 1024)
                    rows.append(Row(what, "samples/s", medians[0], "webdataset", medians[1], ratio, goal=1.0))
        finally:
            server.kill()
            server.wait()
    return rows


def table(rows: list[Row] | list[dict]) -> list[Row]:
    return [Row(**(row if isinstance(row, dict) else asdict(row))) for row in rows]


if __name__ == "__main__":
    script(__doc__, measure, table)
