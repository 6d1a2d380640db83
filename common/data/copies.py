"""Copies among images: the same path twice, or the same bytes under several names."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from common.data.images import BrokenImage
from common.files import open_regular
from common.randomness import key_of

_MAX_COMPARED = 20_000  # images whose bytes are read
_MAX_BYTES = 2**30
_TAIL = 2**12  # bytes at an image's end, which are pixels in most formats: files of equal size rarely have them alike


def find_copies(sources: Sequence[Any]) -> np.ndarray:
    """int64[N], of all images of `sources` one after another: the index of the first one that is the same.

    Images are the same if their paths are, or their bytes. Bytes are compared among images of equal size, if these
    are at most `_MAX_COMPARED`. Images without such a list, as those in shards, are all different.
    """
    counts = [len(source) for source in sources]
    ends = np.cumsum(counts)
    starts = ends - counts
    indices = np.arange(ends[-1])
    listings = [source.listing() for source in sources]
    if None in listings:
        return indices
    first_of = indices
    sizes = np.concatenate([sizes for _, sizes in listings])
    paths = [paths for paths, _ in listings if paths is not None]
    if len(paths) == len(sources):
        codes = pa.concat_arrays(paths).dictionary_encode(null_encoding="encode").indices.to_numpy()
        _, firsts = np.unique(codes, return_index=True)
        first_of = np.where(sizes < 0, indices, firsts[codes])

    candidates = np.flatnonzero((first_of == indices) & (sizes > 0))
    candidates = candidates[_is_repeated(sizes[candidates])]
    if len(candidates) > _MAX_COMPARED:
        return first_of

    parts = np.searchsorted(ends, candidates, side="right")
    for num_bytes in (_TAIL, _MAX_BYTES):
        images = [(sources[part], index - starts[part]) for part, index in zip(parts, candidates, strict=True)]
        with ThreadPoolExecutor(16) as pool:
            hashes = np.array(list(pool.map(partial(_hash_end, num_bytes), images)), np.uint64)
        is_repeated = _is_repeated(hashes)
        candidates = candidates[is_repeated]
        parts = parts[is_repeated]
        hashes = hashes[is_repeated]
    _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    same_bytes = indices.copy()
    same_bytes[candidates] = candidates[firsts][inverse]
    return same_bytes[first_of]


def _is_repeated(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return counts[inverse] > 1


def _hash_end(num_bytes: int, image: tuple[Any, int]) -> int:
    """64 bits of the size and the last `num_bytes` of an image, a source and an index; its own if it can't be read."""
    source, index = image
    try:
        content = source.content(index)
        if isinstance(content, str):
            with open_regular(content) as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - num_bytes))
                content = file.read(num_bytes)
        else:
            size = len(content)
        digest = hashlib.blake2b(content[-num_bytes:], digest_size=8, salt=size.to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little")
    except (OSError, BrokenImage):
        return key_of("unreadable", source.name(index))
