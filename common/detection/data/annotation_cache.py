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
from common.detection.data.annotated import AnnotatedImages, image_files
from common.detection.data.masks import Masks
from common.detection.data.stamps import Stamps, stamps_of
from common.durable import replace_file

_HEAD = 64  # bytes before the content, for its checksum
_UNUSED = 30 * 86_400  # seconds after which a file that was not loaded is removed
# The columns depend on this code besides the data: if it has changed, the data are read again.
_ROOMS = [Path(__file__).parent, Path(images.__file__).parent]
_CODE = [Path(files.__file__), Path(randomness.__file__)]
_CODE += [file for room in _ROOMS for file in sorted(room.glob("*.py"))]
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
_FACTS = ("classes", "notes", "part", "fingerprint")

Parts = tuple[AnnotatedImages, ...]  # to train on and to evaluate on, or only to evaluate on


def file_of(what: object, origin: Path) -> Path | None:
    """The cache of data; None without a home, or without source code to compare.

    `repr(what)` says which data are read and how; `origin` is the file or folder with the
    annotations. Its stamps are part of the name: machines that share a home may have different
    copies.
    """
    looks = stamps_of("/", encode_paths([origin])).tolist()
    words = [repr(what), looks, np.__version__, pa.__version__, PIL.__version__, os.geteuid()]
    digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=16)
    with suppress(OSError, RuntimeError):
        for file in _CODE:
            digest.update(file.read_bytes())
        return files.get_cache_folder() / f"{digest.hexdigest()}.arrow"
    return None


def keep(file: Path, parts: Parts, seen: Stamps) -> None:
    """Write a cache of `parts`, made from the files in `seen`, unless these have changed just now."""
    if seen.settled:
        with suppress(OSError, pa.ArrowException):  # such as a full disk: the run goes on
            _write(file, parts, seen)


def _write(file: Path, parts: Parts, seen: Stamps) -> None:
    columns: dict[str, Any] = {}
    for number, part in enumerate(parts):
        columns |= {f"{number} {name}": getattr(part, name) for name in _ARRAYS}
        columns[f"{number} paths"] = part.images.paths
        if part.masks:
            columns |= {f"{number} shapes": part.masks.shapes, f"{number} turns": part.masks.turns}
    for number, (_, paths, looks) in enumerate(seen.groups):
        columns |= {f"seen {number} paths": paths, f"seen {number} stamps": looks}
    facts = [
        {name: getattr(part, name) for name in _FACTS} | {"root": part.images.root}
        for part in parts
    ]
    words = json.dumps({"parts": facts, "folders": [folder for folder, *_ in seen.groups]})
    rows = []  # a list of each column: their lengths differ
    for column in columns.values():
        flat = pa.array(column.reshape(-1)) if isinstance(column, np.ndarray) else column
        rows.append(pa.LargeListArray.from_arrays(pa.array([0, len(flat)], pa.int64()), flat))
    batch = pa.RecordBatch.from_arrays(rows, list(columns)).replace_schema_metadata(
        {"words": words}
    )
    content = pa.BufferOutputStream()
    with pa.ipc.new_file(content, batch.schema) as writer:
        writer.write_batch(batch)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for other in file.parent.glob("*.arrow*"):  # also drafts that a kill has left
        with suppress(OSError):
            if other.stat().st_mtime < time.time() - _UNUSED:
                other.unlink()
    data = content.getvalue()
    replace_file(file, _checksum(data) + data.to_pybytes())


def _checksum(data: pa.Buffer) -> bytes:
    """The CRC-32 of `data`, in as many bytes as Arrow aligns its arrays to."""
    return zlib.crc32(data).to_bytes(_HEAD, "little")


def load(file: Path) -> Parts | None:
    """The parts in `file`, if it is complete and no file that it was made from has changed."""
    try:
        files.check_regular(file)
        content = pa.memory_map(str(file)).read_buffer()
        if content[:_HEAD].to_pybytes() != _checksum(content[_HEAD:]):
            return None
        batch = pa.ipc.open_file(content[_HEAD:]).get_batch(0)
    except (OSError, ValueError):  # no file, no permission, or a name that Arrow can't take
        return None
    with suppress(OSError):
        os.utime(file)  # marks it as used
    columns = {name: batch.column(name).values for name in batch.schema.names}
    words = json.loads(batch.schema.metadata[b"words"])
    seen = Stamps()
    for number, folder in enumerate(words["folders"]):
        looks = columns[f"seen {number} stamps"].to_numpy().reshape(-1, 3)
        seen.groups.append((folder, columns[f"seen {number} paths"], looks))
    return (
        tuple(_part(columns, number, facts) for number, facts in enumerate(words["parts"]))
        if seen.hold()
        else None
    )


def _part(columns: dict[str, Any], number: int, facts: dict[str, Any]) -> AnnotatedImages:
    """One source from the columns. Only shapes stay in the mapped file: the rest is small."""

    def array(name: str) -> np.ndarray:
        values = columns[f"{number} {name}"].to_numpy(zero_copy_only=False).copy()
        return values.reshape(-1, _WIDTHS[name]) if name in _WIDTHS else values

    shapes, paths = columns.get(f"{number} shapes"), columns[f"{number} paths"].to_pylist()
    part = AnnotatedImages(
        classes=tuple(facts["classes"]),
        notes=tuple(facts["notes"]),
        part=facts["part"],
        images=image_files(facts["root"], pa.array(paths, pa.large_binary())),
        masks=None if shapes is None else Masks(shapes, array("turns")),
        **{name: array(name) for name in _ARRAYS},  # type: ignore[arg-type]
    )
    vars(part)["fingerprint"] = facts["fingerprint"]  # where `cached_property` stores it
    return part
