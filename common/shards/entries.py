"""Entries of shards: where each image lies, with its label. All ranks read some shards, and share
what they have read.
"""

import base64
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from common.config.secrets import redact_name
from common.data import tables
from common.data.notes import Notes
from common.distributed import watchdog
from common.distributed.collectives import all_or_none, gather_objects, is_main, rank, world_size
from common.errors import Refused, get_line, make_printable
from common.randomness import key_of, mix
from common.shards import parquet, tars
from common.shards.names import is_parquet, is_remote, remove_signature
from common.shards.ranges import RangeFile, Stamp

ENTRY = np.dtype(
    [("start", "<i8"), ("key", "<u8"), ("size", "<u4"), ("head", "<u4"), ("shard", "<u4")]
)
FORMAT = 5  # to be raised when the content of the index changes
# Of the table of a shard: the column of entries, that of images' headers, and its metadata about
# samples left out.
ENTRIES = "entries"
HEADER = "header of the image"
LEFT_OUT = b"samples left out"
_MAX_IMAGE = 2**30  # bytes of an image's file; larger ones are left out
_LOCAL_BUFFER = 2**12
_REMOTE_BUFFER = 2**20  # bytes that are read at once of a tar
# Shards that a rank reads in one turn; after each turn all ranks share what they have read.
_AT_ONCE = 8
_PATIENCE_S = 10.0  # until progress is shown, and between two times


class KeptColumns(NamedTuple):
    """How samples with other columns than a label are read: these are kept as a table."""

    # (columns of Parquet, the one of images) -> those to keep.
    find: Callable[[tables.Split, str], Sequence[str]]
    keys: tuple[str, ...]  # of a sample's JSON
    # Content of an image -> numbers, kept in the column `HEADER`
    read_header: Callable[[bytes], Sequence[int]] | None


@dataclass(frozen=True)
class ShardList:
    """Shards of one split of the data, and which members or columns of them are read."""

    names: tuple[str, ...]
    stamps: tuple[Stamp, ...]
    image: str
    label: str
    columns: KeptColumns | None = None  # of images with boxes
    # Column, or key of a sample's JSON: samples with the same value are held out together.
    group: str = ""

    def __str__(self) -> str:
        return f"{redact_name(self.names[0])} and {len(self.names) - 1:,} more shards"

    @property
    def key(self) -> str:
        """32 hex digits: equal for an index of the same content."""
        names = [remove_signature(name) for name in self.names]
        columns = None
        if self.columns:
            columns = [*self.columns.keys, bool(self.columns.read_header)]
        text = json.dumps(
            [
                FORMAT,
                np.__version__,
                names,
                self.stamps,
                self.image,
                self.label,
                columns,
                self.group,
            ]
        )
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def has_tags(self) -> bool:
        """True if a shard that changes gets another stamp: a server may give neither an ETag nor a time."""
        return all(tag != f"{size} bytes" for size, tag in self.stamps)

    @property
    def in_parquet(self) -> bool:
        return is_parquet(self.names[0])


def read_shards(shards: ShardList, keep: bool) -> list[pa.Table]:
    """A table of each shard, in their order, if this rank keeps them. A collective. Raises `Refused`.

    Each rank reads some; after each turn, all share them. A table has the labels, or the columns
    that are kept, and the entries.
    """
    num_shards = len(shards.names)
    kept: list[pa.Table] = []
    title = "reading the headers of shards"
    bar = tqdm(
        total=num_shards,
        desc=f"{title}, once",
        unit="shard",
        delay=_PATIENCE_S,
        mininterval=_PATIENCE_S,
        disable=not is_main(),
    )
    with bar, ThreadPoolExecutor(_AT_ONCE) as pool:
        for turn_start in range(0, num_shards, world_size() * _AT_ONCE):
            start = min(turn_start + rank() * _AT_ONCE, num_shards)
            stop = min(start + _AT_ONCE, num_shards)
            with all_or_none("reading shards"):
                texts = list(pool.map(partial(_read_shard, shards), range(start, stop)))
            watchdog.note(title)
            for text in chain.from_iterable(gather_objects(texts)):
                if keep:
                    kept.append(pa.ipc.open_stream(base64.b64decode(text)).read_all())
                bar.update()
    return kept


def _read_shard(shards: ShardList, number: int) -> str:
    """The labels and entries of a shard: a table in Arrow's format, as text that JSON can hold."""
    name = shards.names[number]
    read = _read_parquet if is_parquet(name) else _read_tar
    try:
        entries, cells = read(name, shards.stamps[number], shards)
    except (pa.ArrowException, OSError):
        raise Refused(
            f"{redact_name(name)}: damaged, or of a kind that pyarrow can't read"
        ) from None
    except (ValueError, KeyError) as error:  # KeyError: two columns have the same name
        raise Refused(f"{redact_name(name)}: {get_line(error)}") from None
    entries["shard"] = number
    buffers = [None, pa.py_buffer(entries.tobytes())]
    column = pa.Array.from_buffers(pa.binary(ENTRY.itemsize), len(entries), buffers)
    table = cells.append_column(ENTRIES, column)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return base64.b64encode(sink.getvalue()).decode()


# ---- Parquet


