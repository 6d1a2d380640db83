"""Index of samples in shards: where each image lies and its class, found by all ranks together.

It is kept in the user's cache folder as arrays that later starts map: they look at each shard's
size and time only.
"""

import json
import os
import tempfile
import time
import zlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.config.secrets import redact_name
from common.data import tables
from common.data.csv_files import parse_integers
from common.data.notes import Notes
from common.data.source import hash_source
from common.distributed.collectives import all_or_none, gather_objects, is_local_main, node_rank
from common.durable import remove, replace_folder, sync_folder
from common.errors import Refused, get_line, get_os_reason
from common.files import CACHE, SMALL, get_cache_folder, open_regular, read_text
from common.shards.entries import ENTRIES, ENTRY, HEADER, LEFT_OUT, ShardList, read_shards
from common.shards.parquet import row_groups_of

_UNUSED_S = 30 * 86_400  # after which an index that was not used is removed
# Bytes of neighbouring samples that are read at once, if they are not in local files.
_BLOCK = 2**22
_MAX_BLOCKS = 2**22  # whose order is computed again for each epoch
# Bytes of a file that a start compares with their checksum: the index of 19 million samples.
_MAX_CHECKED = 2**29


@dataclass
class Index:
    """The samples of shards, in their order."""

    shards: ShardList
    # ENTRY[N]: where images begin, hashes of names, bytes of images and of headers, shards.
    entries: np.ndarray
    labels: np.ndarray  # int64[N] class ids, or bool[N, C]
    groups: np.ndarray | None  # int64[N], if the shards are read with a `group`
    # int64[n + 1]: samples [edges[b], edges[b + 1]) are a block, which is read at once.
    edges: np.ndarray
    rows: pa.Table | None  # see `KeptColumns`
    classes: tuple[str, ...]
    counts: tuple[int, ...]  # images of each class
    fingerprint: str
    notes: tuple[str, ...]
    block_bytes: int  # of the largest block

    @property
    def headers(self) -> np.ndarray:
        """int64[N, 4]: what `KeptColumns.read_header` gave for each image."""
        assert self.rows
        return pc.list_flatten(self.rows[HEADER]).to_numpy().reshape(-1, 4)


def open_index(shards: ShardList) -> Index:
    """The index of these shards, from the cache folder or made now. A collective. Raises `Refused`."""
    folder = None
    index = None
    with suppress(RuntimeError):  # no home, and so no cache
        if shards.has_tags:
            folder = get_cache_folder() / f"shards-{shards.key}"
            index = _load(folder, shards)
    if all(gather_objects(index is not None)) and index:
        return index
    return _make_index(folder, shards)


def _make_index(folder: Path | None, shards: ShardList) -> Index:
    """The index of these shards, made now and kept in `folder`, if there is room. A collective.
    Raises `Refused`.
    """
    with ExitStack() as stack:
        shard_tables = read_shards(shards, keep=is_local_main())
        draft = None
        with all_or_none("writing the index of shards"):
            if is_local_main():
                draft = _write_draft(stack, folder, shards, shard_tables)
        drafts = gather_objects((node_rank(), str(draft or "")))
        with all_or_none("reading the index of shards"):
            of_machine = next(Path(path) for node, path in drafts if node == node_rank() and path)
            index = _load(of_machine, shards)
            assert index
        # All have mapped it: from here on it needs no name.
        if draft and folder and draft.parent == folder.parent:
            with suppress(OSError):
                sync_folder(draft)
                replace_folder(folder, draft)
        return index


def compute_fingerprint(classes: tuple[str, ...], labels: np.ndarray, entries: np.ndarray) -> str:
    """32 hex digits of names, sizes and labels, not of where the shards are."""
    return hash_source(classes, labels, np.stack([entries["key"], entries["size"]]))


# ---- files


def _write_draft(
    stack: ExitStack, folder: Path | None, shards: ShardList, shard_tables: list[pa.Table]
) -> Path:
    """Write the index to a new folder: beside `folder`, or else where the system keeps temporary files."""
    parents = [folder.parent, None] if folder else [None]
    for parent in parents:
        try:
            draft = Path(stack.enter_context(_open_draft(parent)))
            _write(draft, shards, shard_tables)
            return draft
        except OSError as error:
            stack.close()  # leaves nothing half-written
            reason = get_os_reason(error)
    advice = f"make room there, or name another folder with TMPDIR or {CACHE}"
    raise Refused(
        f"the index of shards can't be written to {tempfile.gettempdir()}: {reason}; {advice}"
    )


def _open_draft(parent: Path | None) -> tempfile.TemporaryDirectory:
    """An empty folder in `parent`, where indexes that were not used for long are removed, or in the
    system's folder.
    """
    if parent:
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for folder in [*parent.glob("shards-*"), *parent.glob("unfinished-*/")]:
            if folder.stat().st_mtime < time.time() - _UNUSED_S:
                remove(folder)
    return tempfile.TemporaryDirectory(dir=parent, prefix="unfinished-", ignore_cleanup_errors=True)


def _write(folder: Path, shards: ShardList, shard_tables: list[pa.Table]) -> None:
    """Write the index from a table of each shard. Raises `Refused` or OSError."""
    cells = _concat_tables(shards, shard_tables)
    with (folder / "entries").open("wb") as file:
        file.writelines(chunk.buffers()[1][: chunk.nbytes] for chunk in cells[ENTRIES].chunks)
    entries = np.memmap(folder / "entries", ENTRY, "r")
    cells = cells.drop_columns(ENTRIES).combine_chunks()
    if shards.columns:
        classes: tuple[str, ...] = ()
        labels = np.zeros(len(cells), np.int64)
        with pa.ipc.new_file(str(folder / "rows"), cells.schema) as file:
            file.write_table(cells)
    else:
        classes, labels, groups = _read_labels(shards, cells)
        if groups is not None:
            np.save(folder / "groups.npy", groups)
    edges, block_bytes = _find_blocks(entries, shards.in_parquet)
    np.save(folder / "labels.npy", labels)
    np.save(folder / "edges.npy", edges)
    counts = labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=len(classes))
    facts = {
        "classes": classes,
        "counts": counts.tolist(),
        "fingerprint": compute_fingerprint(classes, labels, entries),
        "notes": _describe_left_out(shards, shard_tables, len(entries)),
        "block_bytes": block_bytes,
    }
    _seal(folder, facts)


