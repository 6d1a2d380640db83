"""CSV files as Arrow tables: finds the separator, the columns and their types."""

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from common.data.images import SUFFIXES
from common.errors import Refused
from common.files import OddFile, read_bytes

_SEPARATORS = ",;\t|"
_WHOLE_NUMBER = r"^(0|-?[1-9][0-9]{0,17})(\.0+)?$"  # 007 is a name
_MAX_BYTES = 2**32


def read_csv(parts: Mapping[str, Sequence[str]]) -> dict[str, pa.Table]:
    """The rows of each part's files, in the same columns: int64 where all are whole numbers, else text.

    Raises `Refused`, and `pa.ArrowInvalid` if files have different columns.
    """
    tables = {part: pa.concat_tables(map(_read, files)) for part, files in parts.items()}
    joined = pa.concat_tables(tables.values())
    typed = pa.table({name: as_numbers(joined[name]) for name in joined.column_names})
    starts = accumulate(map(len, tables.values()), initial=0)
    return {part: typed.slice(start, len(table)) for (part, table), start in zip(tables.items(), starts, strict=False)}


def _read(file: str) -> pa.Table:
    try:
        content = read_bytes(file, _MAX_BYTES)
        head = io.BytesIO(content).readline().decode("utf-8-sig").rstrip("\r\n")
    except OddFile as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{file}: not readable as text ({error}); save it as CSV in UTF-8") from None
    separator = max(_SEPARATORS, key=head.count)
    names = [name.strip() for name in next(csv.reader([head], delimiter=separator), [])]
    if not names or any(name.lower().endswith(tuple(SUFFIXES)) for name in names):
        raise Refused(f"{file}: its first line must name the columns, such as image,label; it is {head[:60]!r}")
    if twice := {name for name in names if name and names.count(name) > 1}:
        raise Refused(f"{file}: two columns are named {min(twice)}; rename one")
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(content),
            pyarrow.csv.ReadOptions(use_threads=False, column_names=names, skip_rows=1),
            pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
    except pa.ArrowInvalid as error:
        raise Refused(f"{file}: not readable as CSV with {separator!r} between columns: {error}") from None
    if not len(table):
        raise Refused(f"{file}: no rows below the names of its columns")
    return table.select([name for name in names if name])  # pandas writes its row numbers without a name


def as_numbers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of texts as int64 if all of them are whole numbers, else as texts; empty ones become null."""
    column = pc.utf8_trim_whitespace(column)
    column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    is_whole = pc.all(pc.match_substring_regex(column, _WHOLE_NUMBER), min_count=1).as_py()
    return pc.replace_substring_regex(column, r"\..*", "").cast(pa.int64()) if is_whole else column
