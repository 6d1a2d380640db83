"""Index of samples in shards: where each image lies and its class, found by all ranks together.

It is kept in the user's cache folder as arrays that later starts map: they look at each shard's size and time only.
"""

import base64
import hashlib
import io
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from common.data import parquet_shards, tables, tar_samples
from common.data.csv_files import as_numbers
from common.data.notes import Notes
from common.data.ranges import RangeFile, Stamp
from common.data.shard_names import is_remote, printable_name, without_signature
from common.data.source import fingerprint_of
from common.distributed import watchdog
from common.distributed.collectives import (
    all_or_none,
    gather_objects,
    is_local_main,
    is_main,
    node_rank,
    rank,
    world_size,
)
from common.durable import remove, replace_folder, sync_folder
from common.errors import Refused, printable
from common.files import CACHE, SMALL, cache_folder, open_regular, read_text
from common.randomness import key_of, mix

ENTRY = np.dtype([("start", "<i8"), ("key", "<u8"), ("size", "<u4"), ("head", "<u4"), ("shard", "<u4")])
HEADER = "header of the image"
_ENTRIES, _LEFT_OUT = "entries", b"samples left out"
LARGEST = 2**30  # bytes of an image's file; larger ones are left out
_FORMAT = 5  # to be raised when the content of the index changes
_AHEAD = 2**12, 2**20  # bytes that are read at once of a tar: of a local file, of others
_AT_ONCE = 8  # shards that a rank reads in one turn; after each turn all ranks share what they found
_PATIENCE = 10.0  # seconds until progress is shown, and between two times
_UNUSED = 30 * 86_400  # seconds after which an index that was not used is removed
_BLOCK = 2**22  # bytes of neighbouring samples that are read at once, if they are not in local files
_MAX_CHECKED = 2**29  # bytes of a file that a start compares with their checksum: the index of 19 million samples
_BLOCKS = 2**22  # the largest number of blocks, whose order is computed again for each epoch


class Rows(NamedTuple):
    """How samples with other columns than a label are read: these are kept as a table."""

    find: Callable[[tables.Split, str], Sequence[str]]  # (columns of Parquet, the one of images) -> those to keep
    keep: tuple[str, ...]  # keys of a sample's JSON
    header: Callable[[bytes], Sequence[int]] | None  # content of an image -> numbers, kept in the column `HEADER`


@dataclass(frozen=True)
class ShardList:
    """Shards of one part of the data, and which members or columns of them are read."""

    names: tuple[str, ...]
    stamps: tuple[Stamp, ...]
    image: str
    label: str
    rows: Rows | None = None  # of images with boxes
    group: str = ""  # column, or key of a sample's JSON: samples with the same value are held out together

    def __str__(self) -> str:
        return f"{printable_name(self.names[0])} and {len(self.names) - 1:,} more shards"

    @property
    def key(self) -> str:
        names = [without_signature(name) for name in self.names]
        kept = self.rows and [*self.rows.keep, bool(self.rows.header)]
        words = json.dumps([_FORMAT, np.__version__, names, self.stamps, self.image, self.label, kept, self.group])
        return hashlib.blake2b(words.encode(), digest_size=16).hexdigest()

    @property
    def has_tags(self) -> bool:
        """True if a shard that changes gets another stamp: a server may give neither an ETag nor a time."""
        return all(tag != f"{size} bytes" for size, tag in self.stamps)


@dataclass
class Index:
    """The samples of shards, in their order."""

    shards: ShardList
    entries: np.ndarray  # ENTRY[N]: where images begin, hashes of names, bytes of images and of headers, shards
    labels: np.ndarray  # int64[N] class ids, or bool[N, C]
    groups: np.ndarray | None  # int64[N], if the shards are read with a `group`
    edges: np.ndarray  # int64[n + 1]: samples [edges[b], edges[b + 1]) are a block, which is read at once
    rows: pa.Table | None  # see `Rows`
    classes: tuple[str, ...]
    counts: tuple[int, ...]  # images of each class
    fingerprint: str
    notes: tuple[str, ...]
    block_bytes: int  # of the largest block

    @property
    def headers(self) -> np.ndarray:
        """int64[N, 4]: what `Rows.header` gave for each image."""
        assert self.rows
        return pc.list_flatten(self.rows[HEADER]).to_numpy().reshape(-1, 4)


