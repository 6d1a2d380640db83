"""Parquet shards at URLs: their footers and columns, and images one row group at a time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.config.secrets import redact_name
from common.data import tables
from common.errors import Refused
from common.shards import ranges
from common.shards.ranges import RangeFile, Stamp

_MAX_FOOTER = 2**26  # bytes
_MAX_ROWS = 2**24  # rows beyond one per byte of a file
_ROW_BITS = 32  # of an entry's start, below its row group


@dataclass(frozen=True)
class Footer:
    """What the footer of a shard says, and which of its columns has the images."""

    metadata: pq.FileMetaData
    split: tables.Split  # its columns, without rows
    image: str  # the column of images
    leaf: str  # the field with their bytes


def join_start(row_group: int, rows: np.ndarray) -> np.ndarray:
    """int64[n], the starts of entries: a row group, and rows in it."""
    return rows + (row_group << _ROW_BITS)


def split_start(start: int) -> tuple[int, int]:
    """The row group of an entry's start, and the row in it."""
    return start >> _ROW_BITS, start & (2**_ROW_BITS - 1)


def row_groups_of(starts: np.ndarray) -> np.ndarray:
    """int64[n], the row group of each entry's start."""
    return starts >> _ROW_BITS


def read_images(name: str, stamp: Stamp, image: str, starts: np.ndarray) -> Iterator[bytes]:
    """The bytes of the images at `starts`; none for a row without an image. Raises `Refused`."""
    if not len(starts):
        return
    cuts = np.flatnonzero(np.diff(row_groups_of(starts))) + 1
    for group_starts in np.split(starts, cuts):
        row_group, _ = split_start(int(group_starts[0]))
        rows = group_starts - join_start(row_group, np.zeros(1, np.int64))
        cells = _read_cells(name, stamp, image, row_group)
        images: dict[int | None, bytes] = {None: b""}
        for index in cells.indices.take(pa.array(rows)).to_pylist():
            if index not in images:
                images[index] = cells.dictionary[index].as_py() or b""
            yield images[index]


def _read_cells(name: str, stamp: Stamp, image: str, row_group: int) -> pa.DictionaryArray:
    """The images of a row group, each of them once. Raises `Refused`."""
    try:
        footer = read_footer(name, stamp, image)
        try:  # an image that is stored once and repeated stays one
            table = read_columns(
                name, stamp, footer, [row_group], [footer.leaf], as_dictionary=[footer.leaf]
            )
        except OSError:  # pyarrow reads the DELTA encodings in full alone
            table = read_columns(name, stamp, footer, [row_group], [footer.leaf])
        cells = table.column(0).combine_chunks()
    except (pa.ArrowException, ValueError, OSError):
        raise Refused(
            f"{redact_name(name)}: row group {row_group}: damaged, or in an unknown encoding"
        ) from None
    if pa.types.is_struct(cells.type):
        cells = cells.field("bytes")
    if not pa.types.is_dictionary(cells.type):
        cells = cells.dictionary_encode()
    return cells


@lru_cache(maxsize=1024)
def read_footer(name: str, stamp: Stamp, image: str) -> Footer:
    """The footer of a shard, whose images are in the column `image`, or in the only likely one if that is "".

    Raises `Refused`, and ValueError for a file that is not Parquet.
    """
    import datasets

    size, tag = stamp
    end = ranges.read(name, max(0, size - 8), size, tag)
    if (
        size < 12
        or end[4:] != b"PAR1"
        or int.from_bytes(end[:4], "little") > min(size - 12, _MAX_FOOTER)
    ):
        raise ValueError("no Parquet file: cut off, or its footer is damaged")
    metadata = pq.ParquetFile(RangeFile(name, stamp)).metadata
    # Each row takes memory, and a damaged file may name any number.
    if metadata.num_rows > size + _MAX_ROWS:
        raise ValueError(f"its footer names {metadata.num_rows:,} rows, in {size:,} bytes")
    schema = metadata.schema.to_arrow_schema()
    repeated = [column for column in schema.names if schema.names.count(column) > 1]
    if repeated:
        raise ValueError(f"two columns are named {repeated[0]}; rename one")
    no_rows = datasets.table.InMemoryTable(schema.empty_table())
    split = tables.Split(redact_name(name), "", datasets.Dataset(no_rows))
    column = tables.find_image_column(split, image)
    if not tables.is_bytes(split.kinds[column]):
        raise Refused(f"--image_column {column}: names files; shards have the images themselves")
    leaf = f"{column}.bytes" if pa.types.is_struct(split.kinds[column]) else column
    return Footer(metadata, split, column, leaf)


def read_columns(
    name: str,
    stamp: Stamp,
    footer: Footer,
    row_groups: Iterable[int],
    columns: Iterable[str],
    as_dictionary: Sequence[str] = (),
) -> pa.Table:
    """Columns of row groups; those of `as_dictionary` have each of their values once. Raises an
    error of Arrow.
    """
    file = pq.ParquetFile(
        RangeFile(name, stamp), metadata=footer.metadata, read_dictionary=list(as_dictionary)
    )
    return file.read_row_groups(list(row_groups), list(columns), use_threads=False)
