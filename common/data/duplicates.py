"""Duplicates within and between the training and validation images, and the balance of classes, for a dry run.

Exact duplicates have the same bytes, or the same pixels if there are no files. Near duplicates, such as copies of another
size or quality, look the same as thumbnails. Candidates are found by bands of a difference hash, not by comparing all pairs.
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

MOST = 20_000  # images that are read
SECONDS = 60.0  # longest time for reading
_SIDE = 16  # of the thumbnails that are compared, in pixels
_BANDS, _BITS = 8, 16  # of a hash: hashes that differ in fewer bits than there are bands share one
_APART = 3.0  # largest mean difference of two thumbnails that are the same picture, of 255
_ROUGH = 12.0  # least standard deviation of a thumbnail: flat ones all look alike
_BUCKET = 64  # images of a band that are compared with each other at most
_NAMED, _BROKEN = 3, 1_000  # duplicates of a kind, and unreadable images, that are named


def rows(train: Any, val: Any) -> dict[str, str]:
    """Rows of the start table about two sources, `source.Source` or `detection.data.annotated.Annotated`."""
    told = {"balance": _balance(train)} if len(train.classes) > 1 and train.class_counts is not None else {}
    if getattr(train, "fresh", False):
        return told
    return told | _described(train, val)


def _balance(source: Any) -> str:
    counts = source.class_counts
    few, many = int(counts.argmin()), int(counts.argmax())
    ratio = f"{counts[many] / counts[few]:.1f} times as many" if counts[few] else "the first has none"
    return f"{source.classes[few]} has {counts[few]:,}, {source.classes[many]} {counts[many]:,}: {ratio}"


def _described(train: Any, val: Any) -> dict[str, str]:
    shares = len(train) + len(val)
    every = -(-shares // MOST)
    places = [(part, index) for part, source in enumerate((train, val)) for index in range(0, len(source), every)]
    ends, broken = time.monotonic() + SECONDS, {}

    def look(place: tuple[int, int]) -> tuple[bytes, np.ndarray] | None:
        source = (train, val)[place[0]]
        try:
            return _looked(source, place[1]) if time.monotonic() < ends else None
        except BrokenImage as error:
            broken[place] = f"{source.name(place[1])}: {error}"
            return None

    # In a mixed order: if the time is up, what was read is from all over the data.
    order = np.random.default_rng(0).permutation(len(places))
    with ThreadPoolExecutor(cores()) as pool:
        found = list(pool.map(look, [places[number] for number in order]))
    kept = [(places[number], *facts) for number, facts in zip(order, found, strict=True) if facts]
    kept.sort(key=lambda row: row[0])
    parts = np.array([part for (part, _), *_ in kept], np.int64)
    exact = _groups([digest for _, digest, _ in kept])
    near = _near(np.array([thumbnail for *_, thumbnail in kept]).reshape(-1, _SIDE, _SIDE)) - exact
    looked = "" if len(kept) == shares else f" (of {len(kept):,} of {shares:,} images, which were looked at)"
    told = [
        _told(kind, pairs, kept, parts, (train, val)) for kind, pairs in (("exact", exact), ("near", near)) if pairs
    ]
    said = {"duplicates": ("; ".join(told) or "none") + looked}
    names = [text for _, text in sorted(broken.items())]
    more = f"; and {len(names) - _BROKEN:,} more" if len(names) > _BROKEN else ""
    return said | ({"unreadable": f"{len(names):,}: {'; '.join(names[:_BROKEN])}{more}"} if names else {})


def _looked(source: Any, index: int) -> tuple[bytes, np.ndarray]:
    """The hash of an image's bytes or pixels, and its grey thumbnail."""
    content = source.content(index) if hasattr(source, "content") else source.image(index)
    if isinstance(content, (str, os.PathLike)):
        content = read_file(content)
    image = open_rgb(content, reduction=1)
    raw = content if isinstance(content, bytes) else repr(image.size).encode() + image.tobytes()
    small = image.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    return hashlib.blake2b(raw, digest_size=16).digest(), np.asarray(small, np.float32)


def _groups(digests: list[bytes]) -> set[tuple[int, int]]:
    """Pairs of rows with the same digest: each with the first one."""
    first: dict[bytes, int] = {}
    pairs = {(first.setdefault(digest, row), row) for row, digest in enumerate(digests)}
    return {(one, other) for one, other in pairs if one != other}


def _near(thumbnails: np.ndarray) -> set[tuple[int, int]]:
    """Pairs of rows whose thumbnails, float32[n, 16, 16], hardly differ."""
    if not len(thumbnails):
        return set()
    means = thumbnails.reshape(-1, _SIDE // 2, 2, _SIDE // 2, 2).mean((2, 4))  # [n, 8, 8]
    across = means > np.roll(means, 1, 2)
    down = means > np.roll(means, 1, 1)
    bits = np.concatenate([across.reshape(-1, 64), down.reshape(-1, 64)], 1)
    bands = np.packbits(bits.reshape(-1, _BANDS, _BITS), axis=2).astype(np.int64) @ [256, 1]  # [n, 8]
    rough = thumbnails.std((1, 2)) >= _ROUGH
    pairs = set()
    for band in bands.T:
        order = np.flatnonzero(rough)[band[rough].argsort(kind="stable")]
        for rows in np.split(order, np.flatnonzero(np.diff(band[order])) + 1):
            rows = rows[:_BUCKET]
            if len(rows) > 1:
                apart = np.abs(thumbnails[rows][:, None] - thumbnails[rows][None]).mean((2, 3))
                one, other = np.nonzero(np.triu(apart <= _APART, 1))
                pairs |= set(zip(rows[one].tolist(), rows[other].tolist(), strict=True))
    first: dict[int, int] = {}  # of several that look alike, each with the first one
    for one, other in sorted(pairs):
        first.setdefault(other, first.get(one, one))
    return {(one, other) for other, one in first.items()}


def _told(kind: str, pairs: set[tuple[int, int]], kept: list, parts: np.ndarray, sources: tuple) -> str:
    """Such as: `2 exact between train and val (a.png = b.png, ...), 1 within train (...)`."""
    ordered, told = sorted(pairs), []
    sign = "=" if kind == "exact" else "~"
    for where, among in (("between train and val", (0, 1)), ("within train", (0, 0)), ("within val", (1, 1))):
        mine = [pair for pair in ordered if (parts[pair[0]], parts[pair[1]]) == among]
        if mine:
            names = [
                f" {sign} ".join(sources[kept[row][0][0]].name(kept[row][0][1]) for row in pair)
                for pair in mine[:_NAMED]
            ]
            more = ", ..." if len(mine) > _NAMED else ""
            told.append(f"{len(mine):,} {where} ({', '.join(names)}{more})")
    return f"{kind}: {', '.join(told)}"