def open_index(shards: ShardList) -> Index:
    """The index of these shards, from the cache folder or made now. A collective. Raises `Refused`."""
    place = index = None
    with suppress(RuntimeError):  # no home, and so no cache
        if shards.has_tags:
            place = cache_folder() / f"shards-{shards.key}"
            index = _load(place, shards)
    if all(gather_objects(index is not None)) and index:
        return index
    with ExitStack() as stack:
        found = _read_all(shards, keep=is_local_main())
        with all_or_none("writing the index of shards"):
            draft = _write_draft(stack, place, shards, found) if is_local_main() else None
        drafts = gather_objects((node_rank(), str(draft or "")))
        with all_or_none("reading the index of shards"):
            index = _load(next(Path(path) for node, path in drafts if node == node_rank() and path), shards)
            assert index
        # All have mapped it: from here on it needs no name.
        if draft and place and draft.parent == place.parent:
            with suppress(OSError):
                sync_folder(draft)
                replace_folder(place, draft)
        return index


# ---- reading of shards


def _read_all(shards: ShardList, keep: bool) -> list[pa.Table]:
    """A table of each shard, in their order, if this rank keeps them. Each rank reads some; after each turn, all share them."""
    count: int = len(shards.names)
    kept: list[pa.Table] = []
    what = "reading the headers of shards, once"
    bar = tqdm(total=count, desc=what, unit="shard", delay=_PATIENCE, mininterval=_PATIENCE, disable=not is_main())
    with bar, ThreadPoolExecutor(_AT_ONCE) as pool:
        for first in range(0, count, world_size() * _AT_ONCE):
            begin, end = (min(first + (rank() + more) * _AT_ONCE, count) for more in (0, 1))
            with all_or_none("reading shards"):
                found = [*pool.map(partial(_read, shards), range(begin, end))]
            watchdog.note("reading the headers of shards")
            for table in chain.from_iterable(gather_objects(found)):
                kept += [pa.ipc.open_stream(base64.b64decode(table)).read_all()] if keep else []
                bar.update()
    return kept


def _read(shards: ShardList, number: int) -> str:
    """The labels and entries of a shard: a table in Arrow's format, as text that JSON can hold."""
    name = shards.names[number]
    try:
        read = _rows if parquet_shards.is_parquet(name) else _members
        entries, cells = read(name, shards.stamps[number], shards)
    except (pa.ArrowException, OSError):
        raise Refused(f"{printable_name(name)}: damaged, or of a kind that pyarrow can't read") from None
    except (ValueError, KeyError) as error:  # KeyError: two columns have the same name
        raise Refused(f"{printable_name(name)}: {' '.join(str(error).split())}") from None
    entries["shard"] = number
    raw = [None, pa.py_buffer(entries.tobytes())]
    table = cells.append_column(_ENTRIES, pa.Array.from_buffers(pa.binary(ENTRY.itemsize), len(entries), raw))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return base64.b64encode(sink.getvalue()).decode()


