"""Measures reading of images from shards: tars beside webdataset, Parquet beside `datasets`.

    pip install webdataset
    python benchmarks/shards.py [--quick] [--turns N]

The bytes of all images of an epoch are read in a random order, and nothing is decoded. On a disk
one process reads; ours is the full permutation, and the peers shuffle a window of samples. The
shards have 1 to 700 samples of about 40 kB, in the system's cache. The index of tars and the
conversion of Parquet, which are made once, are not part of the rates.

Then a server on loopback answers after 0, 20 or 100 ms. Ours reads blocks of neighbours as training
does, in one process with one thread per connection; webdataset reads whole tars through
`pipe:curl`, in a data worker per connection. All take turns; a ratio is the median of the ratios of
turns.
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
from table import Row, compare, run_script, take_turns
from torch.utils.data import DataLoader

from common.classification import sources
from common.data import Stream
from common.data.loader import prefetch_images
from common.shards import block_cache, share_blocks

SHARD_SIZES = (1, 17, 331, 500, 250, 700, 64, 137)  # samples of each shard on the disk
WINDOW = 512  # samples that the peers shuffle
LATENCIES = (0, 20, 100)  # ms until an answer begins
# Connections; MiB of memory, for all images or a fifth of them.
CASES = ((1, 1024), (4, 1024), (4, 128))
BATCH_SIZE = 256
NUM_TARS = 8  # on the server
SERVE = "--serve"


def write_shards(
    folder: Path, shard_sizes: tuple[int, ...], log_bytes: float, with_parquet: bool = False
) -> None:
    """Writes tars of random bytes, about exp(`log_bytes`) per image; and Parquet with the same samples."""
    random = np.random.default_rng(0)
    numbers = itertools.count()
    for shard, num_samples in enumerate(shard_sizes):
        columns = {"image": [], "label": []}
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in itertools.islice(numbers, num_samples):
                num_bytes = int(np.clip(random.lognormal(log_bytes, 0.5), 4_000, 300_000))
                image = random.bytes(num_bytes)
                label = number % 10
                add_file(tar, f"{number:07}.jpg", image)
                add_file(tar, f"{number:07}.cls", str(label).encode())
                columns["image"].append(image)
                columns["label"].append(label)
        if with_parquet:
            pq.write_table(pa.table(columns), folder / f"{shard}.parquet", row_group_size=100)


def add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


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
            size = os.fstat(file.fileno()).st_size
            first = 0
            last = size - 1
            requested = self.headers.get("Range")
            if requested:
                first, last = map(int, requested.removeprefix("bytes=").split("-"))
            self.send_response(206 if requested else 200)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("ETag", '"same"')
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.end_headers()
            while first <= last:
                first += os.sendfile(
                    self.connection.fileno(), file.fileno(), first, last - first + 1
                )


def serve() -> None:
    """Prints a port and serves the current folder on it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    print(server.server_port, flush=True)
    server.serve_forever()


# ---- one epoch, as a number of images


def read_ours(source: sources.Source, epoch: int, connections: int = 0, memory: int = 0) -> int:
    """In the order of training; over http with so many connections and a new cache of so many MiB."""
    stream = Stream(len(source), BATCH_SIZE, 0)
    if connections:
        block_cache.IN_FLIGHT = connections
        (source,) = share_blocks([source], memory)
        stream = Stream(len(source), BATCH_SIZE, 0, blocks=source.blocks)
    num_read = 0
    for start in range(0, len(source), BATCH_SIZE):
        positions = epoch * len(source) + np.arange(start, min(start + BATCH_SIZE, len(source)))
        if connections:
            prefetch_images(source, stream, positions)
        num_read += sum(
            len(source.get_content(index)) > 0 for index in stream.get_indices(positions).tolist()
        )
    return num_read


