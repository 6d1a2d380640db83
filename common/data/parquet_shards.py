"""Parquet shards at URLs: their footers and columns, and images one row group at a time."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.data import ranges, tables
from common.data.ranges import RangeFile, Stamp
from common.data.shard_names import printable_name, without_query
from common.errors import Refused

_FOOTER = 2**26  # bytes
_MAX_ROWS = 2**24  # rows beyond one per byte of a file


def is_parquet(name: str) -> bool:
    return without_query(name).endswith(".parquet")


def images(name: str, stamp: Stamp, image: str, places: np.ndarray) -> Iterator[bytes]:
    """The bytes of the images at `places`; none for a row without an image. Raises `Refused`."""
    for of_group in np.split(places, np.flatnonzero(np.diff(places >> 32)) + 1) if len(places) else ():
        group = int(of_group[0] >> 32)
        try:
            facts, *_, leaf = opened(name, stamp, image)
            try:  # an image that is stored once and repeated stays one
                column = read(name, stamp, facts, [group], [leaf], as_dictionary=[leaf]).column(0)
            except OSError:  # pyarrow reads the DELTA encodings in full alone
                column = read(name, stamp, facts, [group], [leaf]).column(0)
            cells = column.combine_chunks()
        except (pa.ArrowException, ValueError, OSError):
            raise Refused(f"{printable_name(name)}: row group {group}: damaged, or in an unknown encoding") from None
        cells = cells.field("bytes") if pa.types.is_struct(cells.type) else cells
        cells = cells if pa.types.is_dictionary(cells.type) else cells.dictionary_encode()
        distinct: dict[int | None, bytes] = {None: b""}
        for index in cells.indices.take(pa.array(of_group & 0xFFFFFFFF)).to_pylist():
            if index not in distinct:
                distinct[index] = cells.dictionary[index].as_py() or b""
            yield distinct[index]


@lru_cache(maxsize=1024)
def opened(name: str, stamp: Stamp, image: str) -> tuple[pq.FileMetaData, tables.Split, str, str]:
    """A shard's footer, its columns without rows, the column of images, and the field with their bytes.

    Raises `Refused`, and ValueError for a file that is not Parquet.
    """
    import datasets

    size, tag = stamp
    end = ranges.read(name, max(0, size - 8), size, tag)
    if size < 12 or end[4:] != b"PAR1" or int.from_bytes(end[:4], "little") > min(size - 12, _FOOTER):
        raise ValueError("no Parquet file: cut off, or its footer is damaged")
    facts = pq.ParquetFile(RangeFile(name, stamp)).metadata
    if facts.num_rows > size + _MAX_ROWS:  # each row takes memory, and a damaged file may name any number
        raise ValueError(f"its footer names {facts.num_rows:,} rows, in {size:,} bytes")
    names = facts.schema.to_arrow_schema().names
    repeated = [column for column in names if names.count(column) > 1]
    if repeated:
        raise ValueError(f"two columns are named {repeated[0]}; rename one")
    none = datasets.table.InMemoryTable(facts.schema.to_arrow_schema().empty_table())
    split = tables.Split(printable_name(name), "", datasets.Dataset(none))
    column = tables.find_image(split, image)
    if not tables.is_bytes(split.kinds[column]):
        raise Refused(f"--image_column {column}: names files; shards have the images themselves")
    return facts, split, column, f"{column}.bytes" if pa.types.is_struct(split.kinds[column]) else column


def read(
    name: str,
    stamp: Stamp,
    facts: pq.FileMetaData,
    groups: Iterable[int],
    columns: Iterable[str],
    as_dictionary: Sequence[str] = (),
) -> pa.Table:
    """Columns of row groups; those of `as_dictionary` have each of their values once. Raises an error of Arrow."""
    file = pq.ParquetFile(RangeFile(name, stamp), metadata=facts, read_dictionary=[*as_dictionary])
    return file.read_row_groups([*groups], [*columns], use_threads=False)
