"""Duplicates among images: of the same path or bytes; for a dry run, also images that are alike as
thumbnails.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from common.data.images import BrokenImage, read_file

LIMIT = 10_000  # images that are read: about a minute on one core
_SIDE = 16  # of the thumbnails that are compared, in pixels
# Largest difference of two thumbnails that are the same picture: root mean square, of 255.
_APART = 4.0
# Smallest standard deviation of a thumbnail: flat ones all look alike, only their bytes are
# compared.
_ROUGH = 12.0
_AT_ONCE = 256  # thumbnails that are compared with all others at a time
_NAMED, _BROKEN = 3, 1_000  # pairs of duplicates, and unreadable images, that are named

# Bytes of so many images, and so many bytes, are compared: about a second.
_MAX_IMAGES = 20_000
_MAX_BYTES = 2**28


def find_copies(*sources: Any) -> np.ndarray:
    """int64[N], of all images of `sources` one after another: the index of the first one that is the same.

    Images are the same if their paths are, or their bytes. Bytes are compared among images of equal
    size, unless these are many. Images in shards are all different.
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
            for index, digest in zip(
                indices, pool.map(partial(_digest, sources), indices), strict=True
            ):
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
        return hashlib.blake2b(
            read_file(content) if isinstance(content, str) else content, digest_size=16
        ).digest()
    except BrokenImage:
        return source.name(index).encode()


# ---- of a dry run


def rows(train: Any, val: Any) -> dict[str, str]:
    """Rows of the start table about two sources."""
    # Imported late, since it imports torch.
    from common.distributed.environment import cores

    if train.fresh:
        return {}
    sources = train, val
    places = [(part, index) for part, source in enumerate(sources) for index in range(len(source))]
    count = len(places)
    every = -(-count // LIMIT)
    broken: dict[tuple[int, int], str] = {}
    # 0 for train or 1 for val, and the index there -> grey thumbnail.
    seen: dict[tuple[int, int], np.ndarray] = {}

    def look(place: tuple[int, int]) -> None:
        source, index = sources[place[0]], place[1]
        try:
            grey = source.image(index).convert("L")
            seen[place] = np.asarray(grey.resize((_SIDE, _SIDE), Image.Resampling.BOX), np.float32)
        except BrokenImage as error:
            broken[place] = f"{source.name(index)}: {error}"

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(look, places[::every]))
    looked_at = sorted(seen)
    alike = _alike(np.array([seen[place] for place in looked_at]).reshape(-1, _SIDE**2))
    # Flat pictures, too, are duplicates if their files are equal.
    first_of = {
        place: places[first] for place, first in zip(places, find_copies(train, val), strict=True)
    }
    first_of |= {looked_at[other]: looked_at[first] for first, other in alike}
    pairs = sorted(
        (first, other)
        for other, first in first_of.items()
        if first != other and other not in broken
    )
    texts = []
    for where, parts in (
        ("between train and val", (0, 1)),
        ("within train", (0, 0)),
        ("within val", (1, 1)),
    ):
        mine = [pair for pair in pairs if tuple(part for part, _ in pair) == parts]
        named = [
            " ~ ".join(sources[part].name(index) for part, index in pair) for pair in mine[:_NAMED]
        ]
        texts += (
            [f"{len(mine):,} {where} ({', '.join(named)}{', ...' * (len(mine) > _NAMED)})"]
            if mine
            else []
        )
    limited = (
        ""
        if len(seen) == count
        else f" (of {len(seen):,} of {count:,} images, which were looked at)"
    )
    names = [text for _, text in sorted(broken.items())]
    more = f"; and {len(names) - _BROKEN:,} more" if len(names) > _BROKEN else ""
    unreadable = (
        {"unreadable": f"{len(names):,}: {'; '.join(names[:_BROKEN])}{more}"} if names else {}
    )
    return {"duplicates": (", ".join(texts) or "none") + limited} | unreadable


def _alike(thumbnails: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of rows of float32[n, 256] that hardly differ: each row with the first one that is like it."""
    rough = np.flatnonzero(thumbnails.std(1) >= _ROUGH)
    pixels, numbers = thumbnails[rough] - 128, np.arange(len(rough))
    squares, first = (pixels**2).sum(1), numbers.copy()
    for start in range(0, len(rough), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        # Sums of squared differences, [256, n]
        apart = squares[some, None] + squares - 2 * pixels[some] @ pixels.T
        alike = (apart <= _SIDE**2 * _APART**2) & (numbers > numbers[some, None])
        new = alike.any(0) & (first == numbers)
        first[new] = start + alike.argmax(0)[new]
    return sorted(
        (int(rough[one]), int(rough[other])) for other, one in enumerate(first) if one != other
    )
