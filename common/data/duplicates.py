"""Duplicates within and between training and validation images, for a dry run.

Exact duplicates have the same bytes, or the same pixels if there are no files. Near duplicates, such as copies of another
size or quality, look the same as thumbnails.
"""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image

from common.data.images import BrokenImage, open_rgb, read_file
from common.distributed.environment import cores

LIMIT = 20_000  # images that are read
SECONDS = 60.0  # longest time for reading
_SIDE = 16  # of the thumbnails that are compared, in pixels
_APART = 4.0  # largest difference of two thumbnails that are the same picture: root mean square, of 255
_ROUGH = 12.0  # smallest standard deviation of a thumbnail: flat ones all look alike
_AT_ONCE = 256  # thumbnails that are compared with all others at a time
_NAMED, _BROKEN = 3, 1_000  # duplicates of a kind, and unreadable images, that are named

Place = tuple[int, int]  # 0 for train or 1 for val, and the index there


def rows(train: Any, val: Any) -> dict[str, str]:
    """Rows of the start table about two sources, `source.Source` or `detection.data.annotated.Annotated`."""
    if getattr(train, "fresh", False):
        return {}
    sources = train, val
    count = sum(map(len, sources))
    every = -(-count // LIMIT)
    places = [(part, index) for part, source in enumerate(sources) for index in range(0, len(source), every)]
    ends, seen, broken = time.monotonic() + SECONDS, {}, {}

    def look(place: Place) -> None:
        source, index = sources[place[0]], place[1]
        try:
            if time.monotonic() < ends:
                seen[place] = _look(source, index)
        except BrokenImage as error:
            broken[place] = f"{source.name(index)}: {error}"

    # In a mixed order: if the time is up, the images that were read are from all over the data.
    order = np.random.default_rng(0).permutation(len(places))
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(look, [places[number] for number in order]))
    places = sorted(seen)
    exact = _exact([seen[place][0] for place in places])
    near = _near(np.array([seen[place][1] for place in places]).reshape(-1, _SIDE**2)) - exact
    found = "; ".join(
        f"{kind}: {', '.join(_described(pairs, sign, places, sources))}"
        for kind, pairs, sign in (("exact", exact, "="), ("near", near, "~"))
        if pairs
    )
    limited = "" if len(seen) == count else f" (of {len(seen):,} of {count:,} images, which were looked at)"
    names = [text for _, text in sorted(broken.items())]
    more = f"; and {len(names) - _BROKEN:,} more" if len(names) > _BROKEN else ""
    unreadable = {"unreadable": f"{len(names):,}: {'; '.join(names[:_BROKEN])}{more}"} if names else {}
    return {"duplicates": (found or "none") + limited} | unreadable


def _look(source: Any, index: int) -> tuple[bytes, np.ndarray]:
    """The hash of an image's bytes or pixels, and its grey thumbnail, float32[16, 16]."""
    content = source.content(index) if hasattr(source, "content") else source.image(index)
    if isinstance(content, (str, os.PathLike)):
        content = read_file(content)
    image = open_rgb(content)
    raw = content if isinstance(content, bytes) else repr(image.size).encode() + image.tobytes()
    small = image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    return hashlib.blake2b(raw, digest_size=16).digest(), np.asarray(small, np.float32)


def _exact(digests: list[bytes]) -> set[tuple[int, int]]:
    """Pairs of rows with the same digest: each with the first one."""
    first: dict[bytes, int] = {}
    pairs = {(first.setdefault(digest, row), row) for row, digest in enumerate(digests)}
    return {(one, other) for one, other in pairs if one != other}


def _near(thumbnails: np.ndarray) -> set[tuple[int, int]]:
    """Pairs of rows of float32[n, 256] that hardly differ: each with the first one."""
    rough = np.flatnonzero(thumbnails.std(1) >= _ROUGH)
    pixels, numbers = thumbnails[rough] - 128, np.arange(len(rough))
    squares, first = (pixels**2).sum(1), numbers.copy()
    for start in range(0, len(rough), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        apart = squares[some, None] + squares - 2 * pixels[some] @ pixels.T  # sums of squared differences, [256, n]
        alike = (apart <= _SIDE**2 * _APART**2) & (numbers > numbers[some, None])
        new = alike.any(0) & (first == numbers)
        first[new] = start + alike.argmax(0)[new]
    return {(int(rough[one]), int(rough[other])) for other, one in enumerate(first) if one != other}


def _described(pairs: set[tuple[int, int]], sign: str, places: list[Place], sources: tuple[Any, Any]) -> list[str]:
    """Such as: `2 between train and val (a.png = b.png, ...)`, `1 within train (...)`."""
    texts = []
    for where, parts in (("between train and val", (0, 1)), ("within train", (0, 0)), ("within val", (1, 1))):
        mine = [pair for pair in sorted(pairs) if tuple(places[row][0] for row in pair) == parts]
        named = [[places[row] for row in pair] for pair in mine[:_NAMED]]
        names = [f" {sign} ".join(sources[part].name(index) for part, index in pair) for pair in named]
        if mine:
            texts.append(f"{len(mine):,} {where} ({', '.join(names)}{', ...' if len(mine) > _NAMED else ''})")
    return texts