def _read_parquet(name: str, stamp: Stamp, shards: ShardList) -> tuple[np.ndarray, pa.Table]:
    """Entries and labels of Parquet. Raises `Refused`, ValueError or an error of Arrow."""
    footer = parquet.read_footer(name, stamp, shards.image)
    if shards.group:
        tables.check_group(footer.split, shards.group)
    if shards.columns:
        columns = list(shards.columns.find(footer.split, footer.image))
    else:
        columns = list(
            tables.find_label_columns(footer.split, shards.label, footer.image, shards.group)
        )
    if shards.group:
        columns.append(shards.group)
    entries = _list_rows(name, footer)
    schema = footer.metadata.schema.to_arrow_schema()
    typed = pa.schema([schema.field(column) for column in columns], schema.metadata)
    row_groups = range(footer.metadata.num_row_groups)
    cells = parquet.read_columns(name, stamp, footer, row_groups, columns).cast(typed)
    if shards.columns:
        read_header = shards.columns.read_header
        headers: list[Sequence[int]] = [[]] * len(entries)
        if read_header:
            images = parquet.read_images(name, stamp, shards.image, entries["start"])
            headers = [read_header(image) for image in images]
        # None, if images are not labelled.
        kept = {column: cells[column] for column in cells.column_names}
        kept[HEADER] = pa.array(headers, pa.list_(pa.int64()))
        cells = pa.table(kept)
    return entries, cells


def _list_rows(name: str, footer: parquet.Footer) -> np.ndarray:
    """ENTRY[N] of the rows of Parquet, whose `start` is a row group and the row in it, and `size`
    the row group's mean.
    """
    metadata = footer.metadata
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    leaf = leaves.index(footer.leaf)
    starts = [np.zeros(0, np.int64)]
    sizes = [np.zeros(0, np.int64)]
    for row_group in range(metadata.num_row_groups):
        facts = metadata.row_group(row_group)
        num_rows = facts.num_rows
        mean_size = -(-facts.column(leaf).total_uncompressed_size // max(1, num_rows))  # rounded up
        starts.append(parquet.join_start(row_group, np.arange(num_rows)))
        sizes.append(np.repeat(mean_size, num_rows))
    entries = np.zeros(sum(map(len, starts)), ENTRY)
    entries["start"] = np.concatenate(starts)
    entries["key"] = mix(np.arange(len(entries)), key_of(redact_name(name).rpartition("/")[2]))
    entries["size"] = np.concatenate(sizes)
    return entries


# ---- tars


def _read_tar(name: str, stamp: Stamp, shards: ShardList) -> tuple[np.ndarray, pa.Table]:
    """Entries and labels of a tar; the table's metadata have the samples that were left out. Raises
    ValueError.
    """
    size, _ = stamp
    buffer_size = _REMOTE_BUFFER if is_remote(name) else _LOCAL_BUFFER
    file = io.BufferedReader(RangeFile(name, stamp), buffer_size)
    tar_format = tars.TarFormat(
        shards.image, shards.label, shards.group, has_json_labels=bool(shards.columns)
    )
    notes = Notes(name, "samples")
    entries = []
    rows = []
    for sample in tars.read_samples(file, size, tar_format):
        if not sample.image:
            notes.leave_out("no image", make_printable(sample.key))
        elif sample.image.size > _MAX_IMAGE:
            notes.leave_out("an image beyond 1 GiB", make_printable(sample.key))
        else:
            entries.append(_entry_of_member(sample.image))
            rows.append(_read_row(file, sample, sample.image, shards))
    # Of all samples: Table.from_pylist takes the first one's.
    names = dict.fromkeys(chain.from_iterable(rows))
    columns = {column: [row.get(column) for row in rows] for column in names}
    if not shards.columns:
        _check_labels(columns.get(shards.label or "label", []))
    table = pa.table(columns, metadata={LEFT_OUT: json.dumps(notes.left_out)})
    return np.array(entries, ENTRY), table


def _entry_of_member(image: tarfile.TarInfo) -> tuple[int, int, int, int, int]:
    """The values of an ENTRY; its `head` is the bytes of the member's headers."""
    digest = hashlib.blake2b(os.fsencode(image.name), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    return image.offset_data, key, image.size, image.offset_data - image.offset, 0


def _read_row(
    file: BinaryIO, sample: tars.Sample, image: tarfile.TarInfo, shards: ShardList
) -> dict[str, Any]:
    """The cells of a sample: its label, or what is kept of its JSON. Raises ValueError if there is
    no label.
    """
    columns = shards.columns
    if sample.label is None and (columns is None or columns.keys):
        problem = "no .json"
        if columns is None:
            label = shards.label or "cls"
            problem = (
                f"neither {sample.key}.{label} nor a label in its .json; name it by --label_column"
            )
        raise ValueError(f"the sample {sample.key} has no label: {problem}")
    if columns is None:
        row = {shards.label or "label": sample.label}
        if shards.group:
            row[shards.group] = sample.group
        return row
    if columns.keys and not isinstance(sample.label, dict):
        raise ValueError(
            f"{sample.key}.json holds {json.dumps(sample.label)[:40]}, and no keys with values"
        )
    row = {key: sample.label[key] for key in columns.keys if key in sample.label}
    row[HEADER] = []
    if columns.read_header:
        file.seek(image.offset_data)
        row[HEADER] = columns.read_header(file.read(image.size))
    return row


def _check_labels(labels: Sequence[Any]) -> None:
    """Raise ValueError for lists of labels beside single ones."""
    num_lists = sum(isinstance(label, list) for label in labels)
    if 0 < num_lists < len(labels):
        raise ValueError(
            "some samples have one label, others a list of labels; make all of them lists"
        )