def read_webdataset(names: list[str], epoch: int, workers: int = 0) -> int:
    import webdataset  # not on the server

    splitter = webdataset.split_by_worker
    samples = webdataset.WebDataset(
        names, shardshuffle=len(names), seed=epoch, workersplitter=splitter
    ).shuffle(WINDOW)
    sizes = samples.map(lambda sample: len(sample["jpg"]))
    if workers:
        return sum(
            int((batch > 0).sum())
            for batch in DataLoader(sizes, batch_size=64, num_workers=workers)
        )
    return sum(size > 0 for size in sizes)


def read_datasets(names: list[str], epoch: int) -> int:
    import datasets  # once HF_HOME is set

    datasets.disable_progress_bars()
    samples = datasets.load_dataset("parquet", data_files=names, split="train", streaming=True)
    return sum(
        len(sample["image"]) > 0 for sample in samples.shuffle(seed=epoch, buffer_size=WINDOW)
    )


def measure_epoch(read: Callable[..., int], epochs: Iterator[int], num_images: int) -> float:
    """Images per second of the next epoch."""
    start = time.perf_counter()
    num_read = read(epoch=next(epochs))
    if num_read != num_images:
        raise RuntimeError(f"{num_read} of {num_images} images came")
    return num_images / (time.perf_counter() - start)


def measure_ways(
    ways: dict[str, Callable[..., int]], num_images: int, turns: int
) -> dict[str, list[float]]:
    """Images per second in each turn, after an epoch that fills caches."""
    epochs = {
        name: partial(measure_epoch, read, itertools.count(), num_images)
        for name, read in ways.items()
    }
    take_turns(epochs, 1)
    return take_turns(epochs, turns)


# ---- rows


def open_source(data: str) -> sources.Source:
    source, _ = sources.load(sources.Spec(data, 0, 0.2, is_eval_only=True))
    return source


def measure_disk(folder: Path, turns: int) -> list[Row]:
    write_shards(folder, SHARD_SIZES, 10.5, with_parquet=True)
    rows = []
    for title, suffix, read, peer, goal in (
        ("tars", "tar", read_webdataset, "webdataset", 3.0),
        ("Parquet", "parquet", read_datasets, "datasets, streaming", 2.0),
    ):
        names = sorted(str(file) for file in folder.glob(f"*.{suffix}"))
        ways = {
            "ours": partial(read_ours, open_source(f"{folder}/*.{suffix}")),
            peer: partial(read, names),
        }
        speeds = measure_ways(ways, sum(SHARD_SIZES), turns)
        rows.append(compare(f"images read from {title}", "images/s", speeds, peer, goal=goal))
    return rows


def measure_http(folder: Path, shard_size: int, turns: int) -> list[Row]:
    write_shards(folder, (shard_size,) * NUM_TARS, 10.65)
    rows = []
    command = [sys.executable, os.path.abspath(__file__), SERVE]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            for (connections, memory), latency in itertools.product(CASES, LATENCIES):
                url = f"http://127.0.0.1:{port}/{latency}"
                source = open_source(f"{url}/{{0..{NUM_TARS - 1}}}.tar")
                names = [f"pipe:curl -s {url}/{index}.tar" for index in range(NUM_TARS)]
                workers = connections if connections > 1 else 0
                ways = {
                    "ours": partial(read_ours, source, connections=connections, memory=memory),
                    "webdataset": partial(read_webdataset, names, workers=workers),
                }
                name = (
                    f"tars over http, {latency} ms, connections: {connections}, memory: {memory} "
                    "MiB"
                )
                speeds = measure_ways(ways, NUM_TARS * shard_size, turns)
                rows.append(compare(name, "samples/s", speeds, "webdataset", goal=1.0))
        finally:
            server.kill()
    return rows


def measure(turns: int, quick: bool) -> list[Row]:
    sources.refuse_broken = lambda *_: None  # they are no images
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory() as served:
        os.environ |= {
            "HF_HOME": disk,
            "VISION_RECIPES_CACHE": f"{disk}/index",
            "HF_HUB_OFFLINE": "1",
        }
        return measure_disk(Path(disk), turns) + measure_http(
            Path(served), 10 if quick else 500, turns
        )


if __name__ == "__main__":
    if sys.argv[1:] == [SERVE]:
        serve()
    else:
        run_script(__doc__, measure)
