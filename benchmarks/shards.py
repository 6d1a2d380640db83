"""Measures reading of images from shards: tars beside webdataset, Parquet beside `datasets`.

    pip install webdataset
    python benchmarks/shards.py [--quick] [--brief] [--output FILE]

The bytes of all images of an epoch are read in a random order, and nothing is decoded. On a disk one process reads; ours is the
full permutation, and the peers shuffle a window of samples. The shards have 1 to 700 samples of about 40 kB, in the system's
cache. The index of tars and the conversion of Parquet, which are made once, are not part of the rates.

Then a server on loopback answers after 0, 20 or 100 ms. Ours reads blocks of neighbours as training does, in one process with
one thread per connection; webdataset reads whole tars through `pipe:curl`, in a data worker per connection. All take turns; a
ratio is the median of the ratios of turns.
"""

import io
import itertools
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from table import Row, compare, script, take_turns
from torch.utils.data import DataLoader

from common.classification import sources
from common.data import Stream
from common.data.loader import prefetch_images
from common.shards import block_cache, share_blocks

COUNTS = (1, 17, 331, 500, 250, 700, 64, 137)  # samples of each shard on the disk
WINDOW = 512  # samples that the peers shuffle
LATENCIES = (0, 20, 100)  # ms until an answer begins
CASES = ((1, 1024), (4, 1024), (4, 128))  # connections; MiB of memory: for all images, or a fifth
BATCH = 256  # samples
TARS, PEER = 8, "webdataset"  # tars on the server


def write(folder: Path, counts: tuple[int, ...], size: float, parquet: bool = False) -> None:
    """Writes tars of random bytes, about exp(`size`) per image; and Parquet with the same samples."""
    generator, number = np.random.default_rng(0), 0
    for shard, count in enumerate(counts):
        rows = {"image": [], "label": []}
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for _ in range(count):
                data = generator.bytes(int(np.clip(generator.lognormal(size, 0.5), 4_000, 300_000)))
                for kind, content in (("jpg", data), ("cls", str(number % 10).encode())):
                    info = tarfile.TarInfo(f"{number:07}.{kind}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                rows["image"].append(data)
                rows["label"].append(number % 10)
                number += 1
        if parquet:
            pq.write_table(pa.table(rows), folder / f"{shard}.parquet", row_group_size=100)


class Server(BaseHTTPRequestHandler):
    """Serves files of a folder, whole or in part, after some time: /<milliseconds>/<file>."""

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
            self.send_header("ETag", '"same"')
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


# ---- one epoch, as a number of images


def ours(source: sources.Source, connections: int, memory: int, epoch: int) -> int:
    """In the order of training; over http with so many connections and a new cache of so many MiB."""
    stream, found = Stream(len(source), BATCH, 0), 0
    if connections:
        block_cache.IN_FLIGHT = connections
        (source,) = share_blocks([source], memory)
        stream = Stream(len(source), BATCH, 0, blocks=source.blocks)
    for start in range(0, len(source), BATCH):
        positions = epoch * len(source) + np.arange(start, min(start + BATCH, len(source)))
        if connections:
            prefetch_images(source, stream, positions)
        found += sum(len(source.content(index)) > 0 for index in stream.indices(positions).tolist())
    return found


def of_webdataset(names: list[str], workers: int, epoch: int) -> int:
    import webdataset  # not on the server

    splitter = webdataset.split_by_worker
    samples = webdataset.WebDataset(names, shardshuffle=len(names), seed=epoch, workersplitter=splitter).shuffle(WINDOW)
    sizes = samples.map(lambda sample: len(sample["jpg"]))
    batches = DataLoader(sizes, batch_size=64, num_workers=workers) if workers else map(np.array, sizes)
    return sum(int((batch > 0).sum()) for batch in batches)


def of_datasets(names: list[str], epoch: int) -> int:
    import datasets  # once HF_HOME is set

    datasets.disable_progress_bars()
    samples = datasets.load_dataset("parquet", data_files=names, split="train", streaming=True)
    return sum(len(sample["image"]) > 0 for sample in samples.shuffle(seed=epoch, buffer_size=WINDOW))


def rate(read: Callable[[int], int], epochs: Iterator[int], count: int) -> float:
    """Images per second of the next epoch."""
    began = time.perf_counter()
    if (found := read(next(epochs))) != count:
        raise RuntimeError(f"{found} of {count} images came")
    return count / (time.perf_counter() - began)


def rates(ways: dict[str, Callable[[int], int]], count: int, turns: int) -> dict[str, list[float]]:
    each = {name: partial(rate, read, itertools.count(), count) for name, read in ways.items()}
    return take_turns(each, turns)


# ---- rows


def rows_of_disk(folder: Path, turns: int) -> list[Row]:
    write(folder, COUNTS, 10.5, parquet=True)
    rows = []
    for kind, named, unlike, peer, goal in (
        ("tar", "tars", partial(of_webdataset, workers=0), PEER, 3.0),
        ("parquet", "Parquet", of_datasets, "datasets, streaming", 2.0),
    ):
        source, _ = sources.load(sources.Spec(f"{folder}/*.{kind}", 0, 0.2, alone=True))
        names = sorted(str(file) for file in folder.glob(f"*.{kind}"))
        ways = {
            "ours": partial(ours, source, 0, 0),
            peer: lambda epoch, read=unlike, names=names: read(names, epoch=epoch),
        }
        taken = rates(ways, sum(COUNTS), turns + 1)
        taken = {way: speeds[1:] for way, speeds in taken.items()}  # the first epoch fills caches
        rows.append(compare(f"images read from {named}", "images/s", taken, peer, goal=goal))
    return rows


def rows_of_http(folder: Path, samples: int, turns: int) -> list[Row]:
    write(folder, (samples,) * TARS, 10.65)
    rows = []
    paths = os.pathsep.join([str(Path(__file__).resolve().parent), *sys.path])
    environ = os.environ | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", "import shards; shards.serve()"]
    with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())  # type: ignore[union-attr]
            for connections, memory in CASES:
                for latency in LATENCIES:
                    url = f"http://127.0.0.1:{port}/{latency}"
                    source, _ = sources.load(sources.Spec(f"{url}/{{0..{TARS - 1}}}.tar", 0, 0.2, alone=True))
                    names = [f"pipe:curl -s {url}/{number}.tar" for number in range(TARS)]
                    theirs = partial(of_webdataset, names, connections if connections > 1 else 0)
                    ways = {"ours": partial(ours, source, connections, memory), PEER: theirs}
                    what = f"tars over http, {latency} ms, {connections} connection{'s' * (connections > 1)}"
                    what += ", window of a fifth" * (memory < 1024)
                    rows.append(compare(what, "samples/s", rates(ways, TARS * samples, turns), PEER, goal=1.0))
        finally:
            server.kill()
    return rows


def measure(quick: bool, brief: bool) -> tuple[list[Row], None]:
    sources.refuse_broken = lambda *_: None  # they are no images
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory() as served:
        os.environ |= {"HF_HOME": disk, "VISION_RECIPES_CACHE": f"{disk}/index", "HF_HUB_OFFLINE": "1"}
        rows = rows_of_disk(Path(disk), 1 if quick else 3 if brief else 7)
        samples, turns = (10, 1) if quick else (500, 3 if brief else 5)
        return rows + rows_of_http(Path(served), samples, turns), None


if __name__ == "__main__":
    script(__doc__, measure)
