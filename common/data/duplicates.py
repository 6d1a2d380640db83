"""Duplicates among images: of the same path or bytes; for a dry run, also of similar thumbnails."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from PIL import Image

from common.data.batch_plan import ceil_div
from common.data.images import BrokenImage, read_file

MAX_THUMBNAILS = 10_000  # images that are read: about a minute on one core
_SIDE = 16  # of a thumbnail, in pixels
_MAX_DIFFERENCE = 4.0  # of two thumbnails of the same picture: root mean square, of 255
# Smallest standard deviation of a thumbnail: flat ones all look the same, only their bytes are
# compared.
_MIN_DEVIATION = 12.0
_CHUNK_SIZE = 256  # thumbnails that are compared with all others at a time
_MAX_NAMED_PAIRS = 3
_MAX_NAMED_BROKEN = 1_000

# Bytes of so many images, and so many bytes, are compared: about a second.
_MAX_IMAGES = 20_000
_MAX_BYTES = 2**28


def find_copies(*sources: Any) -> np.ndarray:
    """int64[N], of all images of `sources` one after another: the index of the first one that is the same.

    Images are the same if their paths are, or their bytes. Bytes are compared among images of equal
    size, unless these are many. Images in shards are all different.
    """
    indices = np.arange(sum(len(source) for source in sources))
    listings = [source.list_files() for source in sources]
    if None in listings:
        return indices
    first_copies = indices.copy()
    sizes = np.concatenate([sizes for _, sizes in listings])
    paths = [paths for paths, _ in listings if paths is not None]
    if len(paths) == len(sources):
        path_ids = pa.concat_arrays(paths).dictionary_encode(null_encoding="encode").indices
        path_ids = path_ids.to_numpy()
        _, first_by_path = np.unique(path_ids, return_index=True)
        first_copies = np.where(sizes < 0, indices, first_by_path[path_ids])

    candidates = np.flatnonzero((first_copies == indices) & (sizes > 0))
    _, size_ids, counts = np.unique(sizes[candidates], return_inverse=True, return_counts=True)
    candidates = candidates[counts[size_ids] > 1]
    if len(candidates) <= _MAX_IMAGES and sizes[candidates].sum() <= _MAX_BYTES:
        first_by_digest: dict[bytes, int] = {}
        with ThreadPoolExecutor(16) as pool:
            digests = pool.map(partial(_hash_image, sources), candidates.tolist())
            for index, digest in zip(candidates.tolist(), digests, strict=True):
                first_copies[index] = first_by_digest.setdefault(digest, index)
    return first_copies[first_copies]


def _hash_image(sources: tuple[Any, ...], index: int) -> bytes:
    """A hash of an image's bytes; of its name if it can't be read."""
    for source in sources:
        if index < len(source):
            break
        index -= len(source)
    try:
        content = source.get_content(index)
        if isinstance(content, str):
            content = read_file(content)
        return hashlib.blake2b(content, digest_size=16).digest()
    except BrokenImage:
        return source.get_name(index).encode()


# ---- of a dry run


class _Item(NamedTuple):
    """An image: index of its source, 0 for train or 1 for val, and its index there."""

    source: int
    image_index: int


def describe_duplicates(train: Any, val: Any) -> dict[str, str]:
    """Rows of the start table about two sources."""
    if train.fresh:
        return {}
    sources = (train, val)
    items = [_Item(0, index) for index in range(len(train))]
    items += [_Item(1, index) for index in range(len(val))]
    stride = ceil_div(len(items), MAX_THUMBNAILS)
    thumbnails, errors = _read_thumbnails(sources, items[::stride])

    first_copies: dict[_Item, _Item] = {}
    # Flat pictures, too, are duplicates if their files are equal.
    for item, first in zip(items, find_copies(train, val), strict=True):
        first_copies[item] = items[first]
    first_copies |= _find_similar(thumbnails)
    pairs = []
    for item, first_item in first_copies.items():
        if first_item != item and item not in errors:
            pairs.append((first_item, item))
    pairs.sort()

    text = _describe_pairs(sources, pairs)
    if len(thumbnails) < len(items):
        text += f" (of {len(thumbnails):,} of {len(items):,} images, which were looked at)"
    rows = {"duplicates": text}
    if errors:
        rows["unreadable"] = _describe_errors(errors)
    return rows


def _read_thumbnails(
    sources: tuple[Any, Any], items: list[_Item]
) -> tuple[dict[_Item, np.ndarray], dict[_Item, str]]:
    """Grey thumbnails float32[_SIDE, _SIDE] of images, and messages about those that can't be read."""
    # Imported late, since it imports torch.
    from common.distributed.environment import count_cores

    thumbnails: dict[_Item, np.ndarray] = {}
    errors: dict[_Item, str] = {}

    def read_thumbnail(item: _Item) -> None:
        source = sources[item.source]
        try:
            grey = source.load_image(item.image_index).convert("L")
            thumbnail = grey.resize((_SIDE, _SIDE), Image.Resampling.BOX)
            thumbnails[item] = np.asarray(thumbnail, np.float32)
        except BrokenImage as error:
            errors[item] = f"{source.get_name(item.image_index)}: {error}"

    with ThreadPoolExecutor(count_cores()) as pool:
        list(pool.map(read_thumbnail, items))
    return thumbnails, errors


