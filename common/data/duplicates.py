"""Duplicates within and between training and validation images, for a dry run.

Exact duplicates have the same bytes, or the same pixels if there are no files. Near duplicates, such as copies of another
size or quality, look the same as thumbnails. Candidates are found by bands of a difference hash, not by comparing all pairs.
"""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from common.data.images import BrokenImage, open_rgb, read_file
from common.distributed.environment import cores

LIMIT = 20_000  # images that are read
SECONDS = 60.0  # longest time for reading
_SIDE = 16  # of the thumbnails that are compared, in pixels
_BANDS, _BITS = 8, 16  # of a hash: hashes that differ in fewer bits than there are bands share one
_APART = 3.0  # largest mean difference of two thumbnails that are the same picture, of 255
_ROUGH = 12.0  # smallest standard deviation of a thumbnail: flat ones all look alike
_BUCKET = 64  # images of a band that are compared with each other, at most
_NAMED, _BROKEN = 3, 1_000  # duplicates of a kind, and unreadable images, that are named


class _Seen(NamedTuple):
    place: tuple[int, int]  # 0 for train or 1 for val, and the index there
    digest: bytes  # of the bytes or pixels
    thumbnail: np.ndarray  # float32[16, 16]


def rows(train: Any, val: Any) -> dict[str, str]:
    """Rows of the start table about two sources, `source.Source` or `detection.data.annotated.Annotated`."""
    if getattr(train, "fresh", False):
        return {}
    sources = train, val
    count = sum(map(len, sources))
    every = -(-count // LIMIT)
    places = [(part, index) for part, source in enumerate(sources) for index in range(0, len(source), every)]
    ends, broken = time.monotonic() + SECONDS, {}

    def look(place: tuple[int, int]) -> _Seen | None:
        source, index = sources[place[0]], place[1]
        try:
            return _Seen(place, *_look(source, index)) if time.monotonic() < ends else None
        except BrokenImage as error:
            broken[place] = f"{source.name(index)}: {error}"
            return None

    # In a mixed order: if the time is up, the images that were read are from all over the data.
    order = np.random.default_rng(0).permutation(len(places))
    with ThreadPoolExecutor(cores()) as pool:
        seen = sorted(filter(None, pool.map(look, [places[number] for number in order])), key=lambda image: image.place)
    exact = _exact([image.digest for image in seen])
    near = _near(np.array([image.thumbnail for image in seen]).reshape(-1, _SIDE, _SIDE)) - exact
    found = "; ".join(
        f"{kind}: {', '.join(_described(pairs, sign, seen, sources))}"
        for kind, pairs, sign in (("exact", exact, "="), ("near", near, "~"))
        if pairs
    )
    limited = "" if len(seen) == count else f" (of {len(seen):,} of {count:,} images, which were looked at)"
    names = [text for _, text in sorted(broken.items())]
    more = f"; and {len(names) - _BROKEN:,} more" if len(names) > _BROKEN else ""
    unreadable = {"unreadable": f"{len(names):,}: {'; '.join(names[:_BROKEN])}{more}"} if names else {}
    return {"duplicates": (found or "none") + limited} | unreadable


def _look(source: Any, index: int) -> tuple[bytes, np.ndarray]:
    """The hash of an image's bytes or pixels, and its grey thumbnail."""
    content = source.content(index) if hasattr(source, "content") else source.image(index)
    if isinstance(content, (str, os.PathLike)):
        content = read_file(content)
    image = open_rgb(content, reduction=1)
    raw = content if isinstance(content, bytes) else repr(image.size).encode() + image.tobytes()
    small = image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    return hashlib.blake2b(raw, digest_size=16).digest(), np.asarray(small, np.float32)


def _exact(digests: list[bytes]) -> set[tuple[int, int]]:
    """Pairs of rows with the same digest: each with the first one."""
    first: dict[bytes, int] = {}
    pairs = {(first.setdefault(digest, row), row) for row, digest in enumerate(digests)}
    return {(one, other) for one, other in pairs if one != other}


def _near(thumbnails: np.ndarray) -> set[tuple[int, int]]:
    """Pairs of rows whose thumbnails float32[n, 16, 16] hardly differ: each with the first one."""
    means = thumbnails.reshape(-1, _SIDE // 2, 2, _SIDE // 2, 2).mean((2, 4))  # [n, 8, 8]
    across, down = means > np.roll(means, 1, 2), means > np.roll(means, 1, 1)
    bits = np.concatenate([across.reshape(-1, 64), down.reshape(-1, 64)], 1)
    bands = np.packbits(bits.reshape(-1, _BANDS, _BITS), axis=2).astype(np.int64) @ [256, 1]  # [n, 8]
    rough = np.flatnonzero(thumbnails.std((1, 2)) >= _ROUGH)
    pairs = set()
    for band in bands[rough].T:
        order = rough[band.argsort(kind="stable")]
        ends = np.flatnonzero(np.diff(np.sort(band, kind="stable"))) + 1
        for alike in np.split(order, ends):
            alike = alike[:_BUCKET]
            apart = np.abs(thumbnails[alike][:, None] - thumbnails[alike][None]).mean((2, 3))
            one, other = np.nonzero(np.triu(apart <= _APART, 1))
            pairs |= set(zip(alike[one].tolist(), alike[other].tolist(), strict=True))
    first: dict[int, int] = {}
    for one, other in sorted(pairs):
        first.setdefault(other, first.get(one, one))
    return {(one, other) for other, one in first.items()}


def _described(pairs: set[tuple[int, int]], sign: str, seen: list[_Seen], sources: tuple[Any, Any]) -> list[str]:
    """Such as: `2 between train and val (a.png = b.png, ...)`, `1 within train (...)`."""
    texts = []
    for where, parts in (("between train and val", (0, 1)), ("within train", (0, 0)), ("within val", (1, 1))):
        mine = [pair for pair in sorted(pairs) if tuple(seen[row].place[0] for row in pair) == parts]
        places = [[seen[row].place for row in pair] for pair in mine[:_NAMED]]
        names = [f" {sign} ".join(sources[part].name(index) for part, index in pair) for pair in places]
        if mine:
            texts.append(f"{len(mine):,} {where} ({', '.join(names)}{', ...' if len(mine) > _NAMED else ''})")
    return texts
