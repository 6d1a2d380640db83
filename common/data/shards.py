"""Images in shards, such as WebDataset's tars: as a source whose images are read from where they lie."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch.utils.data import get_worker_info

from common.config.secrets import check_secrets
from common.data import parquet_shards, ranges, shard_index, tar_samples
from common.data.block_cache import BlockCache, open_blocks
from common.data.data_spec import Parts, names_of
from common.data.huggingface import hub_shards
from common.data.image_files import has_image_suffix
from common.data.shard_index import Index, Rows, ShardList
from common.data.shard_names import expand, is_remote, printable_name
from common.data.source import Columns
from common.data.splits import by_part
from common.data.stream import Blocks, Stream
from common.distributed.collectives import all_or_none, broadcast_object, is_main
from common.errors import Refused, printable
from common.files import walk
from common.randomness import mix

_GAP = 2**20  # bytes between two images up to which they are read as one range
_FEWEST = 8  # blocks in a cache
_SEEN = 1_000_000  # samples whose classes show whether shards are sorted by them
_SHARDS = re.compile(r"\.tar($|[,?])|^\w+://")


@dataclass(frozen=True, eq=False)
class Shards(Columns):
    """Images in tars, or in Parquet at URLs. Of local tars each image is read alone, of others blocks of neighbours."""

    entries: np.ndarray  # shard_index.ENTRY[N]
    index: Index
    numbers: np.ndarray | None = None  # int64[N], of these samples in the index; None if they are all of it
    blocks: Blocks | None = None  # the index's, of these samples; in local tars None: no order is cheaper than another
    cache: BlockCache | None = None

    @cached_property
    def fingerprint(self) -> str:
        if self._is_whole:
            return self.index.fingerprint
        return shard_index.fingerprint(self.classes, self.labels, self.entries)

    @property
    def class_counts(self) -> np.ndarray:
        return np.array(self.index.counts) if self._is_whole else super().class_counts

    @property
    def _is_whole(self) -> bool:
        return self.numbers is None and self.classes == self.index.classes

    def select(self, rows: np.ndarray) -> Self:
        numbers = rows if self.numbers is None else self.numbers[rows]
        return replace(super().select(rows), numbers=numbers, blocks=self.blocks and self.blocks.select(rows))

    def name(self, index: int) -> str:
        start, _, _, head, number = self.entries[index].item()
        shard = printable_name(self.index.shards.names[number])
        if not head:
            return f"{shard}: row {start & 0xFFFFFFFF} of row group {start >> 32}"
        member = f"byte {start}"
        with suppress(Refused, ValueError):  # it is named because something is wrong
            member = tar_samples.name_in(self._sample(index)[:head])
        return printable(f"{shard}/{member}")

    def content(self, index: int) -> bytes:
        start, _, size, head, shard = self.entries[index].item()
        if not self.blocks:
            shards = self.index.shards
            return ranges.read(shards.names[shard], start, start + size, shards.stamps[shard][1])
        return self._sample(index)[head:]

    def expect(self, indices: np.ndarray) -> None:
        if self.cache and self.blocks:
            blocks = np.unique(self.blocks.of(indices))
            shards = self.index.entries["shard"][self.index.edges[blocks]]
            self.cache.expect(dict(zip(blocks.tolist(), shards.tolist(), strict=True)), self._fetch)

    def random_numbers(self, key: int) -> np.ndarray:
        return mix(self.entries["key"], key)

    def _sample(self, index: int) -> bytes:
        """A sample's headers and image, from its block if there is a cache of blocks."""
        if not self.cache or not self.blocks:
            return bytes(next(self._read(self.entries[index : index + 1])))
        number = index if self.numbers is None else int(self.numbers[index])
        block = int(self.blocks.of(np.array([index]))[0])
        return self.cache.sample(block, number - int(self.index.edges[block]), self._fetch)

    def _fetch(self, blocks: list[int]) -> list[list]:
        """All samples of each block, also those that were not selected."""
        edges = self.index.edges
        groups = [self.index.entries[edges[block] : edges[block + 1]] for block in blocks]
        found = self._read(np.concatenate(groups))
        return [[*islice(found, len(group))] for group in groups]

    def _read(self, entries: np.ndarray) -> Iterator[bytes | memoryview]:
        """The headers and images of samples of one shard. Ranges that lie close are read as one."""
        shards, shard = self.index.shards, entries["shard"][0]
        name, stamp = shards.names[shard], shards.stamps[shard]
        if parquet_shards.is_parquet(name):
            return parquet_shards.images(name, stamp, shards.image, entries["start"])
        first = entries["start"] - entries["head"]
        last = entries["start"] + entries["size"]

        def read(piece: np.ndarray) -> Iterator[memoryview]:
            start = int(first[piece[0]])
            data = memoryview(ranges.read(name, start, int(last[piece[-1]]), stamp[1]))
            return (data[first[i] - start : last[i] - start] for i in piece.tolist())

        cuts = np.flatnonzero(first[1:] - last[:-1] > _GAP) + 1
        return chain.from_iterable(map(read, np.split(np.arange(len(entries)), cuts)))


