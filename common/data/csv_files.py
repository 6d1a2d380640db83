"""CSV files as Arrow tables: finds the separator, the columns and their types."""

import codecs
import csv
import re
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from common.data.images import SUFFIXES
from common.errors import Refused
from common.files import OddFile, read_bytes

_SEPARATORS = ",;\t|"
_WHOLE_NUMBER = r"^(0|-?[1-9][0-9]{0,17})(\.0+)?$"  # 007 is a name
_MAX_BYTES = 2**32
_NUM_SAMPLE_BYTES = 2**14  # whose lines decide on the separator
_SUFFIX_PATTERNS = [re.escape(suffix) for suffix in sorted(SUFFIXES)]
IMAGE_NAME = f"(?i:{'|'.join(_SUFFIX_PATTERNS)})"  # the end of an image's name


def read_csv(files_by_split: Mapping[str, Sequence[str]]) -> dict[str, pa.Table]:
    """The rows of each split's files. Raises `Refused`.

    A column is int64 if all splits have whole numbers in it, else text.
    """
    tables = {}
    for split, files in files_by_split.items():
        tables[split] = pa.concat_tables(map(_read, files), promote_options="default")
    # A split may lack columns, such as labels.
    joined = pa.concat_tables(tables.values(), promote_options="default")
    typed = pa.table({name: parse_integers(joined[name]) for name in joined.column_names})
    start = 0
    for split, table in tables.items():
        tables[split] = typed.slice(start, len(table)).select(table.column_names)
        start += len(table)
    return tables


def _read(file: str) -> pa.Table:
    try:
        content = _decode(read_bytes(file, _MAX_BYTES))
        separator, start = _find_separator(content)
        head = content[start:].partition(b"\n")[0].decode()
    except OddFile as error:
        raise Refused(f"{file}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{file}: not readable as text ({error}); save it as CSV in UTF-8") from None
    names = _read_names(file, head, separator)
    num_skipped = 2 if start else 1
    table = _parse(file, content, names, separator, num_skipped)
    if not len(table):
        raise Refused(f"{file}: no rows below the names of its columns")
    if content.rstrip().count(b"\n") >= num_skipped + len(table):  # some are in cells
        _refuse_swallowed_rows(file, table, separator, first_line=num_skipped + 1)
    # Pandas writes its row numbers without a name.
    return table.select([name for name in names if name])


def _read_names(file: str, head: str, separator: str) -> list[str]:
    """The names of the columns in the line `head`."""
    names = [name.strip() for name in next(csv.reader([head], delimiter=separator), [])]
    if not names or any(name.lower().endswith(tuple(SUFFIXES)) for name in names):
        raise Refused(
            f"{file}: its first line must name the columns, such as image,label; it is "
            f"{head[:60]!r}"
        )
    repeated = {name for name in names if name and names.count(name) > 1}
    if repeated:
        raise Refused(f"{file}: two columns are named {min(repeated)}; rename one")
    return names


def _parse(
    file: str, content: bytes, names: list[str], separator: str, num_skipped: int
) -> pa.Table:
    """The rows below the first `num_skipped` lines, as texts."""
    invalid_rows: list[pyarrow.csv.InvalidRow] = []

    def record_invalid(row: pyarrow.csv.InvalidRow) -> str:
        invalid_rows.append(row)
        return "error"

    try:
        return pyarrow.csv.read_csv(
            pa.BufferReader(content),
            pyarrow.csv.ReadOptions(use_threads=False, column_names=names, skip_rows=num_skipped),
            pyarrow.csv.ParseOptions(
                delimiter=separator, newlines_in_values=True, invalid_row_handler=record_invalid
            ),
            pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
        )
    except pa.ArrowInvalid:
        if not invalid_rows:
            raise Refused(
                f"{file}: not readable as CSV: it is empty, or not in UTF-8; save it as CSV in "
                "UTF-8"
            ) from None
        row = invalid_rows[0]
        number = content.count(b"\n", 0, content.find(b"\n" + row.text.encode())) + 2
        raise Refused(
            f"{file}: line {number}: not readable as CSV with {separator!r} between columns: "
            f"{row.actual_columns} cells, and the first line has {row.expected_columns}; a text "
            f"with {separator!r} needs quotation marks around it"
        ) from None


def _decode(content: bytes) -> bytes:
    """A file's text in UTF-8, without a byte order mark. Raises UnicodeDecodeError."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        content = content.decode("utf-16").encode()
    if b"\n" not in content:  # an old Macintosh ends lines otherwise
        content = content.replace(b"\r", b"\n")
    return content.removeprefix(codecs.BOM_UTF8)


def _find_separator(content: bytes) -> tuple[str, int]:
    """The separator, and where the line with the names begins: behind Excel's `sep=;`, if the file has that.

    It is the one that stands as often in the next lines as in the first one; quoted texts do not count.
    """
    declaration = re.match(rb'"?sep=([,;\t|])"?\r?\n', content)
    if declaration:
        return declaration[1].decode(), declaration.end()
    text = content[:_NUM_SAMPLE_BYTES].decode(errors="replace")
    head, *lines = re.sub('"[^"]*"', "", text).split("\n")
    best_separator = _SEPARATORS[0]
    best_score = (-1, -1)
    for separator in _SEPARATORS:
        num_in_head = head.count(separator)
        num_equal = 0
        if num_in_head:
            num_equal = sum(line.count(separator) == num_in_head for line in lines)
        if (num_equal, num_in_head) > best_score:
            best_separator = separator
            best_score = (num_equal, num_in_head)
    return best_separator, 0


def _refuse_swallowed_rows(file: str, table: pa.Table, separator: str, first_line: int) -> None:
    """Raise `Refused` if a cell holds a row that names an image: a quotation mark is not closed."""
    row = rf'\n[^\n]*{IMAGE_NAME}"*\s*({re.escape(separator)}|\n|$)'
    for column in table.columns:
        index = pc.index(pc.match_substring_regex(column, row), True).as_py()
        if index >= 0:
            raise Refused(
                f"{file}: line {first_line + index}: a quotation mark is not closed: a cell holds "
                "the next rows"
            )


def trim(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """A column of texts without spaces around them; empty ones become null."""
    column = pc.utf8_trim_whitespace(column)
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)


def parse_integers(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of texts as int64 if all of them are whole numbers, else as texts; empty ones become null."""
    column = trim(column)
    is_whole = pc.all(pc.match_substring_regex(column, _WHOLE_NUMBER), min_count=1).as_py()
    if not is_whole:
        return column
    return pc.replace_substring_regex(column, r"\..*", "").cast(pa.int64())