def _concat_tables(shards: ShardList, shard_tables: list[pa.Table]) -> pa.Table:
    """One table of all samples. Raises `Refused` if there is none, or if labels are of several kinds."""
    with_samples = [table for table in shard_tables if len(table)]
    if not with_samples:
        raise Refused(f"{shards}: no sample with an image")
    try:
        return pa.concat_tables(with_samples, promote_options="permissive")
    except pa.ArrowException as error:
        raise Refused(f"{shards}: labels are of several kinds: {get_line(error)}") from None


def _read_labels(
    shards: ShardList, cells: pa.Table
) -> tuple[tuple[str, ...], np.ndarray, np.ndarray | None]:
    """Classes, labels as `Index.labels`, and groups int64[N] if the shards are read with a `group`.
    Raises `Refused`.
    """
    import datasets

    if not shards.in_parquet:
        cells = _convert_numbers(cells)
    rows = datasets.Dataset(datasets.table.InMemoryTable(cells))
    split = tables.Split(
        redact_name(shards.names[0]), f"and {len(shards.names) - 1:,} more shards", rows
    )
    groups = tables.read_groups(split, shards.group)
    columns = tuple(name for name in cells.column_names if name != shards.group)
    classes, (labels,) = tables.read_labels([split], columns, 1)
    return classes, labels, groups


def _convert_numbers(cells: pa.Table) -> pa.Table:
    """The labels of tars, which are texts: as numbers, if all of them are."""
    column = cells.column(0).combine_chunks()
    if tables.is_list(column.type):
        values = parse_integers(column.flatten().cast(pa.string()))
        labels = pa.ListArray.from_arrays(column.offsets, values)
    else:
        labels = parse_integers(column.cast(pa.string()))
    return cells.set_column(0, cells.column_names[0], labels)


def _find_blocks(entries: np.ndarray, in_parquet: bool) -> tuple[np.ndarray, int]:
    """Blocks of neighbours, none over two shards: where they begin and end, and the bytes of the largest."""
    sizes = entries["size"].astype(np.int64) + entries["head"] + 16
    block_size = max(_BLOCK, int(sizes.sum()) // _MAX_BLOCKS)
    unit = row_groups_of(entries["start"]) if in_parquet else entries["start"] // block_size
    is_first = (np.diff(unit) != 0) | (np.diff(entries["shard"]) != 0)
    edges = np.concatenate([[0], np.flatnonzero(is_first) + 1, [len(entries)]])
    block_bytes = np.add.reduceat(sizes, edges[:-1])
    return edges, int(block_bytes.max())


def _describe_left_out(
    shards: ShardList, shard_tables: list[pa.Table], num_samples: int
) -> tuple[str, ...]:
    """Notes on the samples that are not among the `num_samples`. Raises `Refused` if they are most."""
    notes = Notes(str(shards), "samples")
    for table in shard_tables:
        left_out = json.loads((table.schema.metadata or {}).get(LEFT_OUT, "{}"))
        for reason, (count, first) in left_out.items():
            notes.leave_out(reason, first, count)
    return notes.format_lines(
        num_samples + notes.num_left_out, "name the kind of file with --image_column, such as jpg"
    )


def _seal(folder: Path, facts: dict) -> None:
    """Write `facts` with the checksums of the other files, below a line with their own."""
    checksums = {path.name: _compute_checksum(path) for path in folder.iterdir()}
    text = json.dumps(facts | {"checksums": checksums})
    (folder / "facts.json").write_text(f"{zlib.crc32(text.encode())}\n{text}")


def _compute_checksum(path: Path) -> list[int]:
    """The size of a file, and the CRC-32 of its first bytes. Raises OSError, also for what is no
    regular file.
    """
    with open_regular(path) as file:
        content = np.memmap(file, mode="r")
        return [content.nbytes, zlib.crc32(content[:_MAX_CHECKED].data)]


def _load(folder: Path, shards: ShardList) -> Index | None:
    """The index in a folder, mapped; None if there is none, or if it is damaged."""
    try:
        checksum, _, text = read_text(folder / "facts.json", SMALL * 64).partition("\n")
        if checksum != str(zlib.crc32(text.encode())):
            return None
        facts = json.loads(text)
        checksums = facts.pop("checksums")
        if any(
            _compute_checksum(folder / name) != expected for name, expected in checksums.items()
        ):
            return None
        entries = np.asarray(np.memmap(folder / "entries", ENTRY, "r"))
        labels = np.asarray(np.load(folder / "labels.npy", mmap_mode="r"))
        edges = np.asarray(np.load(folder / "edges.npy", mmap_mode="r"))
        groups = (
            np.load(folder / "groups.npy", mmap_mode="r") if "groups.npy" in checksums else None
        )
        rows = None
        if "rows" in checksums:
            rows = pa.ipc.open_file(pa.memory_map(str(folder / "rows"))).read_all()
    except (OSError, ValueError):
        return None
    with suppress(OSError):
        os.utime(folder)  # marks it as used
    small: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
    }
    return Index(shards, entries, labels, groups, edges, rows, **small)
