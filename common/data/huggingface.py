"""Opens tables: Hugging Face data sets from a folder or the Hub, Parquet and CSV files."""

import glob
import logging
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.config.parsing import nearest_path
from common.data.csv_files import read_csv
from common.data.splits import kind_of, start_of
from common.data.tables import Split, is_list, is_text, listed
from common.errors import Refused
from common.files import check_regular

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[\w.-]+))?")
_HUB_TIMEOUT = 5.0  # seconds until the Hub counts as unreachable; `datasets` alone would retry for 23 s and more
_SMALL = 2**26  # bytes of a Parquet file up to which it is read to find values that are stored once and repeated
_ROOM, _TIMES = 2**30, 100  # bytes that a file's rows may always take, and how many times the file's own size

Opened = dict[str, Any]  # name of each split -> datasets.Dataset


def open_table(data: str) -> dict[str, Split] | None:
    """The splits of a Hugging Face data set or of CSV files; None for anything else. Raises `Refused`."""
    if not (opener := _opener(data)):
        return None
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs errors that it also raises
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        return _by_column({name: Split(data, name, rows) for name, rows in opener().items()})
    except (Refused, PermissionError):
        raise
    except Exception as error:  # `datasets` and the formats below it raise almost anything
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise Refused(f"--data {data}: can't be read as a Hugging Face data set: {reason}") from error


def _opener(data: str) -> Callable[[], Opened] | None:
    """The function that opens `data`; None if it is neither a Hugging Face data set nor CSV."""
    path = Path(data).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return partial(_open_saved, path)
        has_parquet = any(file for place in ("", "data/", "train/") for file in path.glob(f"{place}*.parquet"))
        return partial(_open_parquet, path, sorted(path.rglob("*.parquet"))) if has_parquet else None
    if opener := {".parquet": _open_parquet, ".csv": _open_csv, ".tsv": _open_csv}.get(path.suffix.lower()):
        files = sorted(Path(file) for file in glob.glob(str(path)))
        return partial(opener, path.parent, files) if files else None
    hub = None if path.exists() else _HUB_NAME.fullmatch(data)
    return partial(_open_hub, hub["name"], hub["config"]) if hub else None


def _by_column(splits: dict[str, Split]) -> dict[str, Split]:
    """The only split divided by its column `split`, if that names parts; else the splits as they are."""
    (first, *others) = splits.values()
    name = next((name for name in first.kinds if name.casefold() == "split"), None)
    if others or name is None or not is_text(first.kinds[name]):
        return splits
    values = first.cells(name)
    found = pc.unique(values).to_pylist()
    if not any(kind_of(value) for value in found if value):
        return splits
    if values.null_count:
        row = pc.index(values.is_null(), True).as_py()
        problem = f"row {row} has nothing in the column {name}, by which rows are parted"
        raise Refused(f"--data {first.data}: {problem}; fill it in")
    rows = {value: np.flatnonzero(pc.equal(values, value).to_numpy(zero_copy_only=False)) for value in found}
    without = first.rows.remove_columns(name)
    return {value: Split(first.data, value, without.select(of_value)) for value, of_value in rows.items()}


# ---- files


def _open_saved(path: Path) -> Opened:
    import datasets

    check_regular(path)
    saved = datasets.load_from_disk(str(path))
    return saved if isinstance(saved, dict) else {"train": saved}


def _open_parquet(folder: Path, files: list[Path]) -> Opened:
    import datasets

    places = {name: [str(file.absolute()) for file in its] for name, its in _splits_of(folder, files).items()}
    for file in files:
        _refuse_bomb(file)
    return datasets.load_dataset("parquet", data_files=places)


def _open_csv(folder: Path, files: list[Path]) -> Opened:
    import datasets

    splits = _splits_of(folder, files)
    tables = dict(zip(files, read_csv(files), strict=True))
    joined = {name: pa.concat_tables(tables[file] for file in its) for name, its in splits.items()}
    return {name: datasets.Dataset(datasets.table.InMemoryTable(table)) for name, table in joined.items()}


