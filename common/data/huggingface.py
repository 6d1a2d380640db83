"""Opens tables: Hugging Face data sets from a folder or the Hub, Parquet and CSV files."""

import glob
import logging
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.compute as pc

from common.config.parsing import suggest_path
from common.data.csv_files import read_csv, trim
from common.data.splits import get_split_kind, group_by_split
from common.data.tables import Split, is_text
from common.errors import Refused, describe_error
from common.files import check_regular, is_junk, match_files

HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[\w.-]+))?")


def open_table(data: str, *, has_metadata: bool = False) -> dict[str, Split] | None:
    """The splits of a Hugging Face data set or of CSV files; None for anything else. Raises `Refused`.

    With `has_metadata`, those of a folder of images that metadata.jsonl or metadata.csv describes.
    """
    try:
        rows_by_split = _open_image_folder(data) if has_metadata else _open(data)
        if not rows_by_split:
            return None
        splits = {name: Split(data, name, rows) for name, rows in rows_by_split.items()}
        return _divide_by_column(splits)
    except (Refused, PermissionError):
        raise
    except Exception as error:  # `datasets` and the formats below it raise almost anything
        cause = error if error.__cause__ is None else error.__cause__
        hint = suggest_path(Path(data))
        raise Refused(
            f"--data {data}: can't be read as a Hugging Face data set: {describe_error(cause)}{hint}"
        ) from error


def _open(data: str) -> dict[str, Any] | None:
    """The rows of each split, a `datasets.Dataset`; None if `data` is none of the known formats."""
    path = Path(data).expanduser().absolute()
    if path.is_dir():
        return _open_folder(path)
    openers = {".parquet": _open_parquet, ".csv": _open_csv, ".tsv": _open_csv}
    opener = openers.get(path.suffix.lower())
    if opener:
        files = match_files(str(path))
        return opener(files) if files else None
    if path.exists():
        return None
    hub_name = HUB_NAME.fullmatch(data)
    if not hub_name:
        return None
    return _import_datasets().load_dataset(hub_name["name"], hub_name["config"])


def _open_folder(root: Path) -> dict[str, Any] | None:
    """The splits of a folder of `save_to_disk`, or of one with Parquet files; else None."""
    if (root / "dataset_dict.json").exists() or (root / "state.json").exists():
        check_regular(root)
        saved = _import_datasets().load_from_disk(str(root))
        return saved if isinstance(saved, dict) else {"train": saved}
    if not any(any(root.glob(f"{folder}*.parquet")) for folder in ("", "data/", "train/")):
        return None
    files = []
    for file in root.rglob("*.parquet"):
        if not any(is_junk(name) for name in file.relative_to(root).parts):
            files.append(str(file))
    return _open_parquet(files)


def _open_image_folder(data: str) -> dict[str, Any] | None:
    """See https://huggingface.co/docs/datasets/image_dataset. None without metadata."""
    root = Path(data).expanduser()
    files = list(root.glob("metadata.*")) + list(root.glob("*/metadata.*"))
    if not any(file.suffix in (".jsonl", ".csv") for file in files):
        return None
    check_regular(root)
    return _import_datasets().load_dataset("imagefolder", data_dir=str(root.absolute()))


def _import_datasets() -> ModuleType:
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs errors that it also raises
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _divide_by_column(splits: dict[str, Split]) -> dict[str, Split]:
    """The only split divided by its column `split`, if that names splits; else the splits as they are."""
    if len(splits) > 1:
        return splits
    (undivided,) = splits.values()
    columns = [name for name in undivided.kinds if name.casefold() == "split"]
    if not columns or not is_text(undivided.kinds[columns[0]]):
        return splits
    column = columns[0]
    values = trim(undivided.read_cells(column))
    names = pc.unique(values).to_pylist()
    if not any(get_split_kind(name) for name in names if name):
        return splits
    if values.null_count:
        row = pc.index(values.is_null(), True).as_py()
        problem = f"row {row} has nothing in the column {column}, by which rows are parted"
        raise Refused(f"--data {undivided.data}: {problem}; fill it in")
    rows = undivided.rows.remove_columns(column)
    divided = {}
    for name in names:
        is_in_split = pc.equal(values, name).to_numpy(zero_copy_only=False)
        divided[name] = Split(undivided.data, name, rows.select(np.flatnonzero(is_in_split)))
    return divided


def _open_parquet(files: list[str]) -> dict[str, Any]:
    for file in files:
        check_regular(file)
    rows_by_split = {}
    # Each by itself: one that is not used may have other columns.
    for split, names in group_by_split(sorted(files)).items():
        data_files = {split: [glob.escape(name) for name in names]}
        rows_by_split[split] = _import_datasets().load_dataset(
            "parquet", data_files=data_files, split=split
        )
    return rows_by_split


def _open_csv(files: list[str]) -> dict[str, Any]:
    datasets = _import_datasets()
    rows_by_split = {}
    for split, table in read_csv(group_by_split(sorted(files))).items():
        rows_by_split[split] = datasets.Dataset(datasets.table.InMemoryTable(table))
    return rows_by_split