def shared(sources: Sequence[Any], memory: int) -> tuple[Any, ...]:
    """The sources; those with blocks get a cache on each machine, the first one of `memory` MiB. A collective.

    A third of it is for blocks that are shuffled together, the rest for blocks that data workers read ahead. Raises `Refused`.
    """
    if not isinstance(sources[0], Shards) or not sources[0].blocks:
        return tuple(sources)
    found: list[Shards] = []
    for source in dict.fromkeys(sources):
        largest = source.index.block_bytes
        slots = int(memory * 2**20 / largest)
        if slots < _FEWEST:
            needed = -(-_FEWEST * largest // 2**20)
            raise Refused(f"--shard_memory {memory}: holds {slots} blocks of neighbours; give {needed} or more")
        slots = max(_FEWEST, slots // (8 if found else 1))
        blocks, count = replace(source.blocks, pool=slots // 3), len(source.blocks.edges) - 1
        notes = source.notes if blocks.pool >= count else (*source.notes, *_order_notes(source.labels[:_SEEN]))
        found.append(replace(source, blocks=blocks, notes=notes, cache=open_blocks(min(slots, count), largest)))
    return (found[0], found[-1])


def _order_notes(labels: np.ndarray) -> tuple[str, ...]:
    """A note if shards are sorted by class: batches then have few of the classes. `labels` are of the first samples."""
    if labels.ndim > 1 or len(labels) < 2:
        return ()
    alike = (labels[1:] == labels[:-1]).mean()
    by_chance = np.square(np.bincount(labels) / len(labels)).sum()
    if alike < (1 + by_chance) / 2:
        return ()
    return (
        f"{alike:.0%} of neighbours in the shards have the same class, so batches have few classes: shuffle the shards",
    )


def expect(source: Any, stream: Stream, positions: np.ndarray) -> None:
    """Begin to read the images at `positions`, and those at the next positions of this process, if they lie in blocks."""
    if stream.blocks:
        worker = get_worker_info()
        steps = worker.num_workers if worker else 1  # until this process makes its next batch, or the one after it
        for places in (positions, positions + steps * stream.global_batch_size):
            source.expect(stream.indices(places))


# ---- which shards


def shard_parts(spec: Any) -> Parts[Shards] | None:
    """The parts of the shards that `spec.data` names; None if it names none. A collective. Raises `Refused`."""
    labels, sources = shard_sources(spec, spec.label_column)
    if not sources:
        return None
    first = next(iter(sources.values()))
    sources = {name: _with_classes(source, first, labels[name]) for name, source in sources.items()}
    if len(first.classes) < (least := 1 if first.multi_label else spec.min_classes):
        shown = printable_name(spec.data)
        raise Refused(f"--data {shown}: only the class {first.classes[0]} in its labels; needs {least} or more")
    return Parts(labels, lambda names: [sources[name] for name in names])


def shard_sources(spec: Any, label: str, rows: Rows | None = None) -> tuple[dict[str, str], dict[str, Shards]]:
    """The label of each part of the shards, and the parts that are used, each with its own classes. A collective."""
    with all_or_none("looking for shards"):
        groups = hub_shards(spec.data) if spec.streaming else by_part(find(spec.data))
    labels = {name: f"the {name} shards" if len(groups) > 1 else "all shards" for name in groups}
    chosen = names_of(spec.pieces(labels)) if groups else ()
    group = "" if rows else spec.group_column  # boxes keep the column themselves
    return labels, {name: _open(groups[name], spec.image_column, label, rows, group) for name in chosen}


def unlabelled(spec: Any, header: Callable[[bytes], Sequence[int]] | None) -> Shards:
    """All images of the shards that `spec.data` names. A collective. Raises `Refused`."""
    with all_or_none("looking for shards"):
        groups = hub_shards(spec.data) if spec.streaming else {"": find(spec.data) or expand(spec.data)}
    source = _open([*chain.from_iterable(groups.values())], spec.image_column, "", Rows(lambda *_: (), (), header))
    return shared([source], spec.shard_memory)[0]


def _open(names: Sequence[str], image: str, label: str, rows: Rows | None, group: str = "") -> Shards:
    local, stamps = not is_remote(names[0]), []
    with all_or_none("looking at shards"), ThreadPoolExecutor(16) as pool:
        if is_main() or local:  # files are looked at on each machine, others only once
            stamps = [*pool.map(ranges.stat, names)]
    stamps = stamps if local else broadcast_object(stamps)
    index = shard_index.open_index(ShardList((*names,), (*map(tuple, stamps),), image, label, rows, group))
    blocks = None if local and not parquet_shards.is_parquet(names[0]) else Blocks(index.edges, 0)
    return Shards(
        index.entries,
        index,
        blocks=blocks,
        labels=index.labels,
        classes=index.classes,
        groups=index.groups,
        notes=index.notes,
    )


def find(data: str) -> list[str]:
    """The names of the shards that `data` names; none if it names other data. Raises `Refused`."""
    path = Path(data).expanduser().absolute()
    if not path.is_dir():
        check_secrets(data)
        return expand(data) if _SHARDS.search(data) else []
    tars = [*path.glob("[!.]*.tar"), *path.glob("[!.]*/[!.]*.tar")]
    # A set of shards may have a picture beside it. An image folder has few archives, which somebody left there.
    if tars and _has_pictures(path, more_than=len(tars)):
        return []
    return sorted(map(str, tars))


def _has_pictures(folder: Path, more_than: int) -> bool:
    num_pictures = 0
    for _, entries in walk(folder):
        num_pictures += sum(has_image_suffix(entry.name) for entry in entries)
        if num_pictures > more_than:
            return True
    return False


def _with_classes(source: Shards, first: Shards, label: str) -> Shards:
    """`source` with the classes of `first`."""
    if source.multi_label != first.multi_label:
        raise Refused(f"{label}: labels are lists in some parts of the data only; write them alike")
    if unknown := sorted({*source.classes} - {*first.classes}):
        raise Refused(f"{label}: a class that {first.index.shards} do not have: {unknown[0]}; add it there")
    if source.classes == first.classes:
        return source
    places = np.array([first.classes.index(name) for name in source.classes])
    if source.multi_label:
        labels = np.zeros((len(source), len(first.classes)), bool)
        labels[:, places] = source.labels
    else:
        labels = places[source.labels]
    return replace(source, labels=labels, classes=first.classes)
