"""Annotation cache: the columns that an earlier start has read, in a file of Arrow that is mapped.

A file that is damaged, or was made from other data or by other code, is not used.
"""

import hashlib
import json
import os
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa

from common import files, randomness
from common.data import images
from common.data.source import encode_paths
from common.detection.data.annotated import AnnotatedImages, build_image_files
from common.detection.data.file_stats import FileStats, read_stats
from common.detection.data.masks import Masks
from common.durable import replace_file

_HEAD_SIZE = 64  # bytes before the content, for its checksum
_MAX_AGE = 30 * 86_400  # seconds after which a file that was not loaded is removed
# The columns depend on this code besides the data: if it has changed, the data are read again.
_CODE_FILES = [Path(files.__file__), Path(randomness.__file__)]
_CODE_FILES += sorted(Path(__file__).parent.glob("*.py"))
_CODE_FILES += sorted(Path(images.__file__).parent.glob("*.py"))
_WIDTHS = {"sizes": 2, "boxes": 4, "truth": 4}  # numbers per row of the arrays that have several
_ARRAYS = (
    "category_ids",
    "image_ids",
    "offsets",
    "labels",
    "crowd",
    "areas",
    "byte_counts",
    *_WIDTHS,
)
_METADATA = ("classes", "notes", "split_text", "fingerprint")

Sources = tuple[AnnotatedImages, ...]  # to train on and to evaluate on, or only to evaluate on


def get_cache_file(identity: object, origin: Path) -> Path | None:
    """The cache of data; None without a home, or without source code to compare.

    `repr(identity)` says which data are read and how; `origin` is the file or folder with the
    annotations. Its stats are part of the name: machines that share a home may have different
    copies.
    """
    stats = read_stats("/", encode_paths([origin])).tolist()
    versions = [np.__version__, pa.__version__, PIL.__version__]
    parts = [repr(identity), stats] + versions + [os.geteuid()]
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16)
    with suppress(OSError, RuntimeError):
        for file in _CODE_FILES:
            digest.update(file.read_bytes())
        return files.get_cache_folder() / f"{digest.hexdigest()}.arrow"
    return None


def save(file: Path, sources: Sources, stats: FileStats) -> None:
    """Cache `sources`, made from the files in `stats`, unless these have changed just now."""
    if stats.is_settled:
        with suppress(OSError, pa.ArrowException):  # such as a full disk: the run goes on
            content = _serialize(sources, stats)
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_old_files(file.parent)
            replace_file(file, _compute_checksum(content) + content.to_pybytes())


def _serialize(sources: Sources, stats: FileStats) -> pa.Buffer:
    """One row, with a list of each column: their lengths differ."""
    columns: dict[str, Any] = {}
    metadata = []
    for i, source in enumerate(sources):
        for name in _ARRAYS:
            columns[f"{i} {name}"] = getattr(source, name)
        columns[f"{i} paths"] = source.images.paths
        if source.masks:
            columns[f"{i} shapes"] = source.masks.shapes
            columns[f"{i} orientations"] = source.masks.orientations
        values = {name: getattr(source, name) for name in _METADATA}
        metadata.append(values | {"root": source.images.root})
    folders = []
    for i, (folder, paths, folder_stats) in enumerate(stats.groups):
        columns[f"read {i} paths"] = paths
        columns[f"read {i} stats"] = folder_stats
        folders.append(folder)
    lists = []
    for column in columns.values():
        flat = pa.array(column.reshape(-1)) if isinstance(column, np.ndarray) else column
        offsets = pa.array([0, len(flat)], pa.int64())
        lists.append(pa.LargeListArray.from_arrays(offsets, flat))
    text = json.dumps({"sources": metadata, "folders": folders})
    batch = pa.RecordBatch.from_arrays(lists, list(columns))
    batch = batch.replace_schema_metadata({"metadata": text})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _remove_old_files(folder: Path) -> None:
    for file in folder.glob("*.arrow*"):  # also drafts that a kill has left
        with suppress(OSError):
            if file.stat().st_mtime < time.time() - _MAX_AGE:
                file.unlink()


def _compute_checksum(content: pa.Buffer) -> bytes:
    """The CRC-32 of `content`, in as many bytes as Arrow aligns its arrays to."""
    return zlib.crc32(content).to_bytes(_HEAD_SIZE, "little")


def load(file: Path) -> Sources | None:
    """The sources in `file`, if it is complete and no file that they were made from has changed."""
    try:
        files.check_regular(file)
        buffer = pa.memory_map(str(file)).read_buffer()
        content = buffer[_HEAD_SIZE:]
        if buffer[:_HEAD_SIZE].to_pybytes() != _compute_checksum(content):
            return None
        batch = pa.ipc.open_file(content).get_batch(0)
    except (OSError, ValueError):  # no file, no permission, or a name that Arrow can't take
        return None
    with suppress(OSError):
        os.utime(file)  # marks it as used
    columns = {name: batch.column(name).values for name in batch.schema.names}
    metadata = json.loads(batch.schema.metadata[b"metadata"])
    stats = FileStats()
    for i, folder in enumerate(metadata["folders"]):
        folder_stats = columns[f"read {i} stats"].to_numpy().reshape(-1, 3)
        stats.groups.append((folder, columns[f"read {i} paths"], folder_stats))
    if not stats.are_current():
        return None
    return tuple(_build_source(columns, i, values) for i, values in enumerate(metadata["sources"]))


def _build_source(columns: dict[str, Any], index: int, metadata: dict[str, Any]) -> AnnotatedImages:
    """One source from the columns. Only shapes stay in the mapped file: the others are small."""

    def copy_array(name: str) -> np.ndarray:
        values = columns[f"{index} {name}"].to_numpy(zero_copy_only=False).copy()
        return values.reshape(-1, _WIDTHS[name]) if name in _WIDTHS else values

    paths = pa.array(columns[f"{index} paths"].to_pylist(), pa.large_binary())
    masks = None
    shapes = columns.get(f"{index} shapes")
    if shapes is not None:
        masks = Masks(shapes, copy_array("orientations"))
    source = AnnotatedImages(
        classes=tuple(metadata["classes"]),
        notes=tuple(metadata["notes"]),
        split_text=metadata["split_text"],
        images=build_image_files(metadata["root"], paths),
        masks=masks,
        **{name: copy_array(name) for name in _ARRAYS},  # type: ignore[arg-type]
    )
    vars(source)["fingerprint"] = metadata["fingerprint"]  # where `cached_property` stores it
    return source
