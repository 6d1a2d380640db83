"""Images in shards, such as WebDataset's tars: a source whose images are read from where they lie."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Self

import numpy as np

from common.config.secrets import redact_name
from common.data.source import Columns
from common.data.stream import Blocks
from common.errors import Refused, make_printable
from common.randomness import mix
from common.shards import parquet, ranges, tars
from common.shards.block_cache import BlockCache, open_blocks
from common.shards.index import Index, compute_fingerprint
from common.shards.names import is_parquet

_MAX_GAP = 2**20  # bytes between two images up to which they are read as one range
_MIN_SLOTS = 8  # blocks in a cache
_MAX_LABELS = 1_000_000  # samples whose classes show whether shards are sorted by them


@dataclass(frozen=True, eq=False)
class Shards(Columns):
    """Images in tars, or in Parquet at URLs. Of local tars each image is read alone, of others
    blocks of neighbours.
    """

    entries: np.ndarray  # index.ENTRY[N]
    index: Index
    # int64[N], of these samples in the index; None if they are all of it.
    numbers: np.ndarray | None = None
    # The index's, of these samples; in local tars None: no order is cheaper than another.
    blocks: Blocks | None = None
    cache: BlockCache | None = None

    @cached_property
    def fingerprint(self) -> str:
        if self._is_whole:
            return self.index.fingerprint
        return compute_fingerprint(self.classes, self.labels, self.entries)

    @property
    def class_counts(self) -> np.ndarray:
        return np.array(self.index.counts) if self._is_whole else super().class_counts

    @property
    def headers(self) -> np.ndarray:
        """int64[N, 4]: what `KeptColumns.read_header` gave for each image."""
        headers = self.index.headers
        return headers if self.numbers is None else headers[self.numbers]

    @property
    def _is_whole(self) -> bool:
        return self.numbers is None and self.classes == self.index.classes

    def select(self, rows: np.ndarray) -> Self:
        numbers = rows if self.numbers is None else self.numbers[rows]
        blocks = self.blocks.select(rows) if self.blocks else None
        return replace(super().select(rows), numbers=numbers, blocks=blocks)

    def get_name(self, index: int, is_read: bool = True) -> str:
        start, _, _, head, number = self.entries[index].item()
        shard = redact_name(self.index.shards.names[number])
        if not head:
            row_group, row = parquet.split_start(start)
            return f"{shard}: row {row} of row group {row_group}"
        member = f"byte {start}"
        if is_read:
            with suppress(Refused, ValueError):  # it is named because something is wrong
                member = tars.read_name(self._read_sample(index)[:head])
        return make_printable(f"{shard}/{member}")

    def get_listed_name(self, index: int) -> str:
        return self.get_name(index, is_read=False)

    def get_content(self, index: int) -> bytes:
        start, _, size, head, number = self.entries[index].item()
        if self.blocks:
            return self._read_sample(index)[head:]
        shards = self.index.shards
        _, tag = shards.stamps[number]
        return ranges.read(shards.names[number], start, start + size, tag)

    def prefetch(self, indices: np.ndarray) -> None:
        if self.cache and self.blocks:
            blocks = np.unique(self.blocks.find(indices))
            shards = self.index.entries["shard"][self.index.edges[blocks]]
            shard_by_block = dict(zip(blocks.tolist(), shards.tolist(), strict=True))
            self.cache.prefetch(shard_by_block, self._fetch)

    def hash_images(self, key: int) -> np.ndarray:
        return mix(self.entries["key"], key)

    def _read_sample(self, index: int) -> bytes:
        """A sample's headers and image, from its block if there is a cache of blocks."""
        if not self.cache or not self.blocks:
            return bytes(next(self._read(self.entries[index : index + 1])))
        number = index if self.numbers is None else int(self.numbers[index])
        block = int(self.blocks.find(np.array([index]))[0])
        return self.cache.sample(block, number - int(self.index.edges[block]), self._fetch)

    def _fetch(self, blocks: list[int]) -> list[list]:
        """All samples of each block, also those that were not selected."""
        edges = self.index.edges
        entries = [self.index.entries[edges[block] : edges[block + 1]] for block in blocks]
        samples = self._read(np.concatenate(entries))
        return [list(islice(samples, len(block_entries))) for block_entries in entries]

    def _read(self, entries: np.ndarray) -> Iterator[bytes | memoryview]:
        """The headers and images of samples of one shard. Ranges that lie close are read as one."""
        shards = self.index.shards
        shard = entries["shard"][0]
        name = shards.names[shard]
        if is_parquet(name):
            yield from parquet.read_images(
                name, shards.stamps[shard], shards.image, entries["start"]
            )
            return
        _, tag = shards.stamps[shard]
        starts = entries["start"] - entries["head"]
        stops = entries["start"] + entries["size"]
        cuts = np.flatnonzero(starts[1:] - stops[:-1] > _MAX_GAP) + 1
        for neighbours in np.split(np.arange(len(entries)), cuts):
            start = int(starts[neighbours[0]])
            data = memoryview(ranges.read(name, start, int(stops[neighbours[-1]]), tag))
            for i in neighbours.tolist():
                yield data[starts[i] - start : stops[i] - start]


def share_blocks(sources: Sequence[Shards], memory: int) -> tuple[Shards, ...]:
    """The sources; those with blocks get a cache on each machine, the first of `memory` MiB, others
    of an eighth.

    A third of it is for blocks that are shuffled together, the rest for blocks that data workers
    read ahead. A collective. Raises `Refused`.
    """
    shared: list[Shards] = []
    for source in sources:
        if not source.blocks:
            shared.append(source)
            continue
        largest = source.index.block_bytes
        slots = int(memory * 2**20 / largest)
        if slots < _MIN_SLOTS:
            needed = -(-_MIN_SLOTS * largest // 2**20)
            raise Refused(
                f"--shard_memory {memory}: holds {slots} blocks of neighbours; give {needed} or "
                "more"
            )
        if shared:
            slots = max(_MIN_SLOTS, slots // 8)
        num_blocks = len(source.blocks.edges) - 1
        blocks = replace(source.blocks, pool=slots // 3)
        notes = source.notes
        if blocks.pool < num_blocks:
            notes += _describe_order(source.labels[:_MAX_LABELS])
        cache = open_blocks(min(slots, num_blocks), largest)
        shared.append(replace(source, blocks=blocks, notes=notes, cache=cache))
    return tuple(shared)


def _describe_order(labels: np.ndarray) -> tuple[str, ...]:
    """A note if shards are sorted by class: batches then have few of the classes. `labels` are of
    the first samples.
    """
    if labels.ndim > 1 or len(labels) < 2:
        return ()
    same_class = (labels[1:] == labels[:-1]).mean()
    by_chance = np.square(np.bincount(labels) / len(labels)).sum()
    if same_class < (1 + by_chance) / 2:
        return ()
    problem = (
        f"{same_class:.0%} of neighbours in the shards have the same class, so batches have few "
        "classes"
    )
    return (f"{problem}: shuffle the shards",)
