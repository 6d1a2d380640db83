"""Parts of a data set: the ones to train on and to evaluate, and a share that is held out."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from common.errors import Refused
from common.randomness import key_of, mix

_SPELLINGS = {
    "train": r"train(ing)?",
    "trainval": r"train(ing)?[ _-]*(and[ _-]*)?val(id|idation)?",
    "val": r"val|valid|validate|validation|dev|eval|evaluation",
    "test": r"test(s|ing)?",
}
_BEFORE = r"((images?|imgs?|data|dataset|seg)[ _-]+)?"
_BEHIND = r"([ _-]*(set|split|part|data|images?|imgs?|samples))?[ _-]*[0-9]*"
_KINDS = {kind: re.compile(f"{_BEFORE}({words}){_BEHIND}", re.IGNORECASE) for kind, words in _SPELLINGS.items()}

WHOLE, KEPT, HELD_OUT = "whole", "kept", "held out"


class Piece(NamedTuple):
    """A whole part of the data, or one side of a part that is divided by holding out a share."""

    name: str
    side: str = WHOLE


def kind_of(name: str) -> str:
    """train, trainval, val or test, in any usual spelling ("Training_Set", "test2017"); else ""."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), "")


def by_part(names: Sequence[str]) -> dict[str, list[str]]:
    """Absolute paths or URLs of files, by the kind of the part that they belong to.

    The first word for one in a file's name decides, or in the folders that not all files are in, the innermost first:
    `val-0000.tar`, `test/a/0000.tar`. Files without such a word are train, and so are all if they are of one kind.
    """
    groups: dict[str, list[str]] = {}
    paths = [(name.partition("?")[0] if "://" in name else name).split("/") for name in names]
    shared = next((depth for depth, places in enumerate(zip(*paths, strict=False)) if len({*places}) > 1), 0)
    for name, path in zip(names, paths, strict=True):
        words = [word for place in path[shared:][::-1] for word in re.split("[^a-zA-Z]+", place)]
        groups.setdefault(next(filter(None, map(kind_of, words)), "train"), []).append(name)
    return groups if len(groups) != 1 else {"train": [*names]}


def choose(data: str, labels: Mapping[str, str], split: str) -> tuple[Piece, Piece]:
    """The pieces to train on and to evaluate: the part `split`, by default the validation part.

    `labels` maps the name of each part to how messages call it. If there is no validation part, a share of the training part
    is held out. A test part is evaluated only if `split` says so: results on data that chose the model would be too good. If
    a test part is evaluated, a part called trainval is trained on, if there is one. Raises `Refused`.
    """
    evaluated = _find(data, labels, split)
    kinds = ("train", "trainval") if not evaluated or kind_of(evaluated) == "val" else ("trainval", "train")
    trained = _only(data, labels, kinds[0]) or _only(data, labels, kinds[1])
    if trained is None:
        advice = "rename one to train, or give a folder or file alone"
        raise Refused(f"--data {data}: no part to train on, only {', '.join(labels)}; {advice}")
    if evaluated and (kind_of(trained), kind_of(evaluated)) != ("trainval", "val"):
        return Piece(trained), Piece(evaluated)
    return Piece(trained, KEPT), Piece(trained, HELD_OUT)


def choose_part(data: str, labels: Mapping[str, str], split: str, held_out: bool) -> tuple[Piece]:
    """The piece to evaluate a trained model on: `split`, by default val, else test, else the only part.

    `held_out` says that the model was trained on these data without a held-out share: then only that share is evaluated.
    Raises `Refused`.
    """
    if len(labels) == 1 and split in ("", "all") and (split or not held_out):
        return (Piece(*labels),)
    found = _find(data, labels, split)
    trained = _only(data, labels, "train") or _only(data, labels, "trainval")
    if found is None and (split or held_out) and trained:
        return (Piece(trained, HELD_OUT),)
    found = found or _only(data, labels, "test")
    if found is None:
        raise Refused(f"--data {data}: no part to validate on; name one by --split: {', '.join(labels)}")
    has_val = any(kind_of(name) == "val" for name in labels)
    return (Piece(found, KEPT if held_out and found == trained and not has_val else WHOLE),)


def random_numbers_of(paths: pa.LargeBinaryArray, key: int) -> np.ndarray:
    """uint64[N] random numbers, each a function of its path and `key` alone."""
    hashes = (hashlib.blake2b(path.as_py(), digest_size=8).digest() for path in paths)
    return mix(np.frombuffer(b"".join(hashes), "<u8"), key)