def _rows(name: str, stamp: Stamp, shards: ShardList) -> tuple[np.ndarray, pa.Table]:
    """Entries and labels of Parquet. Raises `Refused`, ValueError or an error of Arrow.

    An entry's `start` is its row group and the row in it, `row group << 32 | row`, and its `size` the mean of the row group.
    """
    rows = shards.rows
    facts, split, image, leaf = parquet_shards.opened(name, stamp, shards.image)
    if shards.group:
        tables.check_group(split, shards.group)
    columns = list(rows.find(split, image) if rows else tables.find_labels(split, shards.label, image, shards.group))
    if shards.group:
        columns.append(shards.group)
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    counts = [group.num_rows for group in groups]
    entries = np.zeros(sum(counts), ENTRY)
    places = [np.arange(count) + (number << 32) for number, count in enumerate(counts)]
    entries["start"] = np.concatenate([np.zeros(0, np.int64), *places])
    entries["key"] = mix(np.arange(len(entries)), key_of(printable_name(name).rpartition("/")[2]))
    number = [facts.schema.column(place).path for place in range(facts.num_columns)].index(leaf)
    sizes = [-(-group.column(number).total_uncompressed_size // max(1, group.num_rows)) for group in groups]
    entries["size"] = np.repeat(sizes, counts)
    schema = facts.schema.to_arrow_schema()
    fields = pa.schema([schema.field(column) for column in columns], schema.metadata)
    cells = parquet_shards.read(name, stamp, facts, range(len(groups)), columns).cast(fields)
    if rows:
        images = parquet_shards.images(name, stamp, shards.image, entries["start"])
        headers = map(rows.header, images) if rows.header else [[]] * len(entries)
        columns_of = {name: cells[name] for name in cells.column_names}  # none, if images are not labelled
        cells = pa.table(columns_of | {HEADER: pa.array(headers, pa.list_(pa.int64()))})
    return entries, cells


def _members(name: str, stamp: Stamp, shards: ShardList) -> tuple[np.ndarray, pa.Table]:
    """Entries and labels of a tar; the table's metadata have the samples that were left out. Raises ValueError."""
    rows, entries, found = shards.rows, [], []
    notes = Notes(name, "samples")
    file = io.BufferedReader(RangeFile(name, stamp), _AHEAD[is_remote(name)])
    for sample in tar_samples.samples(file, stamp[0], shards.image, shards.label, bool(rows), shards.group):
        image = sample.image
        if not image or image.size > LARGEST:
            notes.leave_out("an image beyond 1 GiB" if image else "no image", printable(sample.key))
            continue
        if sample.label is None and (not rows or rows.keep):
            wanted = f"neither {sample.key}.{shards.label or 'cls'} nor a label in its .json; name it by --label_column"
            raise ValueError(f"the sample {sample.key} has no label: {'no .json' if rows else wanted}")
        key = int.from_bytes(hashlib.blake2b(os.fsencode(image.name), digest_size=8).digest(), "little")
        entries.append((image.offset_data, key, image.size, image.offset_data - image.offset, 0))
        cells = {shards.label or "label": sample.label}
        if shards.group:
            cells[shards.group] = sample.group
        if rows:
            cells = {key: sample.label[key] for key in rows.keep if key in sample.label} | {HEADER: []}
            if rows.header:
                file.seek(image.offset_data)
                cells[HEADER] = rows.header(file.read(image.size))
        found.append(cells)
    names = dict.fromkeys(chain.from_iterable(found))  # of all samples: Table.from_pylist takes the first one's
    columns = {name: [cells.get(name) for cells in found] for name in names}
    labels = columns.get(shards.label or "label", [])
    if not rows and len({isinstance(label, list) for label in labels}) == 2:
        raise ValueError("some samples have one label, others a list of labels; make all of them lists")
    return np.array(entries, ENTRY), pa.table(columns, metadata={_LEFT_OUT: json.dumps(notes.left_out)})


# ---- the index in files


def _write(folder: Path, shards: ShardList, found: list[pa.Table]) -> None:
    """Write the index from a table of each shard."""
    import datasets

    if not (filled := [table for table in found if len(table)]):
        raise Refused(f"{shards}: no sample with an image")
    try:
        cells = pa.concat_tables(filled, promote_options="permissive")
    except pa.ArrowException as error:
        raise Refused(f"{shards}: labels are of several kinds: {' '.join(str(error).split())}") from None
    with (folder / "entries").open("wb") as file:
        file.writelines(chunk.buffers()[1][: chunk.nbytes] for chunk in cells[_ENTRIES].chunks)
    cells = cells.drop_columns(_ENTRIES).combine_chunks()
    in_rows = parquet_shards.is_parquet(shards.names[0])
    classes: tuple[str, ...] = ()
    labels = np.zeros(len(cells), np.int64)
    if shards.rows:
        with pa.ipc.new_file(str(folder / "rows"), cells.schema) as file:
            file.write_table(cells)
    else:
        rows = datasets.Dataset(datasets.table.InMemoryTable(cells if in_rows else _typed(cells)))
        split = tables.Split(printable_name(shards.names[0]), f"and {len(shards.names) - 1:,} more shards", rows)
        groups = tables.read_groups(split, shards.group)
        if groups is not None:
            np.save(folder / "groups.npy", groups)
        columns = tuple(name for name in cells.column_names if name != shards.group)
        classes, (labels,) = tables.read_labels([split], columns, 1)
    entries = np.memmap(folder / "entries", ENTRY, "r")
    edges, block_bytes = _blocks(entries, in_rows)
    np.save(folder / "labels.npy", labels)
    np.save(folder / "edges.npy", edges)
    notes = Notes(str(shards), "samples")
    for table in found:
        for reason, (count, first) in json.loads((table.schema.metadata or {}).get(_LEFT_OUT, "{}")).items():
            notes.leave_out(reason, first, count)
    counts = labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=len(classes))
    facts = {
        "classes": classes,
        "counts": counts.tolist(),
        "fingerprint": fingerprint(classes, labels, entries),
        "notes": notes.texts(
            len(entries) + notes.num_left_out, "name the kind of file with --image_column, such as jpg"
        ),
        "block_bytes": block_bytes,
    }
    _seal(folder, facts)


def _seal(folder: Path, facts: dict) -> None:
    """Write `facts` with the checksums of the other files, below a line with their own."""
    text = json.dumps(facts | {"checksums": {path.name: _checksum(path) for path in folder.iterdir()}})
    (folder / "facts.json").write_text(f"{zlib.crc32(text.encode())}\n{text}")


def _checksum(path: Path) -> list[int]:
    """The size of a file, and the CRC-32 of its first bytes. Raises OSError, also for what is no regular file."""
    with open_regular(path) as file:
        content = np.memmap(file, mode="r")
        return [content.nbytes, zlib.crc32(content[:_MAX_CHECKED].data)]


def _typed(cells: pa.Table) -> pa.Table:
    """The labels of tars, which are texts: as numbers, if all of them are."""
    column = cells.column(0).combine_chunks()
    several = tables.is_list(column.type)
    values = as_numbers((column.flatten() if several else column).cast(pa.string()))
    typed = pa.ListArray.from_arrays(column.offsets, values) if several else values
    return cells.set_column(0, cells.column_names[0], typed)


def _blocks(entries: np.ndarray, are_rows: bool) -> tuple[np.ndarray, int]:
    """Blocks of neighbours, none over two shards: where they begin and end, and the bytes of the largest."""
    sizes = entries["size"].astype(np.int64) + entries["head"] + 16
    unit = entries["start"] >> 32 if are_rows else entries["start"] // max(_BLOCK, int(sizes.sum()) // _BLOCKS)
    begins = np.flatnonzero((np.diff(unit) != 0) | (np.diff(entries["shard"]) != 0)) + 1
    edges = np.concatenate([[0], begins, [len(entries)]])
    return edges, int(np.add.reduceat(sizes, edges[:-1]).max())


def fingerprint(classes: tuple[str, ...], labels: np.ndarray, entries: np.ndarray) -> str:
    """Of names, sizes and labels, not of the place."""
    return fingerprint_of(classes, labels, np.stack([entries["key"], entries["size"]]))


def _write_draft(stack: ExitStack, place: Path | None, shards: ShardList, found: list[pa.Table]) -> Path:
    """Write the index to a new folder: beside `place`, or else where the system keeps temporary files."""
    parents = [place.parent, None] if place else [None]
    for parent in parents:
        try:
            draft = Path(stack.enter_context(_draft(parent)))
            _write(draft, shards, found)
            return draft
        except OSError as error:
            stack.close()  # leaves nothing half-written
            reason = error.strerror or "no space left"
    advice = f"make room there, or name another folder with TMPDIR or {CACHE}"
    raise Refused(f"the index of shards can't be written to {tempfile.gettempdir()}: {reason}; {advice}")


def _draft(parent: Path | None) -> tempfile.TemporaryDirectory:
    """An empty folder in `parent`, where indexes that were not used for long are removed, or in the system's folder."""
    if parent:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in [*parent.glob("shards-*"), *parent.glob("unfinished-*/")]:
            if old.stat().st_mtime < time.time() - _UNUSED:
                remove(old)
    return tempfile.TemporaryDirectory(dir=parent, prefix="unfinished-", ignore_cleanup_errors=True)


def _load(folder: Path, shards: ShardList) -> Index | None:
    """The index in a folder, mapped; None if there is none, or if it is damaged."""
    try:
        checksum, _, text = read_text(folder / "facts.json", SMALL * 64).partition("\n")
        if checksum != str(zlib.crc32(text.encode())):
            return None
        facts = json.loads(text)
        checksums = facts.pop("checksums")
        if any(_checksum(folder / name) != expected for name, expected in checksums.items()):
            return None
        entries = np.asarray(np.memmap(folder / "entries", ENTRY, "r"))
        labels, edges = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("labels", "edges"))
        groups = np.load(folder / "groups.npy", mmap_mode="r") if "groups.npy" in checksums else None
        has_rows = "rows" in checksums
        rows = pa.ipc.open_file(pa.memory_map(str(folder / "rows"))).read_all() if has_rows else None
    except (OSError, ValueError):
        return None
    with suppress(OSError):
        os.utime(folder)  # marks it as used
    small: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    return Index(shards, entries, labels, groups, edges, rows, **small)