def _describe_pairs(sources: tuple[Any, Any], pairs: list[tuple[_Item, _Item]]) -> str:
    """How many pairs there are between and within the sources, and the first ones by name."""
    texts = []
    for relation, source_ids in (
        ("between train and val", (0, 1)),
        ("within train", (0, 0)),
        ("within val", (1, 1)),
    ):
        related = [pair for pair in pairs if (pair[0].source, pair[1].source) == source_ids]
        if not related:
            continue
        names = []
        for first, second in related[:_MAX_NAMED_PAIRS]:
            first_name = sources[first.source].get_name(first.image_index)
            second_name = sources[second.source].get_name(second.image_index)
            names.append(f"{first_name} ~ {second_name}")
        if len(related) > _MAX_NAMED_PAIRS:
            names.append("...")
        texts.append(f"{len(related):,} {relation} ({', '.join(names)})")
    return ", ".join(texts) if texts else "none"


def _describe_errors(errors: dict[_Item, str]) -> str:
    """How many images can't be read, and the reasons of the first ones."""
    messages = [errors[item] for item in sorted(errors)]
    text = f"{len(messages):,}: {'; '.join(messages[:_MAX_NAMED_BROKEN])}"
    if len(messages) > _MAX_NAMED_BROKEN:
        text += f"; and {len(messages) - _MAX_NAMED_BROKEN:,} more"
    return text


def _find_similar(thumbnails: dict[_Item, np.ndarray]) -> dict[_Item, _Item]:
    """For each image that hardly differs from an earlier one, the first that it is similar to."""
    items = sorted(thumbnails)
    pixels = np.array([thumbnails[item] for item in items]).reshape(-1, _SIDE**2)
    detailed = np.flatnonzero(pixels.std(1) >= _MIN_DEVIATION)
    pixels = pixels[detailed] - 128
    squares = (pixels**2).sum(1)
    indices = np.arange(len(detailed))
    first = indices.copy()
    for start in range(0, len(detailed), _CHUNK_SIZE):
        chunk = slice(start, start + _CHUNK_SIZE)
        # Sums of squared differences, [_CHUNK_SIZE, n]
        differences = squares[chunk, None] + squares - 2 * pixels[chunk] @ pixels.T
        is_similar = differences <= _SIDE**2 * _MAX_DIFFERENCE**2
        is_similar &= indices > indices[chunk, None]
        is_new = is_similar.any(0) & (first == indices)
        first[is_new] = start + is_similar.argmax(0)[is_new]
    result = {}
    for index in np.flatnonzero(first != indices):
        result[items[detailed[index]]] = items[detailed[first[index]]]
    return result