def held_out(
    numbers: np.ndarray, strata: np.ndarray | None, share: float, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows held out: the `share` of every stratum with the smallest numbers.

    `numbers` uint64[N]; `strata` int64[N], or None for one stratum. A stratum keeps at least one row to train on.
    Rows with equal `groups` int64[N] are on the same side, so that strata have nearly their share.
    """
    if not 0 < share < 1:
        raise Refused(f"--val_share {share}: must lie between 0 and 1, since the data has no part to evaluate on")
    of = "{} images" if strata is None else "at most {} images per class"
    strata = np.zeros(len(numbers), np.int64) if strata is None else strata
    counts = np.bincount(strata)
    limits = np.minimum((share * counts + 0.5).astype(np.int64), counts - 1)
    is_grouped = np.zeros(len(numbers), bool)
    out = np.zeros(len(numbers), bool)
    if groups is not None:
        _, group_ids, group_sizes = np.unique(groups, return_inverse=True, return_counts=True)
        is_grouped = group_sizes[group_ids] > 1
        rows = np.flatnonzero(is_grouped)
        out[rows] = _hold_out_groups(numbers[rows], strata[rows], group_ids[rows], share, counts)
        limits = limits - np.bincount(strata[out], minlength=len(counts))
        of += f", in groups of {group_sizes.min():,} or more,"
    by_stratum = np.lexsort((numbers, is_grouped, strata))
    place = np.empty(len(numbers), np.int64)  # of each row within its stratum, grouped ones last
    place[by_stratum] = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    out |= ~is_grouped & (place < limits[strata])
    if not out.any():
        raise Refused(f"--val_share {share} of {of.format(counts.max())} holds out none; raise it")
    return np.flatnonzero(~out), np.flatnonzero(out)


def _hold_out_groups(
    numbers: np.ndarray, strata: np.ndarray, groups: np.ndarray, share: float, counts: np.ndarray
) -> np.ndarray:
    """bool[N]: the rows of groups to hold out. `counts` are all rows of each stratum, one of which stays.

    Greedy: of the groups in random order, each that brings the strata closer to their share, summed over strata.
    """
    num_strata = len(counts)
    num_groups = int(groups.max(initial=-1)) + 1
    smallest = np.full(num_groups, np.iinfo(np.uint64).max)
    np.minimum.at(smallest, groups, numbers)
    order = np.argsort(mix(smallest, key_of("groups")), kind="stable")
    rank = np.argsort(order)
    cells, sizes = np.unique(rank[groups] * num_strata + strata, return_counts=True)
    cell_rank, cell_stratum = np.divmod(cells, num_strata)
    bounds = np.searchsorted(cell_rank, np.arange(num_groups + 1)).tolist()
    cell_strata = cell_stratum.tolist()
    cell_sizes = sizes.tolist()
    missing = (share * np.bincount(strata, minlength=num_strata)).tolist()
    room = (counts - 1).tolist()
    is_out = np.zeros(num_groups, bool)
    for i in range(num_groups):
        histogram = list(
            zip(cell_strata[bounds[i] : bounds[i + 1]], cell_sizes[bounds[i] : bounds[i + 1]], strict=True)
        )
        gain = sum(abs(missing[stratum]) - abs(missing[stratum] - size) for stratum, size in histogram)
        if gain > 0 and all(size <= room[stratum] for stratum, size in histogram):
            is_out[i] = True
            for stratum, size in histogram:
                missing[stratum] -= size
                room[stratum] -= size
    return is_out[rank[groups]]


def join_groups(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """int64[N]: rows that are alike in either of two groupings, non-negative int64[N], also by way of others, are a group."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    num_left = int(left.max()) + 1
    num_nodes = num_left + int(right.max()) + 1
    edges = coo_array((np.ones(len(left), bool), (left, num_left + right)), shape=(num_nodes, num_nodes))
    return connected_components(edges, directed=False)[1][left].astype(np.int64)


def describe(data: str, source) -> str:
    """One line about the evaluated images: `flowers: test/, 72 images of 5 classes`."""
    return f"{data}: {source.part}, {len(source):,} images of {len(source.classes)} classes"


def _find(data: str, labels: Mapping[str, str], split: str) -> str | None:
    """The part that `split` names or is a kind of. Only without `split`, or for val, it may be None."""
    alike = [name for name in labels if name.casefold() == split.casefold()]
    if split in labels or len(alike) == 1:
        return split if split in labels else alike[0]
    kind = kind_of(split or "val")
    found = kind and _only(data, labels, kind)
    if not found and kind != "val":
        raise Refused(f"--split {split}: --data {data} has no such part; there is {', '.join(labels)}")
    return found


def _only(data: str, labels: Mapping[str, str], kind: str) -> str | None:
    names = [name for name in labels if kind_of(name) == kind]
    if len(names) > 1:
        several = " and ".join(labels[name] for name in names)
        advice = "keep one, or name it by --split" if kind in ("val", "test") else "keep one of them there"
        raise Refused(f"--data {data}: {several} could each be the part {kind}; {advice}")
    return names[0] if names else None
