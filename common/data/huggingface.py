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

from common.config.parsing import nearest_path
from common.data.csv_files import read_csv, trim
from common.data.splits import get_split_kind, group_by_split
from common.data.tables import Split, is_text
from common.errors import Refused
from common.files import check_regular, is_junk, match_files

HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[\w.-]+))?")


def open_table(data: str, *, has_metadata: bool = False) -> dict[str, Split] | None:
    """The splits of a Hugging Face data set or of CSV files; None for anything else. Raises `Refused`.

    With `has_metadata`, those of a folder of images that metadata.jsonl or metadata.csv describes.
    """
    try:
        opened = _open_image_folder(Path(data).expanduser()) if has_metadata else _open(data)
        return opened and _by_column(
            {name: Split(data, name, rows) for name, rows in opened.items()}
        )
    except (Refused, PermissionError):
        raise
    except Exception as error:  # `datasets` and the formats below it raise almost anything
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        near = nearest_path(Path(data))
        raise Refused(
            f"--data {data}: can't be read as a Hugging Face data set: {reason}{near}"
        ) from error


def _open(data: str) -> dict[str, Any] | None:
    """The rows of each split, a `datasets.Dataset`; None if `data` is neither a Hugging Face data
    set nor CSV.
    """
    path = Path(data).expanduser().absolute()
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            check_regular(path)
            saved = _datasets().load_from_disk(str(path))
            return saved if isinstance(saved, dict) else {"train": saved}
        has_parquet = any(
            file for place in ("", "data/", "train/") for file in path.glob(f"{place}*.parquet")
        )
        names = [file.relative_to(path) for file in path.rglob("*.parquet")]
        files = [str(path / name) for name in names if not any(map(is_junk, name.parts))]
        return _open_parquet(files) if has_parquet else None
    if opener := {".parquet": _open_parquet, ".csv": _open_csv, ".tsv": _open_csv}.get(
        path.suffix.lower()
    ):
        files = match_files(str(path))
        return opener(files) if files else None
    hub = None if path.exists() else HUB_NAME.fullmatch(data)
    return _datasets().load_dataset(hub["name"], hub["config"]) if hub else None


def _open_image_folder(root: Path) -> dict[str, Any] | None:
    """See https://huggingface.co/docs/datasets/image_dataset. None without metadata."""
    files = [*root.glob("metadata.*"), *root.glob("*/metadata.*")]
    if not any(file.suffix in (".jsonl", ".csv") for file in files):
        return None
    check_regular(root)
    return _datasets().load_dataset("imagefolder", data_dir=str(root.absolute()))


def _datasets() -> ModuleType:
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs errors that it also raises
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _by_column(splits: dict[str, Split]) -> dict[str, Split]:
    """The only split divided by its column `split`, if that names parts; else the splits as they are."""
    (first, *others) = splits.values()
    name = next((name for name in first.kinds if name.casefold() == "split"), None)
    if others or name is None or not is_text(first.kinds[name]):
        return splits
    values = trim(first.cells(name))
    found = pc.unique(values).to_pylist()
    if not any(get_split_kind(value) for value in found if value):
        return splits
    if values.null_count:
        row = pc.index(values.is_null(), True).as_py()
        problem = f"row {row} has nothing in the column {name}, by which rows are parted"
        raise Refused(f"--data {first.data}: {problem}; fill it in")
    rows = {
        value: np.flatnonzero(pc.equal(values, value).to_numpy(zero_copy_only=False))
        for value in found
    }
    without = first.rows.remove_columns(name)
    return {
        value: Split(first.data, value, without.select(of_value))
        for value, of_value in rows.items()
    }


def _open_parquet(files: list[str]) -> dict[str, Any]:
    for file in files:
        check_regular(file)
    parts = {}
    # Each by itself: one that is not used may have other columns.
    for part, names in group_by_split(sorted(files)).items():
        data_files = {part: [glob.escape(name) for name in names]}
        parts[part] = _datasets().load_dataset("parquet", data_files=data_files, split=part)
    return parts


def _open_csv(files: list[str]) -> dict[str, Any]:
    datasets, tables = _datasets(), read_csv(group_by_split(sorted(files)))
    return {
        name: datasets.Dataset(datasets.table.InMemoryTable(table))
        for name, table in tables.items()
    }
