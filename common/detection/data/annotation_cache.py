"""Annotation cache: what an earlier start read from a folder, if nothing in the folder has changed since.

Reading COCO's annotations takes many seconds and gigabytes. The columns that come out are kept in a
file in Arrow's format, which later starts and the other processes of a machine map. A file that is
incomplete, or was made from other data or by other code, is not used. If no file can be written, the
data are read as if there were no cache.
"""

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa

from common import files, randomness
from common.data import images
from common.detection.data.annotated import AnnotatedImages, ImageFiles
from common.detection.data.masks import Masks
from common.detection.data.stamps import Stamps, stamps_of

_UNUSED = 30 * 86_400  # seconds after which a file that was not loaded is removed
# The columns depend on this code besides the data: if it has changed, the data are read again.
_ROOMS = [Path(__file__).parent, Path(images.__file__).parent]
_CODE = [Path(files.__file__), Path(randomness.__file__)]
_CODE += [file for room in _ROOMS for file in sorted(room.glob("*.py"))]
_ARRAYS = "category_ids image_ids sizes offsets boxes labels crowd areas truth byte_counts".split()

Parts = tuple[AnnotatedImages, ...]  # to train on and to evaluate on, or only to evaluate on


def file_of(what: object, origin: Path) -> Path | None:
    """The cache of data; None without a home, or without source code to compare.

    `repr(what)` says which data are read and how; `origin` is the file or folder with the annotations.
    """
    with suppress(OSError, RuntimeError):
        return files.cache_folder() / f"{_key(what, origin)}.arrow"
    return None


def keep(file: Path, parts: Parts, seen: Stamps) -> None:
    """Write a cache of `parts`, for which the files in `seen` were looked at, unless they have changed just now."""
    if seen.settled:
        with suppress(OSError, pa.ArrowException):  # such as a full disk: the data have been read all the same
            _write(file, parts, seen)


def _key(what: object, origin: Path) -> str:
    """Name of the file. The stamps of `origin` are part of it: machines that share a home may have different copies."""
    looks = stamps_of("/", pa.array([os.fsencode(origin)], pa.large_binary())).tolist()
    words = [repr(what), looks, np.__version__, pa.__version__, PIL.__version__, os.geteuid()]
    digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=16)
    for file in _CODE:
        digest.update(file.read_bytes())
    return digest.hexdigest()


# ---- the file


def _write(file: Path, parts: Parts, seen: Stamps) -> None:
    """Write the cache to `file`, completely or not at all."""
    columns, arrays, words = {}, {}, {"parts": [], "folders": []}
    for number, part in enumerate(parts):
        arrays |= {f"{number} {name}": getattr(part, name) for name in _ARRAYS}
        columns[f"{number} paths"] = part.images.paths
        if part.masks:
            columns[f"{number} shapes"], arrays[f"{number} turns"] = part.masks.shapes, part.masks.turns
        told = {name: getattr(part, name) for name in ("classes", "notes", "part", "fingerprint")}
        words["parts"].append(told | {"root": part.images.root})
    for number, (folder, paths, looks) in enumerate(seen.groups):
        columns[f"seen {number} paths"], arrays[f"seen {number} stamps"] = paths, looks
        words["folders"].append(folder)
    words["arrays"] = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    for name, array in arrays.items():
        columns[name] = pa.array(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    rows = [pa.LargeListArray.from_arrays(pa.array([0, len(c)], pa.int64()), c) for c in columns.values()]
    batch = pa.RecordBatch.from_arrays(rows, list(columns)).replace_schema_metadata({"words": json.dumps(words)})
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_unused(file.parent)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix="unfinished-")
    try:
        with os.fdopen(handle, "wb") as out:
            with pa.ipc.new_file(out, batch.schema) as writer:
                writer.write_batch(batch)
            out.flush()
            os.fsync(out.fileno())  # otherwise a power failure could leave the name without the content
        os.replace(name, file)
    finally:
        with suppress(OSError):
            os.unlink(name)


def _remove_unused(folder: Path) -> None:
    for file in [*folder.glob("*.arrow"), *folder.glob("unfinished-*")]:
        with suppress(OSError):
            if file.stat().st_mtime < time.time() - _UNUSED:
                file.unlink()


def load(file: Path) -> Parts | None:
    """What `_write` wrote, if it is complete and no file that it was made from has changed."""
    try:
        batch = pa.ipc.open_file(pa.memory_map(str(file))).get_batch(0)
    except (OSError, ValueError):  # no file, no permission, or a name that Arrow can't take
        return None
    with suppress(OSError):
        os.utime(file)  # marks it as used
    columns = {name: batch.column(name).values for name in batch.schema.names}
    words = json.loads(batch.schema.metadata[b"words"])
    for name, (dtype, shape) in words["arrays"].items():
        columns[name] = columns[name].to_numpy().copy().view(dtype).reshape(shape)
    seen = Stamps()
    for number, folder in enumerate(words["folders"]):
        seen.groups.append((folder, columns[f"seen {number} paths"], columns[f"seen {number} stamps"]))
    return tuple(_part(columns, number, entry) for number, entry in enumerate(words["parts"])) if seen.hold() else None


def _part(columns: dict[str, Any], number: int, words: dict) -> AnnotatedImages:
    """One source from the columns. Shapes stay in the mapped file, which processes share; the rest is small, and copied."""
    shapes, paths = columns.get(f"{number} shapes"), columns[f"{number} paths"].to_pylist()
    part = AnnotatedImages(
        classes=tuple(words["classes"]),
        notes=tuple(words["notes"]),
        part=words["part"],
        images=ImageFiles(words["root"], pa.array(paths, pa.large_binary())),
        masks=None if shapes is None else Masks(shapes, columns[f"{number} turns"]),
        **{name: columns[f"{number} {name}"] for name in _ARRAYS},
    )
    vars(part)["fingerprint"] = words["fingerprint"]  # where `cached_property` stores it
    return part
