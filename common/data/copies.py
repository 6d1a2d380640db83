"""Copies among images: the same path twice, or the same bytes under several names."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from common.data.images import BrokenImage, read_file

# Bytes of so many images, and so many bytes, are compared: about a second.
_MAX_IMAGES = 20_000
_MAX_BYTES = 2**28


def find_copies(*sources: Any) -> np.ndarray:
    """int64[N], of all images of `sources` one after another: the index of the first one that is the same.

    Images are the same if their paths are, or their bytes. Bytes are compared among images of equal size, unless
    these are many. Images in shards are all different.
    """
    numbers = np.arange(sum(map(len, sources)))
    listings = [source.listing() for source in sources]
    if None in listings:
        return numbers
    first_of = numbers.copy()
    sizes = np.concatenate([sizes for _, sizes in listings])
    paths = [paths for paths, _ in listings if paths is not None]
    if len(paths) == len(sources):
        codes = pa.concat_arrays(paths).dictionary_encode(null_encoding="encode").indices.to_numpy()
        _, firsts = np.unique(codes, return_index=True)
        first_of = np.where(sizes < 0, numbers, firsts[codes])

    candidates = np.flatnonzero((first_of == numbers) & (sizes > 0))
    _, size_ids, counts = np.unique(sizes[candidates], return_inverse=True, return_counts=True)
    candidates = candidates[counts[size_ids] > 1]
    if len(candidates) <= _MAX_IMAGES and sizes[candidates].sum() <= _MAX_BYTES:
        indices = candidates.tolist()
        first_by_digest: dict[bytes, int] = {}
        with ThreadPoolExecutor(16) as pool:
            for index, digest in zip(indices, pool.map(partial(_digest, sources), indices), strict=True):
                first_of[index] = first_by_digest.setdefault(digest, index)
    return first_of[first_of]


def _digest(sources: tuple[Any, ...], index: int) -> bytes:
    """A hash of an image's bytes; its own if it can't be read."""
    for source in sources:
        if index < len(source):
            break
        index -= len(source)
    try:
        content = source.content(index)
        return hashlib.blake2b(read_file(content) if isinstance(content, str) else content, digest_size=16).digest()
    except BrokenImage:
        return source.name(index).encode()