def _splits_of(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """The files of each split: the one that a file's name or folder begins with, as in `val-0000` and `test/0000`."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        check_regular(file)
        words = (file.stem, *file.relative_to(folder).parts[:-1]) if len(files) > 1 else ()
        splits.setdefault(next(filter(None, map(start_of, words)), "train"), []).append(file)
    return splits


def _refuse_bomb(file: Path) -> None:
    """Raise `Refused` for a file whose rows take far more room than images could.

    Values that are stored once and repeated are looked up only in files up to `_SMALL`, since that reads the file.
    """
    import pyarrow.parquet as pq

    size, facts, unpacked = file.stat().st_size, pq.read_metadata(file), 0
    check_room(str(file), size, facts)
    texts = [column.path for column in leaves(facts) if column.physical_type == "BYTE_ARRAY"]
    reader = pq.ParquetFile(file, read_dictionary=texts)
    for number in range(facts.num_row_groups if size <= _SMALL else 0):  # Arrow can't join dictionaries in lists
        unpacked += unpacked_bytes(reader.read_row_group(number, columns=texts, use_threads=False))
        check_room(str(file), size, facts, unpacked)


def leaves(facts: "pq.FileMetaData") -> list["pq.ColumnSchema"]:
    """The columns of a Parquet file, of a structure its fields."""
    return [facts.schema.column(number) for number in range(facts.num_columns)]


def check_room(name: str, size: int, facts: "pq.FileMetaData", unpacked: int = 0) -> None:
    """Raise `Refused` if the rows of a file of `size` bytes take far more: images are compressed already.

    Columns that hold numbers of rows are counted as 8 bytes each. `unpacked`: what some columns were found to take.
    """
    sizes = [facts.row_group(number).total_byte_size for number in range(facts.num_row_groups)]
    needed = max(sum(sizes), 8 * facts.num_rows, unpacked) if min(sizes, default=0) >= 0 else 2**63
    if needed > max(_ROOM, _TIMES * size):
        found = f"its rows take {needed / 2**30:,.1f} GiB or more, and the file {size / 2**20:,.1f} MiB"
        raise Refused(f"{name}: {found}: images don't shrink so much; write one image into each row")


def unpacked_bytes(column: pa.Array | pa.Table) -> int:
    """Bytes that the values of a column, or of all columns, take once each repeated one is written out."""
    if isinstance(column, pa.Table):
        return sum(unpacked_bytes(chunk) for one in column.columns for chunk in one.chunks)
    if pa.types.is_struct(column.type):
        return sum(map(unpacked_bytes, column.flatten()))
    if is_list(column.type):
        return unpacked_bytes(column.flatten())
    if not pa.types.is_dictionary(column.type):
        return column.nbytes
    return pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0


# ---- the Hub


def hub_shards(data: str) -> dict[str, list[str]]:
    """The names of the shards of each split of a data set on the Hub, which stay there. Raises `Refused`."""
    import datasets

    named = _HUB_NAME.fullmatch(data)
    if not named or Path(data).expanduser().exists():
        raise Refused(
            f"--streaming: --data {data} is no name on the Hugging Face Hub, such as owner/name; leave it out"
        )
    try:
        files = datasets.load_dataset_builder(named["name"], named["config"]).config.data_files or {}
    except Exception as error:  # the client's HTTP library raises errors of its own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Refused(f"--data {data}: can't be found on the Hugging Face Hub: {reason}") from error
    found = {str(split): sorted(map(str, names)) for split, names in files.items()}
    kinds = {Path(name).suffix or name for names in found.values() for name in names}
    if len(kinds) != 1 or not kinds <= {".parquet", ".tar"}:
        has = listed(sorted(kinds)) or "no files"
        raise Refused(f"--streaming: --data {data} has {has}, not Parquet or tars; leave it out to download them")
    return found


def _open_hub(name: str, config: str | None) -> Opened:
    """The splits of a data set on the Hub. If the Hub does not answer one short request, the local cache is used."""
    import datasets
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    start = f"--data {name}: nothing of this name is here or"
    why = "offline mode is on" if constants.is_offline_mode() else ""
    try:
        if not why:
            HfApi().dataset_info(name, timeout=_HUB_TIMEOUT)
    except RepositoryNotFoundError as error:
        advice = "check the spelling, or run `hf auth login` if it is private"
        raise Refused(f"{start} on the Hugging Face Hub; {advice}") from error
    except Exception as error:  # the client's HTTP library raises errors of its own
        why = " ".join(str(error).split()) or type(error).__name__
    if not why:
        return datasets.load_dataset(name, config)
    before = constants.HF_HUB_OFFLINE
    try:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
        return datasets.load_dataset(name, config)
    except (ConnectionError, FileNotFoundError) as error:
        raise Refused(
            f"{start} in the cache of the Hugging Face Hub, which can't be reached ({why}); give an existing folder, "
            f"or download the data set first{nearest_path(Path(name))}"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = before
