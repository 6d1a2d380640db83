"""Measures reading of training images from shards on a disk: tars beside webdataset, Parquet beside `datasets` in streaming.

    python benchmarks/shards.py [--quick] [--brief] [--output FILE]

One process reads the bytes of all images of an epoch in a random order; nothing is decoded. Ours is the full permutation; the
peers shuffle a window of 512 samples. The shards have 1 to 700 samples of about 40 kB, in the system's cache. What is done
once, the index of tars and the conversion of Parquet, is not part of the rates. The rows take turns; ratios are of medians.
"""

import io
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from table import Row, script

COUNTS = (1, 17, 331, 500, 250, 700, 64, 137)  # samples of each shard
WINDOW = 512
TARS, PEER, PARQUET, STREAMING = "tars", "webdataset", "Parquet", "datasets, streaming"


def write(folder: Path) -> None:
    """The shards: random bytes of the sizes of small photographs, which nobody decodes."""
    generator, number = np.random.default_rng(0), 0
    for shard, count in enumerate(COUNTS):
        rows = {"image": [], "label": []}
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for _ in range(count):
                data = generator.bytes(int(np.clip(generator.lognormal(10.5, 0.5), 4_000, 300_000)))
                for kind, content in (("jpg", data), ("cls", str(number % 10).encode())):
                    info = tarfile.TarInfo(f"{number:07}.{kind}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                rows["image"].append(data)
                rows["label"].append(number % 10)
                number += 1
        pq.write_table(pa.table(rows), folder / f"{shard:03}.parquet", row_group_size=100)


def readers(folder: Path) -> tuple[dict[str, Callable[[int], int]], float]:
    """For each row a function that reads an epoch and returns its number of images; and seconds to make the index of tars."""
    import datasets
    import webdataset

    from common.classification import sources
    from common.data import Stream

    sources.refuse_broken = lambda *_: None  # they are no images
    datasets.disable_progress_bars()
    began = time.perf_counter()
    tars, _ = sources.load(sources.Spec(f"{folder}/*.tar", 0, 0.2, alone=True))
    indexed = time.perf_counter() - began
    rows, _ = sources.load(sources.Spec(f"{folder}/*.parquet", 0, 0.2, alone=True))
    names = {kind: sorted(str(file) for file in folder.glob(f"*.{kind}")) for kind in ("tar", "parquet")}

    def ours(source: sources.Source, epoch: int) -> int:
        stream = Stream(len(source), 256, 0)
        found = 0
        for start in range(0, len(source), 256):
            places = epoch * len(source) + np.arange(start, min(start + 256, len(source)))
            found += sum(len(source.content(index)) > 0 for index in stream.indices(places).tolist())
        return found

    def theirs_of_tars(epoch: int) -> int:
        samples = webdataset.WebDataset(names["tar"], shardshuffle=len(COUNTS), seed=epoch).shuffle(WINDOW)
        return sum(len(sample["jpg"]) > 0 for sample in samples)

    def theirs_of_rows(epoch: int) -> int:
        samples = datasets.load_dataset("parquet", data_files=names["parquet"], split="train", streaming=True)
        return sum(len(sample["image"]) > 0 for sample in samples.shuffle(seed=epoch, buffer_size=WINDOW))

    found = {TARS: lambda epoch: ours(tars, epoch), PEER: theirs_of_tars}
    return found | {PARQUET: lambda epoch: ours(rows, epoch), STREAMING: theirs_of_rows}, indexed


def measure(quick: bool, brief: bool) -> dict:
    """Images per second of each row, with all repetitions."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HOME": folder, "VISION_RECIPES_CACHE": f"{folder}/index", "HF_HUB_OFFLINE": "1"}
        write(Path(folder))
        read, indexed = readers(Path(folder))
        rates = {name: [] for name in read}
        for epoch in range(2 if quick else 4 if brief else 8):
            for name in list(read)[:: -1 if epoch % 2 else 1]:
                began = time.perf_counter()
                if (count := read[name](epoch)) != sum(COUNTS):
                    raise RuntimeError(f"{name} gave {count} of {sum(COUNTS)} images")
                if epoch:  # the first epoch fills caches
                    rates[name].append(count / (time.perf_counter() - began))
    return {"samples": sum(COUNTS), "index_s": indexed, "rates": rates}


def table(result: dict) -> list[Row]:
    """Rows for the common table."""
    rates = {name: statistics.median(taken) for name, taken in result["rates"].items()}
    pairs = ((TARS, PEER, 3.0), (PARQUET, STREAMING, 2.0))
    what = "images read from {}"
    return [
        Row(what.format(name), "images/s", rates[name], peer, rates[peer], rates[name] / rates[peer], goal=goal)
        for name, peer, goal in pairs
    ]


if __name__ == "__main__":
    script(__doc__, measure, table)
